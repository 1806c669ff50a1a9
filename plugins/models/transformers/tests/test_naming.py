"""A config.json without `architectures` goes by its model_type, as in transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from lmkit.api import CheckpointError
from lmkit.config import EngineConfig, ModelConfig
from lmkit.plugins.host import PluginHost
from lmkit.plugins.naming import architecture_of
from lmkit.plugins.resolve import resolve
from lmkit_testing.checkpoints import COMMON, randomize

transformers = pytest.importorskip("transformers")


def test_every_model_type_means_the_class_of_transformers() -> None:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    known = PluginHost().names("model")
    own = {"ExaoneForCausalLM", "InternLM3ForCausalLM", "IQuestCoderForCausalLM"}  # which it runs as a Llama
    named = 0
    for kind, cls in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items():
        composite = {"text_config": {}} if str(cls).endswith("ForConditionalGeneration") else {}
        name = architecture_of({"model_type": kind, **composite}, known)
        assert name in {"", cls} | own or name.endswith("Model"), kind  # an encoder that can be made a decoder
        named += bool(name)
    assert named > 100


@pytest.mark.parametrize("kind", ["bert", "modernbert"])
def test_encoders_are_named_too(kind: str) -> None:
    assert architecture_of({"model_type": kind}, PluginHost().names("model")).lower() == f"{kind}model"


@pytest.mark.parametrize(
    "config", [{}, {"model_type": None}, {"model_type": ""}, {"model_type": ["llama"]}, {"model_type": "_"}]
)
def test_what_is_no_model_type(config: dict[str, Any]) -> None:
    assert architecture_of(config, ["LlamaForCausalLM"]) == ""


def write(folder: Path, name: str, change: dict[str, Any]) -> EngineConfig:
    experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 24} if name == "Beam" else {}
    config = getattr(transformers, f"{name}Config")(**COMMON, **experts)
    randomize(getattr(transformers, f"{name}ForCausalLM"), config, 0, "float32", 0.2).save_pretrained(folder)
    data = json.loads((folder / "config.json").read_text()) | change
    (folder / "config.json").write_text(json.dumps(data))
    return EngineConfig(model=ModelConfig(model=str(folder)), device="cpu", wanted={"loader": "safetensors"})


@pytest.mark.parametrize("named", [None, [], "LlamaForCausalLM", [None]])
@pytest.mark.parametrize(("name", "plugin"), [("Llama", "LlamaForCausalLM"), ("Beam", "transformers")])
def test_a_checkpoint_without_architectures_is_resolved(tmp_path: Path, named: Any, name: str, plugin: str) -> None:
    plan, checkpoint, info = resolve(write(tmp_path, name, {"architectures": named}))
    assert info.architecture == checkpoint.architecture == f"{name}ForCausalLM"
    assert plan.choice("model").name == plugin
    (derived,) = [d for d in plan.derived if d.key == "architecture"]
    assert derived.source.startswith(f"model_type '{name.lower()}'")


def test_a_checkpoint_without_any_name_is_refused(tmp_path: Path) -> None:
    config = write(tmp_path, "Llama", {"architectures": None, "model_type": None})
    with pytest.raises(CheckpointError, match=r"config\.json names no architecture, nor a model_type"):
        resolve(config)
