"""EngineConfig as plain data: identity, strictness, limits."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from lmkit.api import ConfigError, UnknownKey
from lmkit.config import EngineConfig, from_dict, from_options, to_dict
from lmkit.config.codec import flatten, from_flat
from lmkit.config.schema import Leaf, leaves, sections
from lmkit.contracts.marks import Between, MemoryBudget, OneOf

NAMES = st.text(st.characters(whitelist_categories=("Ll",), max_codepoint=127), min_size=1, max_size=8).filter(
    lambda name: name != "none"  # on the command line: not set
)


def value_of(leaf: Leaf) -> st.SearchStrategy:
    if leaf.type is bool:
        values: st.SearchStrategy = st.booleans()
    elif leaf.type is int:
        assert isinstance(leaf.limits, Between), leaf.key
        low, high = leaf.limits.low, leaf.limits.high
        values = st.integers(low, high if high is not None else 1 << 40)
    elif isinstance(leaf.limits, OneOf):
        values = st.sampled_from(leaf.limits.words)
    elif isinstance(leaf.limits, MemoryBudget):
        values = st.sampled_from(["auto", "2GiB", "60%", "1048576"])
    else:
        values = NAMES
    return st.none() | values if leaf.optional else values


@st.composite
def configs(draw: st.DrawFn) -> EngineConfig:
    keys = draw(st.sets(st.sampled_from(list(leaves()))))
    flat = {key: draw(value_of(leaves()[key])) for key in keys}
    for name, option in draw(st.sets(st.tuples(NAMES, NAMES), max_size=3)):
        flat[f"plugins.attention.{name}.{option}"] = draw(st.integers() | NAMES)
    return from_flat(flat)


@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.too_slow])  # busy machines are no fault
@given(configs())
def test_dict_round_trip_is_identity(config: EngineConfig) -> None:
    assert from_dict(to_dict(config)) == config
    assert from_flat(flatten(to_dict(config))) == config


@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.too_slow])  # busy machines are no fault
@given(configs())
def test_command_line_and_python_give_equal_configurations(config: EngineConfig) -> None:
    from lmkit_cli.options import name_of

    flat = flatten(to_dict(config))
    by_text, by_name = {}, {}
    for key, value in flat.items():
        if key.startswith("plugins."):
            by_text[key] = value
            by_name[key.removeprefix("plugins.")] = value
            continue
        leaf = leaves()[key]
        by_text[key] = leaf.parse("none" if value is None else str(value), "test")
        by_name[name_of(leaf)] = value
    assert from_flat(by_text) == config
    assert from_options(by_name) == config


def test_defaults_are_the_empty_dict() -> None:
    assert from_dict({}) == EngineConfig()


def test_every_field_is_documented_and_has_a_flag_of_its_own() -> None:
    flags = [leaf.flag for leaf in leaves().values()]
    assert len(flags) == len(set(flags))
    assert all(leaf.doc for leaf in leaves().values())
    for name, section in sections().items():
        assert {f"{name}.{f.name}" for f in fields(section)} <= set(leaves())
    rest = {f.name for f in fields(EngineConfig)} - {*sections(), *leaves()}
    assert rest == {"wanted", "plugins"}


@pytest.mark.parametrize(
    ("data", "like"),
    [
        ({"model": {"dtpye": "auto"}}, "dtype"),
        ({"modle": {}}, "model"),
        ({"atention": "torch"}, "attention"),
        ({"cache": {"blocksize": 3}}, "block_size"),
    ],
)
def test_unknown_key_names_the_nearest(data: dict, like: str) -> None:
    with pytest.raises(UnknownKey) as caught:
        from_dict(data, "lmkit.toml")
    assert like in caught.value.fix
    assert "lmkit.toml" in str(caught.value)


@pytest.mark.parametrize(
    ("data", "named"),
    [
        ({"cache": {"block_size": "16"}}, "cache.block_size"),
        ({"cache": {"block_size": True}}, "cache.block_size"),
        ({"cache": {"block_size": 0}}, "cache.block_size"),
        ({"cache": {"memory": "lots"}}, "cache.memory"),
        ({"cache": {"memory": "120%"}}, "cache.memory"),
        ({"cache": {"prefix_cache": 1}}, "cache.prefix_cache"),
        ({"model": {"dtype": "int3"}}, "model.dtype"),
        ({"model": {"model": None}}, "model.model"),
        ({"model": "demo"}, "model"),
        ({"parallel": {"depth": 0}}, "parallel.depth"),
        ({"sched": {"max_rows": 0}}, "sched.max_rows"),
        ({"spec": {"proposer": "ngram"}}, "spec"),
        ({"plugins": {"attention": 3}}, "plugins"),
    ],
)
def test_wrong_value_names_key_and_place(data: dict, named: str) -> None:
    with pytest.raises(ConfigError) as caught:
        from_dict(data, "lmkit.toml")
    assert named in str(caught.value)
    assert "lmkit.toml" in str(caught.value)


def test_plugin_options_may_be_nested_as_toml_nests_them() -> None:
    nested = from_dict({"plugins": {"attention": {"flashinfer": {"workspace_mb": 256}}}})
    flat = from_dict({"plugins": {"attention.flashinfer": {"workspace_mb": 256}}})
    assert nested == flat
    assert flat.plugins == {"attention.flashinfer": {"workspace_mb": 256}}


def test_dtype_aliases_are_canonical() -> None:
    assert from_dict({"model": {"dtype": "bf16"}}).model.dtype == "bfloat16"


def test_configurations_are_frozen_and_comparable() -> None:
    config = EngineConfig()
    assert replace(config, wanted={"attention": "torch"}) != config
    with pytest.raises(AttributeError):
        config.device = "cpu"  # type: ignore[misc]
