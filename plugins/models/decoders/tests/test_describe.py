"""Reading a configuration strictly, and a decoder as data."""

from __future__ import annotations

from typing import Any

import pytest
from lmkit.api import ModelInfo, StateTensor, UnsupportedModel
from lmkit_decoders import ConfigReader, DecoderConfig, MoEConfig
from lmkit_decoders.describe import MixerConfig, decoder_config, decoder_info, rope_length
from lmkit_decoders.weights import decoder_weights

PLAIN = {"rope_type": "default", "theta": 100.0, "partial": 1.0}


def test_rope_of_both_kinds_of_files() -> None:
    new = ConfigReader({"rope_parameters": {"rope_type": "linear", "rope_theta": 5.0, "factor": 2.0}}).rope()
    old = ConfigReader({"rope_theta": 5.0, "rope_scaling": {"type": "linear", "factor": 2.0}}).rope()
    assert new == old == {"rope_type": "linear", "theta": 5.0, "partial": 1.0, "factor": 2.0}
    assert ConfigReader({"rope_scaling": None}).rope(default_theta=7.0)["theta"] == 7.0


def test_rope_of_models_that_see() -> None:
    """In a text the three positions of a token are equal: the sections do not matter."""
    sections = {"mrope_section": [2, 1, 1], "mrope_interleaved": True}
    for kind in ({"type": "mrope"}, {"rope_type": "default"}):
        assert ConfigReader({"rope_theta": 5.0, "rope_scaling": kind | sections}).rope() == {**PLAIN, "theta": 5.0}
    with pytest.raises(UnsupportedModel):
        ConfigReader({"rope_scaling": {"type": ["mrope"]}}).rope()


def test_yarn_extends_the_length() -> None:
    config = {"max_position_embeddings": 100, "rope_parameters": {"rope_type": "yarn", "factor": 4.0}}
    rope = ConfigReader(config).rope()
    assert rope["original_max_position_embeddings"] == 100
    assert rope_length(100, rope) == 400
    assert rope_length(100, PLAIN) == 100


def test_dual_chunk_attention_is_full_attention_in_the_first_chunk() -> None:
    chunks = {"dual_chunk_attention_config": {"chunk_size": 100, "local_size": 20}}
    assert [ConfigReader(chunks).length(n) for n in (50, 1000)] == [50, 80]
    assert ConfigReader({}).length(1000) == 1000
    for wrong in ({"chunk_size": 20, "local_size": 20}, {"chunk_size": 100}, 5):
        with pytest.raises(UnsupportedModel):
            ConfigReader({"dual_chunk_attention_config": wrong}).length(1000)


@pytest.mark.parametrize(
    ("value", "expected"), [(None, ()), (5, (5,)), ([5, 6], (5, 6)), ([], ()), (-1, None), (True, None), ("5", None)]
)
def test_token_ids(value: Any, expected: tuple[int, ...] | None) -> None:
    reader = ConfigReader({"eos_token_id": value})
    if expected is None:
        with pytest.raises(UnsupportedModel):
            reader.token_ids("eos_token_id")
    else:
        assert reader.token_ids("eos_token_id") == expected


def test_one_of_takes_none_when_it_is_listed() -> None:
    assert ConfigReader({}).one_of("x", (None, 1)) is None
    with pytest.raises(UnsupportedModel):
        ConfigReader({}).one_of("x", (1, 2))


def config(**change: Any) -> DecoderConfig:
    values: dict[str, Any] = {
        "vocab_size": 11, "hidden_size": 8, "intermediate_size": 12, "num_q_heads": 4, "num_kv_heads": 2, "head_dim": 2,
        "windows": (None, 4, None), "max_length": 32, "norm_eps": 1e-6, "activation": "silu", "rope": PLAIN,
    }  # fmt: skip
    return DecoderConfig(**{**values, **change})


def toy_info(**change: Any) -> ModelInfo:
    return decoder_info("Toy", ConfigReader({}), config(**change))


