"""Patterns of adapters: what PEFT means by them, within bounds."""

from __future__ import annotations

import re
import time
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lmkit.api import UnsupportedModel
from lmkit_worker.loading.patterns import MAX_PATTERNS, Budget, Patterns

NAMES = [
    f"model.layers.{layer}.{module}"
    for layer in (0, 1, 10)
    for module in ("self_attn.q_proj", "self_attn.k_proj", "mlp.up_proj", "mlp.experts.11.up_proj")
]
PIECES = st.sampled_from([
    "model", "layers", ".", r"\.", "0", "1", "self_attn", "self.attn", "q_proj", "up_proj", "^", "$", ".*", "(0|1)",
    "[qk]", r"\d+", "mlp", "_proj", "experts", "(?!0)", r"\w+", "?", "{1,2}",
])  # fmt: skip


def of_peft(patterns: dict[str, int], name: str) -> int | None:
    """The value as `peft.utils.other.get_pattern_key` finds it."""
    return next((value for key, value in patterns.items() if re.match(rf"(.*\.)?({key})$", name)), None)


def compiles(pattern: str) -> bool:
    try:
        re.compile(rf"(.*\.)?({pattern})$")
    except re.error:
        return False
    return True


@given(st.lists(st.lists(PIECES, min_size=1, max_size=6).map("".join).filter(compiles), max_size=6, unique=True))
@settings(max_examples=300, deadline=None)
def test_the_first_pattern_that_matches_counts(patterns: list[str]) -> None:
    values = {pattern: number for number, pattern in enumerate(patterns)}
    ours = Patterns("rank_pattern", values, Budget())
    for name in NAMES:
        assert ours.find(name, None) == of_peft(values, name), (values, name)


def test_the_expression_is_that_of_peft() -> None:
    other = pytest.importorskip("peft.utils.other")
    for pattern in ("q_proj", "self.attn.q_proj", "^layers.0", r".*\.0\..*", "model.layers.0.self_attn.q_proj"):
        for name in NAMES:
            assert (other.get_pattern_key([pattern], name) == pattern) == (of_peft({pattern: 1}, name) is not None)


def test_names_of_every_module_of_a_large_model_are_quick() -> None:
    modules = [
        f"model.layers.{i}.mlp.experts.{e}.{p}_proj" for i in range(48) for e in range(64) for p in ("up", "down")
    ]
    patterns = Patterns("rank_pattern", {name: number for number, name in enumerate(modules)}, Budget())
    assert [patterns.find(name, None) for name in modules[::97]] == list(range(len(modules)))[::97]


@pytest.mark.parametrize(
    "patterns",
    [
        {"(": 1}, {"a" * 4096 + "*": 1}, ["q"], {"a**": 1}, {"(?i)a": 1}, {"a{e<=2}": 1}, {"[[:alpha:]]": 1},
        {f"a*{i}": 1 for i in range(MAX_PATTERNS + 1)}, {"a{99999999999999999999}": 1}, {"a" * 400 + "(": 1},
    ],
    ids=lambda p: str(p)[:30],
)  # fmt: skip
def test_patterns_that_are_none_are_refused(patterns: Any) -> None:
    with pytest.raises(UnsupportedModel, match="rank_pattern"):
        Patterns("rank_pattern", patterns, Budget())


@pytest.mark.parametrize("pattern", [r"(\w+)+\d\dx", r"(a|a)*b", r"(.*.*)*.*[xy]", r"((a+)+)+$b", r"(?=(a+)+b)c"])
def test_matching_is_bounded(pattern: str) -> None:
    """A pattern that would be matched for years is refused, or known not to match; and then the next one, too."""
    patterns, begin = Patterns("rank_pattern", {pattern: 1}, Budget(0.2)), time.thread_time()
    for _ in range(100):
        with suppress(UnsupportedModel):
            assert patterns.find("a" * 400, None) is None
    assert time.thread_time() - begin < 20  # of processor time: it is 0.2 seconds
