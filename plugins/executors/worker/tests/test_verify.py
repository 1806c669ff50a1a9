"""Acceptance of drafts."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from lmkit_worker.sampling import accept

tokens = st.lists(st.integers(0, 3), max_size=6)


@given(tokens, tokens)
def test_accepted_tokens_are_those_of_plain_decoding(plain: list[int], drafts: list[int]) -> None:
    """`plain` is what decoding would give; a drawn token is right as long as the drafts before it were."""
    plain = (plain + [0] * 7)[: len(drafts) + 1]
    right = 0
    while right < len(drafts) and drafts[right] == plain[right]:
        right += 1
    drawn = plain[: right + 1] + [9] * (len(drafts) - right)
    assert accept(drawn, drafts) == plain[: right + 1]


def test_no_draft_gives_one_token() -> None:
    assert accept([5], []) == [5]
