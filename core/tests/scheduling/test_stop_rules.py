"""When an output ends: eos before stop ids before length; min_tokens delays the first two."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from lmkit.scheduling.stops import finish_reason
from lmkit_testing.stepper import make_request

EOS, STOP, WORD = 1, 2, 3


def reason(output: list[int], max_tokens: int = 10, **params) -> str | None:
    r = make_request("r", [5, 5], max_tokens, stop_token_ids=(STOP,), **params)
    r.max_length = 2 + max_tokens
    r.tokens += output
    return finish_reason(r, output[-1], frozenset({EOS}))


@pytest.mark.parametrize(
    ("output", "options", "expected"),
    [
        ([WORD], {}, None),
        ([EOS], {}, "stop"),
        ([STOP], {}, "stop"),
        ([EOS], {"ignore_eos": True}, None),
        ([STOP], {"ignore_eos": True}, "stop"),
        ([WORD], {"max_tokens": 1}, "length"),
        ([EOS], {"max_tokens": 1}, "stop"),
        ([EOS], {"max_tokens": 1, "ignore_eos": True}, "length"),
        ([EOS], {"min_tokens": 1}, None),
        ([STOP], {"min_tokens": 1}, None),
        ([WORD, EOS], {"min_tokens": 1}, "stop"),
        ([WORD, EOS], {"min_tokens": 2, "max_tokens": 2}, "length"),
        ([WORD, WORD, STOP], {"min_tokens": 2}, "stop"),
    ],
)
def test_reason(output, options, expected):
    assert reason(output, **options) == expected


@given(st.lists(st.sampled_from([EOS, STOP, WORD]), min_size=1, max_size=12), st.integers(0, 6), st.integers(6, 10))
def test_the_first_end_is_the_earliest_possible(stream, min_tokens, max_tokens):
    ends = [n for n in range(1, len(stream) + 1) if reason(stream[:n], max_tokens, min_tokens=min_tokens)]
    allowed = [n for n in range(1, len(stream) + 1) if (stream[n - 1] != WORD and n > min_tokens) or n >= max_tokens]
    assert ends == allowed
