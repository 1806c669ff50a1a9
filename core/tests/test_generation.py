"""generation_config.json: what is taken, what is off, and what is left out by name."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lmkit.api import SamplingParams
from lmkit.generation import SAMPLING, end_ids, recommended

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


@pytest.mark.parametrize(
    ("config", "params"),
    [
        ({}, {}),
        ({"top_k": -1}, {"top_k": 0}),
        ({"top_k": 0, "top_p": 1, "temperature": 0, "do_sample": True}, {"top_k": 0, "top_p": 1, "temperature": 0}),
        ({"top_k": 20.0, "temperature": None, "top_p": 0.8}, {"top_k": 20, "top_p": 0.8}),
        ({"top_p": 0.0}, {"top_p": 0.0}),  # the likeliest token
        ({"min_p": 0.05, "repetition_penalty": 1.1}, {"min_p": 0.05, "repetition_penalty": 1.1}),
        ({"num_beams": 1, "no_repeat_ngram_size": 0, "suppress_tokens": None, "_from_model_config": True}, {}),
        ({"eos_token_id": [3, 4], "pad_token_id": 0, "bos_token_id": None, "transformers_version": "5.0"}, {}),
    ],
)
def test_what_is_taken_in_silence(config: dict[str, Any], params: dict[str, Any]) -> None:
    assert recommended(config) == (params, [])


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("top_k", -2), ("top_k", "many"), ("top_k", 1.5), ("top_k", True), ("top_p", -0.1), ("top_p", 1.5),
        ("top_p", "0.9"), ("temperature", -1), ("temperature", float("nan")), ("temperature", [0.7]), ("min_p", 2),
        ("repetition_penalty", 0), ("no_repeat_ngram_size", 3), ("suppress_tokens", [1]), ("stop_strings", ["x"]),
        ("invented", 1), ("num_beams", 4), ("eos_token_id", "3"), ("eos_token_id", 1 << 40), ("eos_token_id", True),
    ],
)  # fmt: skip
def test_what_is_left_out_is_named(name: str, value: object) -> None:
    params, (warning,) = recommended({name: value, "seed": None})
    assert params == {}
    assert warning.startswith(f"generation_config.json: {name}")


@pytest.mark.parametrize(
    ("value", "ids"), [(None, []), (5, [5]), ([5, 6], [5, 6]), ([], []), (-1, []), ([5, None, "x", 2.0, [1]], [5])]
)
def test_end_ids(value: object, ids: list[int]) -> None:
    found, warnings = end_ids({"eos_token_id": value})
    assert found == ids
    assert bool(warnings) == (isinstance(value, list) and len(value) > 2)


@settings(deadline=None)
@given(st.dictionaries(st.sampled_from([*SAMPLING, "eos_token_id", "x"]), JSON))
def test_no_file_stops_a_server(config: dict[str, Any]) -> None:
    params, _ = recommended(config)
    SamplingParams(**params)
