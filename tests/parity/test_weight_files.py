"""Weight files as they lie around: what transformers reads of a directory, read alike."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from lmkit.api import CheckpointError, CheckpointOptions, WeightMismatch
from lmkit.checkpoint import INDEX, open_checkpoint, stamp_of
from lmkit_testing.checkpoints import tiny_checkpoint
from lmkit_testing.model import deviation, load_tiny, prompt, reference
from lmkit_testing.specs import find_plugin
from lmkit_testing.steps import ModelDriver
from lmkit_worker.loading.safetensors import SafetensorsLoader
from safetensors.torch import load_file, save_file

WHOLE = "model.safetensors"
IDS = prompt(97)


def renamed(path: Path, change: Callable[[str], str], also: dict[str, torch.Tensor] | None = None) -> None:
    tensors = {change(name): tensor for name, tensor in load_file(path / WHOLE).items()}
    save_file({**tensors, **(also or {})}, path / WHOLE, {"format": "pt"})


def prefix_in(path: Path) -> str:
    """What names of the base model's tensors begin with."""
    return "gpt_neox." if "GPTNeoX" in (path / "config.json").read_text() else "model."


def stale_index(path: Path) -> None:
    """After a merge over a download of shards."""
    names = dict.fromkeys(load_file(path / WHOLE), "model-00001-of-00002.safetensors")
    (path / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": names}))


def two_sets(path: Path) -> None:
    stale_index(path)
    half = dict(list(load_file(path / WHOLE).items())[:3])
    save_file({name: tensor + 1 for name, tensor in half.items()}, path / "model-00001-of-00002.safetensors")


def shards(path: Path) -> None:
    """With files of other layouts beside them, and an adapter."""
    tensors = list(load_file(path / WHOLE).items())
    parts = {"model-00001-of-00002.safetensors": tensors[:5], "model-00002-of-00002.safetensors": tensors[5:]}
    (path / WHOLE).unlink()
    for file, members in parts.items():
        save_file(dict(members), path / file, {"format": "pt"})
    names = {name: file for file, members in parts.items() for name, _ in members}
    (path / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": names}))
    (path / "original").mkdir()
    for other in ("consolidated.safetensors", "adapter_model.safetensors", "original/consolidated.safetensors"):
        save_file({"tok_embeddings.weight": torch.ones(2)}, path / other)
    (path / "pytorch_model.bin.index.json").write_text("{}")


BUFFERS = {
    "model.rotary_emb.inv_freq": torch.ones(4), "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4),
    "model.embeddings.position_ids": torch.arange(3), "model.layers.1.self_attn.masked_bias": torch.ones(()),
}  # fmt: skip
FORMS: dict[str, Callable[[Path], None]] = {
    "a whole file beside a stale index": stale_index,
    "a whole file beside some shards": two_sets,
    "shards beside other layouts": shards,
    "of the base class": lambda path: renamed(path, lambda name: name.removeprefix(prefix_in(path))),
    "of a wrapper": lambda path: renamed(path, lambda name: prefix_in(path) + name),
    "a part of the base class": lambda path: renamed(
        path, lambda name: name.removeprefix(prefix_in(path)) if ".layers.0." in name else name
    ),
    "buffers of older releases": lambda path: renamed(path, str, BUFFERS),
}


FAMILIES = ("llama", "GPTNeoXForCausalLM", "Qwen3MoeForCausalLM")
CASES = [(family, form) for family in FAMILIES for form in FORMS]
CASES.remove(("GPTNeoXForCausalLM", "of a wrapper"))  # whose head transformers does not find


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("family", "form"), CASES)
def test_what_is_read_is_what_transformers_reads(family: str, form: str, tmp_path: Path) -> None:
    values = {"num_experts": 2, "num_experts_per_tok": 2, "moe_intermediate_size": 32} if "Moe" in family else {}
    path = tiny_checkpoint(family, tmp_path / "base", **values)
    expected = logits_of(path)
    FORMS[form](path)
    assert deviation(logits_of(path), expected) < 1e-4
    name = "LlamaForCausalLM" if family == "llama" else family
    loaded = load_tiny(path, find_plugin(f"model:{name}")[2].target, "float32")
    (found,) = ModelDriver(loaded, "float32").step([(0, IDS)])
    assert deviation(found, expected) < 1e-4


def logits_of(path: Path) -> torch.Tensor:
    with torch.no_grad():
        logits: torch.Tensor = reference(path, "float32")(torch.tensor([IDS])).logits[0]
    return logits


def test_what_is_torn_or_foreign_is_named(tmp_path: Path) -> None:
    path = tiny_checkpoint("llama", tmp_path)
    target = find_plugin("model:LlamaForCausalLM")[2].target
    renamed(path, str, {"model.layers.0.extra.weight": torch.ones(2)})
    with pytest.raises(WeightMismatch, match=r"extra \(1\): model\.layers\.0\.extra\.weight"):
        load_tiny(path, target, "float32")
    renamed(path, lambda name: name.replace("extra", "self_attn"))
    shards(path)
    (path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"model-00002-of-00002\.safetensors, which is missing"):
        load_tiny(path, target, "float32")
    data = (path / "model-00001-of-00002.safetensors").read_bytes()
    (path / "model-00002-of-00002.safetensors").write_bytes(data[: len(data) // 2])
    with pytest.raises(CheckpointError, match="damaged"):
        load_tiny(path, target, "float32")


def pipe(path: Path) -> None:
    os.mkfifo(path)


IRREGULAR: dict[str, tuple[Callable[[Path], None], str]] = {
    "a pipe": (pipe, "not a regular file"),
    "a device": (lambda path: path.symlink_to("/dev/zero"), "outside of the checkpoint"),
    "a link to elsewhere": (lambda path: path.symlink_to("/etc/passwd"), "outside of the checkpoint"),
    "a link to itself": (lambda path: path.symlink_to(path.name), "missing|cannot be read|no .*safetensors"),
    "a folder": (lambda path: path.mkdir(), "not a regular file"),
}


@pytest.mark.parametrize("what", IRREGULAR)
@pytest.mark.parametrize("sharded", [False, True])
def test_weights_that_are_no_files_are_refused_at_once(what: str, sharded: bool, tmp_path: Path) -> None:
    make, words = IRREGULAR[what]
    (tmp_path / "config.json").write_text("{}")
    file = tmp_path / ("part.safetensors" if sharded else WHOLE)
    make(file)
    if sharded:
        (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"a": file.name}}))
    with pytest.raises(CheckpointError, match=words):
        open_checkpoint(str(tmp_path), CheckpointOptions())


@pytest.mark.parametrize("what", ["a pipe", "a device", "a folder"])
def test_new_weights_that_are_no_files_are_refused_at_once(what: str, tmp_path: Path) -> None:
    file = tmp_path / "new.safetensors"
    IRREGULAR[what][0](file)
    with pytest.raises(CheckpointError):
        stamp_of(file)
    with pytest.raises(CheckpointError):
        list(SafetensorsLoader().header(file))
