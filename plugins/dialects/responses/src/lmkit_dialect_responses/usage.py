"""Tokens of an answer, as the Responses API counts them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lmkit_http.dialect import Usage


def usage_of(usages: Sequence[Usage]) -> dict[str, Any]:
    """The tokens of all turns together."""
    asked, said = sum(u.prompt_tokens for u in usages), sum(u.completion_tokens for u in usages)
    cached = sum(u.cached_tokens for u in usages)
    return {
        "input_tokens": asked,
        "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
        "output_tokens": said,
        "output_tokens_details": {"reasoning_tokens": sum(u.reasoning_tokens for u in usages)},
        "total_tokens": asked + said,
    }
