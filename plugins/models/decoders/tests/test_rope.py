"""Rotary parameters in every spelling that files have, against transformers' frequencies."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lmkit.api import UnsupportedModel
from lmkit_decoders import ConfigReader
from lmkit_layers.rotary import frequencies

HEAD = 16
FACTORS = {
    "default": {}, "linear": {"factor": 2.0}, "dynamic": {"factor": 4}, "proportional": {"partial_rotary_factor": 0.5},
    "yarn": {"factor": 4.0}, "llama3": {"factor": 8, "low_freq_factor": 1, "high_freq_factor": 4.0},
    "longrope": {"short_factor": [1.0 + i / 8 for i in range(8)], "long_factor": [1.5 + i / 2 for i in range(8)]},
}  # fmt: skip
SCALES = {"attention_factor": st.sampled_from([1.0, 1.3, None])}
OPTIONAL: dict[str, dict[str, Any]] = {
    "proportional": {"factor": st.sampled_from([2.0, None]).filter(bool)},
    "longrope": {**SCALES, "factor": st.sampled_from([None, 1.0, 4.0])},
    "yarn": {
        **SCALES, "factor": st.sampled_from([None, 2.0, 32]), "beta_fast": st.sampled_from([32, 16.0, 0, None]),
        "beta_slow": st.sampled_from([1, 2.0, None]), "mscale": st.sampled_from([1.0, 0.7, 0, None]),
        "mscale_all_dim": st.sampled_from([1, 0.5, 0.0]), "truncate": st.booleans(),
    },
}  # fmt: skip
HARMLESS = {
    "finetuned": st.booleans(), "attn_factor": st.just(1.0), "extrapolation_factor": st.just(1),
    "rope_theta": st.just(5e3), "mrope_section": st.just([2, 3, 3]), "max_position_embeddings": st.just(64),
    "original_max_position_embeddings": st.sampled_from([64, 128.0]), "short_factor": st.none(),
    "low_freq_factor": st.none(),
}  # fmt: skip


@st.composite
def configs(draw: st.DrawFn) -> dict[str, Any]:
    kind = draw(st.sampled_from(list(FACTORS)))
    harmless = {name: value for name, value in HARMLESS.items() if name not in FACTORS[kind]}
    rope = draw(st.fixed_dictionaries({}, optional=harmless))
    rope |= FACTORS[kind] | draw(st.fixed_dictionaries({}, optional=OPTIONAL.get(kind, {})))
    rope |= draw(st.sampled_from([{"type": kind}, {"rope_type": kind}, {"type": "su", "rope_type": kind}]))
    outer = {
        "rope_theta": st.sampled_from([1e4, 500000]),
        "original_max_position_embeddings": st.sampled_from([32, 100]),
    }
    return {
        "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": HEAD, "num_hidden_layers": 1,
        "vocab_size": 10, "intermediate_size": 8, "max_position_embeddings": draw(st.sampled_from([128, 512])),
        draw(st.sampled_from(["rope_scaling", "rope_parameters"])): rope,
        **draw(st.fixed_dictionaries({}, optional=outer)),
    }  # fmt: skip


@settings(deadline=None, max_examples=300)
@given(configs())
def test_frequencies_are_those_of_transformers(config: dict[str, Any]) -> None:
    transformers = pytest.importorskip("transformers")
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    theirs = transformers.LlamaConfig(**copy.deepcopy(config))
    if theirs.rope_parameters["rope_type"] == "longrope":  # as of a prompt that fills the context
        length = theirs.max_position_embeddings
        inv_freq, magnitude = ROPE_INIT_FUNCTIONS["longrope"](theirs, None, seq_len=length)
    else:
        rotary = LlamaRotaryEmbedding(theirs)
        inv_freq, magnitude = rotary.inv_freq, rotary.attention_scaling
    ours, scale = frequencies(HEAD, ConfigReader(config).rope())
    torch.testing.assert_close(ours, inv_freq)
    assert math.isclose(scale, magnitude, rel_tol=1e-6)


@pytest.mark.parametrize("kind", sorted(FACTORS))
@pytest.mark.parametrize("key", ["ramp_power", "beta_fastest", "alpha", "Factor"])
def test_keys_that_nobody_knows_are_refused(kind: str, key: str) -> None:
    rope = {"rope_type": kind, **FACTORS[kind], key: 1.0}
    with pytest.raises(UnsupportedModel, match=rf"rope_scaling\.{key} = 1\.0; supported: keys of rope_type '{kind}'"):
        ConfigReader({"max_position_embeddings": 128, "rope_scaling": rope}).rope()


def test_keys_of_another_type_are_refused_unless_they_say_nothing() -> None:
    def read(**keys: Any) -> dict[str, Any]:
        return ConfigReader({"rope_scaling": {"rope_type": "linear", "factor": 2.0, **keys}}).rope()

    assert read(beta_fast=32, beta_slow=1.0, attention_factor=None) == read()
    with pytest.raises(UnsupportedModel, match="beta_fast = 16"):
        read(beta_fast=16)


def test_rope_scaling_comes_before_rope_parameters() -> None:
    scaling = {"rope_type": "linear", "factor": 2.0}
    config = {"rope_parameters": {"rope_type": "default", "rope_theta": 7e5}, "rope_scaling": scaling}
    assert ConfigReader(config).rope() == {"rope_type": "linear", "theta": 7e5, "partial": 1.0, "factor": 2.0}
    config["rope_parameters"] = {"full_attention": {"rope_type": "default"}}
    with pytest.raises(UnsupportedModel, match="rope_scaling"):
        ConfigReader(config).rope(kind_of_layer="full_attention")


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "yarn", "theta": 1.0, "factor": 2.0, "original_max_position_embeddings": 64},
        {"rope_type": "default", "theta": 1e-300},
        {"rope_type": "longrope", "theta": 1e4, "original_max_position_embeddings": 1, "max_position_embeddings": 9,
         "long_factor": [1.0] * 8},
    ],
)  # fmt: skip
def test_numbers_without_angles_are_refused(rope: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedModel, match="rope_parameters"):
        frequencies(HEAD, rope)
