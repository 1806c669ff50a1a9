"""Suggestions: what is declared fits the checkpoint and the machine, and what is missing is in one line."""

from __future__ import annotations

from pathlib import Path

import pytest
from lmkit.api import Checkpoint
from lmkit.config import EngineConfig
from lmkit.plugins.catalog import catalog, folders
from lmkit.plugins.host import PluginHost
from lmkit.plugins.resolve import resolve
from lmkit_cli import suggest as module
from lmkit_cli.suggest import Suggestion, command_line, declared, suggest


def checkpoint(tmp_path: Path, architecture: str = "LlamaForCausalLM", **config: object) -> Checkpoint:
    (tmp_path / "tokenizer.json").touch()
    config = {"architectures": [architecture], **config}
    return Checkpoint(ref="x", path=tmp_path, format="safetensors", config=config)


def dists(found: list[Suggestion]) -> set[str]:
    return {s.dist for s in found}


def test_the_suggested_dists_have_all_that_a_plan_chooses() -> None:
    """Of the demo on this machine: what the resolver takes is suggested, but for what requests may ask for."""
    plan, found, _ = resolve(EngineConfig(), PluginHost())
    asked = ("logits_processor", "tool_parser", "reasoning_parser")
    needed = {c.dist for c in plan.choices if c.kind not in asked}
    assert needed <= dists(suggest(found, plan.device.platform))


@pytest.mark.parametrize(
    ("method", "dist"),
    [("gptq", "lmkit-quantization-gptq"), ("fp8", "lmkit-quantization-fp8"), ("awq", "lmkit-quantization-awq")],
)
def test_the_format_of_weights_is_suggested(tmp_path: Path, method: str, dist: str) -> None:
    quantized = checkpoint(tmp_path, quantization_config={"quant_method": method})
    assert dist in dists(suggest(quantized, "cpu"))
    assert dist not in dists(suggest(checkpoint(tmp_path), "cpu"))


def test_the_machine_decides(tmp_path: Path) -> None:
    cpu, cuda = (dists(suggest(checkpoint(tmp_path), platform)) for platform in ("cpu", "cuda"))
    assert "lmkit-platform-cuda" in cuda - cpu
    assert "lmkit-platform-cpu" in cpu - cuda
    for row in declared():
        if row.kind == "attention" and not row.named:
            assert (row.dist in cuda) == any(r.runs_on("cuda") for r in declared() if r.dist == row.dist)


def test_a_model_that_nobody_knows_runs_through_transformers(tmp_path: Path) -> None:
    assert "lmkit-model-transformers" in dists(suggest(checkpoint(tmp_path, "NobodyForCausalLM"), "cpu"))


def test_what_is_missing_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_installed", lambda dist: dist not in ("lmkit-model-llama", "lmkit-attention-cpu"))
    line = command_line(suggest(checkpoint(tmp_path), "cpu"))
    assert line.startswith("pip install -e ")
    assert [part.rpartition("plugins/")[2] for part in line.split() if "plugins/" in part] == [
        "models/llama", "attention/cpu",
    ]  # fmt: skip
    monkeypatch.setattr(module, "_installed", lambda dist: True)
    assert command_line(suggest(checkpoint(tmp_path), "cpu")) == ""


def test_all_that_is_named_is_a_dist_of_ours(tmp_path: Path) -> None:
    assert {row.dist for row in declared()} <= set(folders())
    assert all(name in catalog()[kind] for kind, name in module.ALWAYS)
    assert all(name in catalog()["platform"] for name in module.DRIVERS)
