"""Log-probabilities as answers of several dialects show them."""

from __future__ import annotations

import msgspec
from lmkit.api import Tokenizer, TokenLogprob


class TopLogprob(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int] | None


class ContentLogprob(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int] | None
    top_logprobs: list[TopLogprob]


def label(tokenizer: Tokenizer, token: int, by_id: bool) -> str:
    """What a token is called beside its log-probability."""
    return f"token_id:{token}" if by_id else tokenizer.piece(token).decode(errors="replace")


def content_logprobs(
    entries: list[TokenLogprob], tokenizer: Tokenizer, num_top: int, by_id: bool = False
) -> list[ContentLogprob]:
    """As chat answers show them."""
    shown = []
    for e in entries:
        piece = tokenizer.piece(e.token)
        top = []
        for token, logprob in e.top[:num_top]:
            b = tokenizer.piece(token)
            top.append(TopLogprob(label(tokenizer, token, by_id), finite(logprob), list(b)))
        shown.append(ContentLogprob(label(tokenizer, e.token, by_id), finite(e.logprob), list(piece), top))
    return shown


def finite(logprob: float) -> float:
    """JSON has no infinities."""
    return logprob if logprob > -9999.0 else -9999.0