def test_description_of_a_decoder() -> None:
    info = toy_info()
    assert decoder_config(info) == config()
    assert [group for _, group in info.kv_groups()] == [(0, 2), (1,)]
    assert {spec.name.rpartition(".")[2] for spec in info.linears} == {"qkv", "o", "gate_up", "down", "lm_head"}
    assert sum(s.total_out * s.in_features for s in info.linears) + 11 * 8 + 7 * 8 == info.num_parameters
    assert not any(spec.name == "lm_head" for spec in toy_info(tie=True).linears)
    assert any(rule.source == "lm_head.weight" and rule.ignore for rule in decoder_weights(toy_info(tie=True)))


@pytest.mark.parametrize("change", [{"num_kv_heads": 3}, {"head_dim": 3}])
def test_shapes_that_cannot_be(change: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedModel):
        config(**change)


@pytest.mark.parametrize(
    ("num_experts", "top_k", "groups", "top_groups", "key"),
    [
        (2, 3, 1, 1, "num_experts_per_tok"), (8, 2, 3, 1, "n_group"), (8, 2, 4, 5, "topk_group"),
        (8, 4, 4, 1, "num_experts_per_tok"), (8, 1, 8, 4, "n_group"), (8, 2, 4, 1, ""), (8, 8, 1, 1, ""),
    ],
)  # fmt: skip
def test_choices_that_no_router_can_make(num_experts: int, top_k: int, groups: int, top_groups: int, key: str) -> None:
    moe = MoEConfig(
        num_experts=num_experts, top_k=top_k, num_groups=groups, top_groups=top_groups, group_score="two best", size=4,
        layers=(True, True),
    )  # fmt: skip
    if not key:
        config(moe=moe)
        return
    with pytest.raises(UnsupportedModel, match=key):
        config(moe=moe)


@pytest.mark.parametrize("key", ["mamba_d_conv", "conv_kernel", "linear_conv_kernel_dim"])
def test_a_convolution_of_one_token_is_refused(key: str) -> None:
    assert ConfigReader({key: 2}).kernel_width(key, 4) == 2
    with pytest.raises(UnsupportedModel, match=f"{key} = 1; supported: an integer from 2"):
        ConfigReader({key: 1}).kernel_width(key, 4)
    mixer = MixerConfig(
        layers=(True,) * 3, state=(StateTensor("conv", (0, 8)),), linears=(), num_parameters=0, options={}
    )
    with pytest.raises(UnsupportedModel, match="conv state"):
        config(mixer=mixer)


class WithGain(DecoderConfig):
    """A family's own class."""

    def head_sizes(self) -> dict[str, int]:
        return {**super().head_sizes(), "v": 4}


def test_a_family_may_have_a_class_of_its_own() -> None:
    """It describes linears in its own way, and what is stored can be read as either class."""
    values = {name: getattr(config(), name) for name in config().__dataclass_fields__}
    info = decoder_info("Toy", ConfigReader({}), WithGain(**values))
    assert next(spec for spec in info.linears if spec.name == "layers.0.attn.qkv").out_features == (8, 4, 4)
    assert decoder_config(info, WithGain) == WithGain(**values)
    assert decoder_config(info) == config()


@pytest.mark.parametrize(
    ("change", "source", "targets"),
    [
        ({}, "model.layers.1.self_attn.k_norm.weight", ["layers.1.attn.k_norm.weight"]),
        ({"norm": "rms_offset"}, "model.norm.weight", ["norm.weight", "norm.weight"]),
        ({"gated": False}, "model.layers.0.mlp.up_proj.weight", ["layers.0.mlp.up.weight"]),
        ({"num_unused_layers": 1}, "model.layers.3.mlp.up_proj.weight", [""]),
    ],
)
def test_parts_say_where_their_tensors_go(change: dict[str, Any], source: str, targets: list[str]) -> None:
    """The first rule that matches wins: of offset norms the one that transforms."""
    from lmkit_worker.loading.rules import compile_pattern

    found = []
    for rule in decoder_weights(toy_info(qk_norm="head", **change)):
        if match := compile_pattern(rule.source).fullmatch(source):
            found.append(rule.target.format(**match.groupdict()))
    assert found[: len(targets)] == targets
