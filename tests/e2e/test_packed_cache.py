"""Packed weights kept on disk: the same model bit for bit, from a file that is whole, or packed anew with a warning."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from lmkit.api import ConfigError
from lmkit.config import from_options
from lmkit.plugins.resolve import resolve
from lmkit_layers.linear import Linear
from lmkit_testing.steps import ModelDriver, plain_platform
from lmkit_worker.loaded import LoadedModel
from lmkit_worker.loading import load_model

CASES = [("bfloat16", "none"), ("float32", "none"), ("bfloat16", "int8"), ("bfloat16", "int4")]


def load(folder: Path | None, dtype: str = "bfloat16", quantization: str = "none") -> LoadedModel:
    config = from_options({"model": "demo", "dtype": dtype, "quantization": quantization, "attention": "torch"})
    resolved, checkpoint, info = resolve(config)
    cache = None if folder is None else str(folder)
    return load_model(resolved, checkpoint, info, plain_platform(), torch.device("cpu"), packed_cache=cache)


def logits(loaded: LoadedModel, dtype: str = "bfloat16") -> torch.Tensor:
    (found,) = ModelDriver(loaded, dtype, num_rows=1, block_size=16).step([(0, list(range(100, 120)))])
    return found


def packs(loaded: LoadedModel) -> int:
    """Linears that were packed, not restored."""
    return sum(isinstance(m, Linear) and m.pack_seconds > 0 for m in loaded.model.modules())


@pytest.mark.parametrize(("dtype", "quantization"), CASES)
@pytest.mark.one_in(4)
def test_the_same_model_without_packing(dtype: str, quantization: str, tmp_path: Path) -> None:
    first, kept = load(None, dtype, quantization), load(tmp_path, dtype, quantization)
    assert packs(first) == packs(kept) > 0
    (file,) = tmp_path.iterdir()
    restored = load(tmp_path, dtype, quantization)
    assert packs(restored) == 0
    assert restored.weight_bytes == first.weight_bytes
    assert torch.equal(logits(restored, dtype), logits(first, dtype))
    assert not restored.warnings
    assert list(tmp_path.iterdir()) == [file]


def test_other_choices_are_other_files(tmp_path: Path) -> None:
    for dtype, quantization in CASES:
        load(tmp_path, dtype, quantization)
    assert len(list(tmp_path.iterdir())) == len(CASES)


@pytest.mark.parametrize("damage", ["a number", "a name", "a type", "one bit", "cut", "empty"])
@pytest.mark.one_in(6)
def test_damage_is_found(damage: str, tmp_path: Path) -> None:
    good = load(tmp_path)
    (file,) = tmp_path.iterdir()
    data = file.read_bytes()
    half = len(data) // 2
    damaged = {
        "a number": data.replace(b'\\"n\\": 1', b'\\"n\\": 2', 1),  # of outputs: kernels would believe it
        "a name": data.replace(b'"layers.1.attn.o.data"', b'"layers.9.attn.o.data"', 1),
        "a type": data.replace(b'"U8"', b'"I8"', 1),
        "one bit": data[:half] + bytes([data[half] ^ 1]) + data[half + 1 :],
        "cut": data[:half],
        "empty": b"",
    }[damage]
    assert damaged != data
    file.write_bytes(damaged)
    again = load(tmp_path)
    assert any("packed anew" in line and str(file) in line for line in again.warnings), again.warnings
    assert torch.equal(logits(again), logits(good))
    assert packs(load(tmp_path)) == 0, "a good file has taken its place"


def test_a_file_is_whole_or_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError("no space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", full)
        loaded = load(tmp_path)
    assert any("no space left" in line for line in loaded.warnings)
    assert not list(tmp_path.iterdir())


def test_a_folder_that_is_none(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be kept in"):
        load(tmp_path / "file")
