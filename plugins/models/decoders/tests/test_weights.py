"""Where tensors of decoders go that no role of theirs names."""

from __future__ import annotations

import pytest
from lmkit_decoders.describe import DecoderConfig
from lmkit_decoders.weights import cache_scales
from lmkit_worker.loading.rules import Rules

ATTENTION = "model.layers.3.self_attn"
K, V = ("layers.3.attn.attn.k_scale", "layers.3.attn.attn.v_scale")


def rules(*roles: str) -> Rules:
    names = {role: f"model.layers.{{i}}.self_attn.{role}_proj" for role in roles}

    class Named(DecoderConfig):
        def __init__(self) -> None:
            object.__setattr__(self, "names", names)

    return Rules(cache_scales(Named()))


@pytest.mark.parametrize(
    ("name", "target"),
    [
        ("k_scale", K),
        ("v_scale", V),
        ("attn.k_scale", K),
        ("attn.v_scale", V),
        ("kv_scale", K),
        ("attn.kv_scale", K),
        ("q_scale", ""),
        ("attn.prob_scale", ""),
    ],
)
@pytest.mark.parametrize("roles", [("q", "k", "v", "o"), ("qkv", "o")])
def test_scales_of_a_cache(roles: tuple[str, ...], name: str, target: str) -> None:
    match = rules(*roles).match(f"{ATTENTION}.{name}")
    assert match is not None
    assert (match.target, match.rule.ignore) == (target, True)  # ignored where the cache is not float8


@pytest.mark.parametrize(
    ("roles", "name", "target"),
    [
        (("q", "k", "v", "o"), "k_proj.k_scale", K),
        (("q", "k", "v", "o"), "v_proj.v_scale", V),
        (("q", "k", "v", "o"), "k_proj.output_scale", K),
        (("q", "k", "v", "o"), "v_proj.output_scale", V),
        (("qkv", "o"), "qkv_proj.k_scale", K),
        (("qkv", "o"), "qkv_proj.v_scale", V),
    ],
)
def test_scales_of_a_cache_beside_projections(roles: tuple[str, ...], name: str, target: str) -> None:
    match = rules(*roles).match(f"{ATTENTION}.{name}")
    assert match is not None
    assert match.target == target


@pytest.mark.parametrize("name", ["k_proj.weight_scale", "k_proj.v_scale", "o_proj.k_scale", "k_proj.input_scale"])
def test_other_scales_are_left_to_others(name: str) -> None:
    assert rules("q", "k", "v", "o").match(f"{ATTENTION}.{name}") is None
    assert rules("q", "k").match(f"{ATTENTION}.k_scale") is None  # no attention
