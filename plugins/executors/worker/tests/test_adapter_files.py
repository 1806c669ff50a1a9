"""Adapters from strangers: whatever lies at a path, the answer is quick, typed, and tells nothing of other files."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from lmkit.api import CheckpointError, ModelInfo
from lmkit_decoders import DecoderConfig
from lmkit_decoders.describe import ConfigReader, decoder_info
from lmkit_worker.loading.adapter import open_adapter
from lmkit_worker.loading.adapter_files import CONFIG, WEIGHTS
from safetensors.torch import save_file

CFG = DecoderConfig(
    vocab_size=31, hidden_size=16, intermediate_size=24, num_q_heads=4, num_kv_heads=2, head_dim=4,
    windows=(None, None), max_length=64, norm_eps=1e-6, activation="silu", rope={"rope_type": "default", "theta": 1e2},
)  # fmt: skip
INFO: ModelInfo = decoder_info("Toy", ConfigReader({}), CFG)
PLAIN = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["down_proj"]}
NAME = "base_model.model.model.layers.0.mlp.down_proj.lora_{}.weight"


def adapter(folder: Path, **changes: object) -> Path:
    folder.mkdir()
    tensors = {NAME.format(side): torch.ones(shape) for side, shape in (("A", (4, 24)), ("B", (16, 4)))}
    save_file(tensors, folder / WEIGHTS)
    (folder / CONFIG).write_text(json.dumps({**PLAIN, **changes}))
    return folder


def sparse(path: Path, size: int) -> None:
    path.unlink()
    with path.open("wb") as file:
        file.truncate(size)


def header(path: Path, text: bytes, size: int | None = None) -> None:
    path.write_bytes(struct.pack("<Q", len(text) if size is None else size) + text)


def pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def linked(path: Path, target: str) -> None:
    path.unlink()
    path.symlink_to(target)


def directory(path: Path) -> None:
    path.unlink()
    path.mkdir()


HOSTILE: dict[str, Callable[[Path], object]] = {
    "weights of 8 TB": lambda p: sparse(p / WEIGHTS, 8 << 40),
    "weights of 1 GB": lambda p: sparse(p / WEIGHTS, 1 << 30),
    "config of 3 GB": lambda p: sparse(p / CONFIG, 3 << 30),
    "weights are a pipe": lambda p: pipe(p / WEIGHTS),
    "config is a pipe": lambda p: pipe(p / CONFIG),
    "weights are a device": lambda p: linked(p / WEIGHTS, "/dev/zero"),
    "config is a device": lambda p: linked(p / CONFIG, "/dev/zero"),
    "config is a directory": lambda p: directory(p / CONFIG),
    "weights link to themselves": lambda p: linked(p / WEIGHTS, WEIGHTS),
    "no config": lambda p: (p / CONFIG).unlink(),
    "empty weights": lambda p: (p / WEIGHTS).write_bytes(b""),
    "a header of 2^63 bytes": lambda p: header(p / WEIGHTS, b"{}", 1 << 63),
    "a header longer than the file": lambda p: header(p / WEIGHTS, b"{}", 1000),
    "a header that is a list": lambda p: header(p / WEIGHTS, b"[]"),
    "20,000 unknown tensors": lambda p: header(
        p / WEIGHTS,
        json.dumps({
            f"base_model.model.model.layers.{i}.mlp.up_prof.lora_A.weight":
            {"dtype": "F32", "shape": [0, 24], "data_offsets": [0, 0]} for i in range(20_000)
        }).encode(),
    ),
    "a name of a megabyte": lambda p: header(
        p / WEIGHTS,
        json.dumps({"model." * 160_000 + "down_proj": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}}).encode(),
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", HOSTILE)
def test_files_that_are_no_adapter(what: str, tmp_path: Path) -> None:
    path = adapter(tmp_path / "a")
    assert open_adapter(path, INFO, 16).entries
    HOSTILE[what](path)
    with pytest.raises(CheckpointError) as caught:
        open_adapter(path, INFO, 16)
    assert len(str(caught.value)) < 4000


@pytest.mark.parametrize(
    "changes",
    [
        {"lora_alpha": 10**400}, {"lora_alpha": -(10**400)}, {"lora_alpha": float("inf")}, {"lora_alpha": "8"},
        {"lora_alpha": [8]}, {"lora_alpha": True}, {"modules_to_save": [["x"]]}, {"modules_to_save": [{}]},
        {"modules_to_save": {"x": 1}}, {"modules_to_save": [None]}, {"modules_to_save": ["x" * 100_000]},
        {"r": 10**400}, {"r": {}}, {"r": 0}, {"r": -4}, {"r": 4.0}, {"use_dora": "x" * 100_000}, {"peft_type": []},
        {"target_parameters": [[[]]]}, {"rank_pattern": {"a": {}}}, {"base_model_name_or_path": "x" * 100_000, "r": 3},
    ],
    ids=lambda c: str(c)[:40],
)  # fmt: skip
def test_settings_of_any_shape(changes: dict[str, object], tmp_path: Path) -> None:
    with pytest.raises(CheckpointError) as caught:
        open_adapter(adapter(tmp_path / "a", **changes), INFO, 16)
    assert len(str(caught.value)) < 1000


def test_a_path_without_an_adapter_tells_nothing_of_what_is_there(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("secret")
    said = set()
    for name in ("empty", "file", "file/x", "nowhere", "x" * 300):
        with pytest.raises(CheckpointError) as caught:
            open_adapter(tmp_path / name, INFO, 16)
        said.add(str(caught.value))
    assert len(said) == 1
    assert str(tmp_path) not in said.pop()


def test_values_that_overflow_the_model_dtype_are_found(tmp_path: Path) -> None:
    path = adapter(tmp_path / "a")
    save_file({NAME.format(side): torch.full(s, 1e30) for side, s in (("A", (4, 24)), ("B", (16, 4)))}, path / WEIGHTS)
    with pytest.raises(CheckpointError, match="not finite"):
        open_adapter(path, INFO, 16).read(torch.float16)
