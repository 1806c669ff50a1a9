"""The loader of random weights: no file is needed, and everything follows from the seed."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from lmkit.api import CheckpointError, SelectionError, UnsupportedModel
from lmkit.config import from_options
from lmkit.plugins.resolve import resolve
from lmkit_testing.checkpoints import tiny_checkpoint
from lmkit_testing.model import drive_default, installed
from lmkit_worker.loading.dummy import PERIOD, SPREAD, DummyLoader

TOKENS = [3, 17, 10, 42, 8, 27, 20, 5]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint without its weights."""
    return without_weights("LlamaForCausalLM", tmp_path_factory.mktemp("plain"))


def without_weights(architecture: str, folder: Path, **values: Any) -> Path:
    made = tiny_checkpoint(architecture, folder, **values)
    (made / "model.safetensors").unlink()
    return made


def logits(folder: Path, **options: Any) -> torch.Tensor:
    return drive_default(folder, "float32", "native", loader="dummy", **options).run(0, TOKENS, 5)


def test_only_who_names_it_gets_it(folder: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no \*\.safetensors"):
        resolve(from_options({"model": str(folder)}), installed())
    plan, checkpoint, _ = resolve(from_options({"model": str(folder), "loader": "dummy"}), installed())
    choice = plan.choice("loader")
    assert choice is not None
    assert (choice.name, checkpoint.files, checkpoint.nbytes) == ("dummy", (), 0)


def test_everything_follows_from_the_seed(folder: Path) -> None:
    first = logits(folder)
    assert torch.isfinite(first).all()
    assert first.std() > 0
    assert torch.equal(first, logits(folder))
    assert not torch.equal(first, logits(folder, **{"loader.dummy.seed": 7}))


def test_weights_that_are_there_are_not_read(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "broken")
    (tmp_path / "broken" / "model.safetensors").write_bytes(b"no header")
    assert torch.equal(logits(tmp_path / "broken"), logits(folder))


@pytest.mark.parametrize("quantization", ["int4", "int8", "fp8"])
def test_weights_are_quantized_as_those_of_files_are(folder: Path, quantization: str) -> None:
    got, plain = logits(folder, quantization=quantization), logits(folder)
    assert not torch.equal(got, plain)
    assert torch.nn.functional.cosine_similarity(got, plain, dim=-1).min() > 0.9


@pytest.mark.parametrize(
    ("architecture", "values"),
    [
        ("Qwen3MoeForCausalLM", {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}),
        ("GPT2LMHeadModel", {}),
        ("MambaForCausalLM", {}),
        ("DeepseekV3ForCausalLM", {}),
    ],
)
def test_shapes_are_those_of_the_architecture(architecture: str, values: dict[str, Any], tmp_path: Path) -> None:
    assert torch.isfinite(logits(without_weights(architecture, tmp_path, **values))).all()


def test_quantized_checkpoints_are_refused(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "quantized")
    file = tmp_path / "quantized" / "config.json"
    declared = {"quant_method": "awq", "bits": 4, "group_size": 16, "zero_point": True, "version": "gemm"}
    file.write_text(json.dumps({**json.loads(file.read_text()), "quantization_config": declared}))
    with pytest.raises(UnsupportedModel, match="quantization_config"):
        logits(tmp_path / "quantized")
    plain = {"hf_overrides": '{"quantization_config": null}'}
    assert torch.equal(logits(tmp_path / "quantized", **plain), logits(folder))


def test_values_are_those_of_a_model_that_was_just_made() -> None:
    loader = DummyLoader(3)
    found = loader.values("a", (1100, 1000), torch.bfloat16).float()
    assert abs(found.std().item() - SPREAD) < 1e-3
    assert abs(found.mean().item()) < 1e-3
    assert len(found.unique(dim=0)) == 1100
    assert torch.equal(found.flatten()[PERIOD:], found.flatten()[: found.numel() - PERIOD])
    assert not torch.equal(found, loader.values("b", (1100, 1000), torch.bfloat16).float())


@pytest.mark.parametrize(("name", "fix"), [("sharded_state", "--packed-cache"), ("tensorizer", "lmkit convert")])
def test_loaders_of_other_servers_are_refused_with_the_reason(name: str, fix: str) -> None:
    with pytest.raises(SelectionError, match=f"{name}.refused") as e:
        resolve(from_options({"model": "demo", "loader": name}), installed())
    assert fix in e.value.fix
