"""Writes a checkpoint in the format: python -m lmkit_quantization_mulaw.convert FOLDER OUT"""

import json
import shutil
import sys
from pathlib import Path

from safetensors.torch import load_file, save_file

from lmkit_quantization_mulaw.scheme import quantized

MU = 255.0


def convert(folder, out):
    """Linears of layers are quantized; embeddings, the head and norms stay as they are."""
    shutil.copytree(folder, out, ignore=shutil.ignore_patterns("*.safetensors"))
    for file in Path(folder).glob("*.safetensors"):
        tensors = {}
        for name, tensor in load_file(file).items():
            layer, _, kind = name.rpartition(".")
            if kind == "weight" and layer.endswith("_proj"):
                tensors |= {f"{layer}.{key}": value for key, value in quantized(tensor, MU).items()}
            else:
                tensors[name] = tensor
        save_file(tensors, Path(out) / file.name)
    config = json.loads((Path(out) / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mulaw", "mu": MU, "skip": ["lm_head"]}
    (Path(out) / "config.json").write_text(json.dumps(config, indent=2))


if __name__ == "__main__":
    convert(*sys.argv[1:])
