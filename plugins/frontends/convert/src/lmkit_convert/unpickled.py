"""Reads one file of pickles or of tensorizer and writes its tensors as safetensors.

It is the process that `lmkit convert` starts for each.

python -P -m lmkit_convert.unpickled SOURCE TARGET: prints the names of the tensors as JSON, or {"error": ...}.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping
from typing import Any

import torch
from safetensors.torch import save_file

INSIDE = ("state_dict", "model_state_dict", "model", "module")  # where trainers put the tensors


def tensors_of(content: Any) -> dict[str, torch.Tensor]:
    """Those of a file, by name. Raises ValueError."""
    for key in INSIDE:
        if isinstance(content, Mapping) and isinstance(content.get(key), Mapping):
            content = content[key]
    if not isinstance(content, Mapping) or not content:
        raise ValueError("it holds no tensors by name")
    for name, value in content.items():
        if not isinstance(name, str) or not isinstance(value, torch.Tensor):
            raise ValueError(f"{str(name)[:80]!r} is no tensor but of type {type(value).__name__}")
        if value.layout != torch.strided or value.is_quantized:
            raise ValueError(f"{name} is stored as {value.layout}, which safetensors cannot hold")
    return dict(content)


def read(source: str) -> Any:
    """What a file holds. Tensors of tensorizer are compared with their hashes: a file cut short is no error else."""
    if not source.endswith(".tensors"):
        return torch.load(source, map_location="cpu", weights_only=True, mmap=True)
    from tensorizer import TensorDeserializer

    with TensorDeserializer(source, device="cpu", lazy_load=True, num_readers=1, verify_hash=True) as found:
        return {name: tensor for _, _, name, tensor in found.read_tensors()}


def main(source: str, target: str) -> None:
    try:
        # Tensors may share memory there, and may not in the other format.
        tensors = {name: value.detach().contiguous().clone() for name, value in tensors_of(read(source)).items()}
        save_file(tensors, target, {"format": "pt"})
    except Exception as e:  # whatever a stranger's file makes the library raise is said
        unknown = re.search(r"GLOBAL ([\w.]{1,200})", str(e))  # at the end of what the library says of many lines
        error = f"it needs {unknown[1]}, which is no tensor" if unknown else f"{type(e).__name__}: {str(e)[:500]}"
        print(json.dumps({"error": error}))
        return
    print(json.dumps({name: tensor.nbytes for name, tensor in tensors.items()}))


if __name__ == "__main__":
    main(*sys.argv[1:])
