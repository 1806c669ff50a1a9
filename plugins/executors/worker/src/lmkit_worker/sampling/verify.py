"""Verification of draft tokens.

Drafts are one-hot proposals (ids without probabilities). For those, rejection sampling accepts a draft d with
probability p(d) and otherwise draws from p without d. Drawing a token from p as if there were no draft, and keeping the
draft when it equals that token, has the same two probabilities; it also yields the very token that plain decoding draws
at that position, because the noise is f(seed, position). So one rule serves greedy and random rows, and a proposer of
any quality changes nothing but speed.
"""

from __future__ import annotations

from collections.abc import Sequence


def accept(drawn: Sequence[int], drafts: Sequence[int]) -> list[int]:
    """The accepted tokens: `drawn[i]` follows the first i drafts, so it counts while those drafts were right.

    len(drawn) = len(drafts) + 1; between 1 and len(drawn) tokens are returned.
    """
    n = 0
    while n < len(drafts) and drawn[n] == drafts[n]:
        n += 1
    return list(drawn[: n + 1])
