"""Heads that guess for a tiny model, written as files have them: of random weights, which are right by chance only."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

TAPS = [0, 1, 3]
KNOWN = 100  # tokens of the head's vocabulary


def values(generator: torch.Generator, *shape: int, scale: float = 0.2) -> Tensor:
    return torch.randn(shape, generator=generator) * scale


def layer_tensors(model: Path, new: str, seed: int = 1) -> dict[str, Tensor]:
    """The tensors of the model's last layer, called `new`, changed at random."""
    generator = torch.Generator().manual_seed(seed)
    tensors = load_file(model / "model.safetensors")
    last = max(int(name.split(".")[2]) for name in tensors if name.startswith("model.layers."))
    old = f"model.layers.{last}."
    return {
        new + name.removeprefix(old): t + values(generator, *t.shape, scale=0.02)
        for name, t in tensors.items()
        if name.startswith(old)
    }


def write_head(folder: Path, model: Path, tensors: dict[str, Tensor], **config: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    save_file({name: t.contiguous() for name, t in tensors.items()}, folder / "model.safetensors", {"format": "pt"})
    given = json.loads((model / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**given, "num_hidden_layers": 1, **config}))
    return folder


def eagle1(model: Path, folder: Path, **config: Any) -> Path:
    """A head of EAGLE-1 for the Llama at `model`."""
    size = json.loads((model / "config.json").read_text())["hidden_size"]
    generator = torch.Generator().manual_seed(2)
    tensors = {n: t for n, t in layer_tensors(model, "layers.0.").items() if "input_layernorm" not in n}
    tensors |= {"fc.weight": values(generator, size, 2 * size), "fc.bias": values(generator, size)}
    return write_head(folder, model, tensors, **config)


def eagle3(model: Path, folder: Path, layer: str) -> Path:
    """A head of EAGLE-3, whose layer's names begin with `layer`; it knows KNOWN tokens and reads the layers TAPS."""
    config = json.loads((model / "config.json").read_text())
    size, generator = config["hidden_size"], torch.Generator().manual_seed(3)
    tensors = layer_tensors(model, layer)
    for part in "qkv":
        name = f"{layer}self_attn.{part}_proj.weight"
        tensors[name] = values(generator, len(tensors[name]), 2 * size)
    tensors |= {f"{layer}hidden_norm.weight": 1 + values(generator, size), "norm.weight": 1 + values(generator, size)}
    vocab = config["vocab_size"]
    ids = torch.randperm(vocab, generator=generator)[:KNOWN].sort().values
    tensors |= {"fc.weight": values(generator, size, 3 * size), "lm_head.weight": values(generator, KNOWN, size)}
    tensors |= {"d2t": ids - torch.arange(KNOWN), "t2d": torch.isin(torch.arange(vocab), ids)}
    more = {"draft_vocab_size": KNOWN, "eagle_config": {"eagle_aux_hidden_state_layer_ids": TAPS}}
    return write_head(folder, model, tensors, **more)


def medusa(model: Path, folder: Path, **config: Any) -> Path:
    """Three Medusa heads of two blocks."""
    given, generator = json.loads((model / "config.json").read_text()), torch.Generator().manual_seed(4)
    size, vocab = given["hidden_size"], given["vocab_size"]
    tensors: dict[str, Tensor] = {}
    for head in range(3):
        tensors |= {f"{head}.{i}.linear.weight": values(generator, size, size) for i in range(2)}
        tensors |= {f"{head}.{i}.linear.bias": values(generator, size) for i in range(2)}
        tensors[f"{head}.2.weight"] = values(generator, vocab, size)
    write_head(folder, model, tensors)
    (folder / "config.json").write_text(json.dumps({"medusa_num_heads": 3, "medusa_num_layers": 2, **config}))
    return folder


def further(directory: Path, name: str) -> None:
    """Adds a layer that predicts further tokens to a checkpoint, in the words of its family."""
    config, tensors = json.loads((directory / "config.json").read_text()), load_file(directory / "model.safetensors")
    size, generator, mimo = config["hidden_size"], torch.Generator().manual_seed(5), name.startswith("MiMo")
    new = "model.mtp_layers.0." if mimo else f"model.layers.{config['num_hidden_layers']}."
    tensors |= layer_tensors(directory, new)
    for own in (
        ("token_layernorm", "hidden_layernorm", "final_layernorm") if mimo else ("enorm", "hnorm", "shared_head.norm")
    ):
        tensors[f"{new}{own}.weight"] = 1 + values(generator, size)
    tensors[f"{new}{'input_proj' if mimo else 'eh_proj'}.weight"] = values(generator, size, 2 * size)
    if not mimo:  # files repeat what is shared
        tensors[f"{new}embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
        tensors[f"{new}shared_head.head.weight"] = tensors["lm_head.weight"].clone()
    save_file({n: t.contiguous() for n, t in tensors.items()}, directory / "model.safetensors", {"format": "pt"})
    config |= {"architectures": [name], "num_nextn_predict_layers": 1}
    (directory / "config.json").write_text(json.dumps(config))
