"""Small random checkpoints, written with `transformers`, for tests."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lmkit_bench.shapes import COMMON, FAMILIES, byte_tokenizer, randomize, write_checkpoint

__all__ = [
    "COMMON", "FAMILIES", "byte_tokenizer", "fused", "half_open", "randomize", "rename", "tiny_checkpoint",
    "without_gates",
]  # fmt: skip


def tiny_checkpoint(
    family: str, directory: Path | str, *, seed: int = 0, dtype: str = "float32", **overrides: Any
) -> Path:
    """A random two-layer model of `family`: a key of FAMILIES, or an architecture that transformers has.

    Keyword arguments replace configuration values; of a multimodal model those of its text part, beside `vision_config`
    and the like. Weights are larger than at initialisation, and norms and biases
    random, so that logits differ clearly between tokens. Returns `directory`.
    """
    values = FAMILIES[family][2] if family in FAMILIES else {}
    return write_checkpoint(family, {**COMMON, **values, **overrides}, Path(directory), seed, dtype, spread=0.3)


def rename(directory: Path, names: Mapping[str, str], config: Mapping[str, Any], change: Any = None) -> None:
    """Gives a checkpoint the names of tensors and the keys that its own files have (None: which they have not); the
    library's stays beside it.

    `change` takes the tensors, by the library's names, and gives others.
    """
    import json
    import shutil

    from safetensors.torch import load_file, save_file

    shutil.copytree(directory, directory / "transformers")
    tensors = load_file(directory / "model.safetensors")
    tensors = change(tensors) if change else tensors
    for old, new in names.items():
        tensors = {name.replace(old, new): tensor.contiguous() for name, tensor in tensors.items()}
    save_file(tensors, directory / "model.safetensors")
    before = json.loads((directory / "config.json").read_text())
    after = {key: value for key, value in {**before, **config}.items() if key not in config or value is not None}
    (directory / "config.json").write_text(json.dumps(after))


def fused(tensors: Mapping[str, Any], parts: tuple[str, ...], name: str) -> dict[str, Any]:
    """`tensors` with one, `name`, in place of those called `parts`."""
    import torch

    found = dict(tensors)
    for first in [key for key in tensors if f".{parts[0]}." in key]:
        pieces = [found.pop(first.replace(parts[0], part)) for part in parts]
        found[first.replace(parts[0], name)] = torch.cat(pieces)
    return found


def half_open(directory: Path) -> None:
    """Sets the gates of shared experts to zero."""
    from safetensors.torch import load_file, save_file

    tensors = load_file(directory / "model.safetensors")
    gates = {name: tensor * 0 for name, tensor in tensors.items() if "shared_expert_gate" in name}
    save_file({**tensors, **gates}, directory / "model.safetensors", {"format": "pt"})


def without_gates(tensors: Mapping[str, Any]) -> dict[str, Any]:
    """The same shared experts, without gates that are half open."""
    halved = {name: tensor / 2 if "shared_expert.down" in name else tensor for name, tensor in tensors.items()}
    return {name: tensor for name, tensor in halved.items() if "shared_expert_gate" not in name}
