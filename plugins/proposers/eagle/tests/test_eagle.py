"""A head of EAGLE-1 and one of EAGLE-3 in the kit."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from lmkit.api import UnsupportedModel
from lmkit_decoders import ConfigReader
from lmkit_proposer_eagle.arch import eagle
from lmkit_proposer_eagle.model import WideLayer
from lmkit_testing import DraftConformance
from lmkit_testing.draft_heads import eagle1, eagle3


class TestEagle1(DraftConformance):
    plugin = "proposer:eagle"

    def write_draft(self, model: Path, folder: Path) -> dict[str, Any]:
        return {"model": str(eagle1(model, folder))}


class TestEagle3(DraftConformance):
    plugin = "proposer:eagle"

    def write_draft(self, model: Path, folder: Path) -> dict[str, Any]:
        return {"model": str(eagle3(model, folder, "midlayer."))}


def as_published(config: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """A head's configuration as the library speculators writes it."""
    layer = {key: value for key, value in config.items() if key not in ("draft_vocab_size", "eagle_config")}
    return {
        "architectures": ["Eagle3DraftModel"], "draft_vocab_size": config["draft_vocab_size"], "dtype": "float32",
        "eagle_aux_hidden_state_layer_ids": config["eagle_config"]["eagle_aux_hidden_state_layer_ids"],
        "embed_requires_grad": False, "norm_before_fc": False, "norm_before_residual": True,
        "speculators_config": {"algorithm": "eagle3", "verifier": {"name_or_path": "x"}}, "target_hidden_size": None,
        "speculators_model_type": "eagle3", "tie_word_embeddings": False,
        "transformer_layer_config": {**layer, "model_type": "llama", "num_hidden_layers": 1},
        **changes,
    }  # fmt: skip


class TestSpeculators(DraftConformance):
    """A head as it is published: its layer's fields stand in `transformer_layer_config`."""

    plugin = "proposer:eagle"

    def write_draft(self, model: Path, folder: Path) -> dict[str, Any]:
        head = eagle3(model, folder, "layers.0.")
        file = head / "config.json"
        file.write_text(json.dumps(as_published(json.loads(file.read_text()))))
        return {"model": str(head)}


FLAT = {
    "hidden_size": 8, "intermediate_size": 12, "num_attention_heads": 2, "num_key_value_heads": 1,
    "num_hidden_layers": 1, "vocab_size": 40, "max_position_embeddings": 64, "draft_vocab_size": 16,
    "eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2, 3]},
}  # fmt: skip
TARGET = {"lmkit_target": {"hidden_size": 8, "num_layers": 6, "max_length": 64}}


def test_a_published_configuration_says_the_same() -> None:
    published, flat = as_published(FLAT) | TARGET, FLAT | TARGET
    assert eagle(ConfigReader(published)) == eagle(ConfigReader(flat | {"norm_before_residual": True}))
    assert eagle(ConfigReader(published | {"norm_before_residual": False})) == eagle(ConfigReader(flat))
    whole = eagle(ConfigReader(published | {"draft_vocab_size": None}))
    assert (whole.version, whole.num_tokens) == (3, 40)


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ({"speculators_model_type": "eagle"}, "speculators_model_type"), ({"norm_before_fc": True}, "norm_before_fc"),
        ({"norm_before_residual": None}, "norm_before_residual"), ({"fc_scale": 2}, "fc_scale"),
        ({"target_hidden_size": 16}, "target_hidden_size"), ({"transformer_layer_config": None}, "transformer_layer"),
        ({"transformer_layer_config": {**FLAT, "model_type": "qwen3"}}, "model_type"),
    ],
)  # fmt: skip
def test_published_heads_that_compute_otherwise_are_refused(change: dict[str, Any], key: str) -> None:
    with pytest.raises(UnsupportedModel, match=key):
        eagle(ConfigReader(as_published(FLAT) | TARGET | change))


@pytest.mark.parametrize("normed", [True, False])
def test_the_norm_of_hidden_states_comes_before_the_residual_stream_or_not(normed: bool) -> None:
    layer = WideLayer.__new__(WideLayer)
    torch.nn.Module.__init__(layer)
    layer.normed = normed
    layer.embed_norm = layer.attn_norm = lambda x: 2 * x  # type: ignore[assignment]
    layer.attn = lambda read, angles, x: read  # type: ignore[assignment]
    h = torch.tensor([[1.0, 2.0, 3.0, 4.0]])  # embedding, hidden state
    stream, read = layer.mix(h, None, None, None)  # type: ignore[arg-type]
    assert stream.tolist() == [[6.0, 8.0] if normed else [3.0, 4.0]]
    assert read.tolist() == [[2.0, 4.0, 6.0, 8.0]]
