"""Weight rules: names in, places out."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from lmkit.api import PluginError, WeightRule
from lmkit_worker.loading.rules import Rules

RULES = Rules(
    [
        WeightRule("model.layers.{i}.q.{p}", "layers.{i}.qkv.{p}", part="q"),
        WeightRule("model.layers.{i}.experts.{e}.{p}", "layers.{i}.moe.{e}.{p}"),
        WeightRule("head.weight", "lm_head.weight"),
        WeightRule("rope.{p}", "", ignore=True),
    ]
)


def target(name: str) -> str | None:
    match = RULES.match(name)
    return None if match is None else match.target


def test_placeholders() -> None:
    assert target("model.layers.12.q.weight") == "layers.12.qkv.weight"
    assert target("model.layers.3.experts.41.weight_scale_inv") == "layers.3.moe.41.weight_scale_inv"
    assert target("head.weight") == "lm_head.weight"
    assert target("rope.inv_freq") == ""


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.x.q.weight", "model.layers.1.q.a.b", "Xmodel.layers.1.q.weight", "model.layers.1.q.weight.",
        "model.layers.1.q.", "headXweight", "model.layers.-1.q.weight", "model.layers.\u0661.q.weight", "",
    ],
)  # fmt: skip
def test_names_match_whole_or_not_at_all(name: str) -> None:
    assert target(name) is None


@given(st.text(max_size=40))
def test_any_name_is_answered(name: str) -> None:
    found = target(name)
    assert found is None or isinstance(found, str)


def test_sources_are_found_for_messages() -> None:
    ((name, rule),) = RULES.sources("layers.7.qkv.bias", "q")
    assert name == "model.layers.7.q.bias"
    assert rule.part == "q"
    assert RULES.sources("layers.7.qkv.bias", "k") == []


def test_a_target_may_use_only_what_the_source_binds() -> None:
    with pytest.raises(PluginError, match="does not bind"):
        Rules([WeightRule("a.{i}", "b.{j}")])
