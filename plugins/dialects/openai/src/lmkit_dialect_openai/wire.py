"""Pieces of OpenAI answers as structs, encoded by msgspec. Only what both dialects share."""

from __future__ import annotations

import hashlib
from collections import Counter
from typing import TYPE_CHECKING

import lmkit
import msgspec
from lmkit.api import Tokenizer, TokenLogprob
from lmkit_http.logprobs import finite

if TYPE_CHECKING:
    from lmkit_http.dialect import Served, Turn, Usage

    from lmkit_dialect_openai.schema import Sampling


class PromptDetails(msgspec.Struct):
    cached_tokens: int = 0


class CompletionDetails(msgspec.Struct):
    reasoning_tokens: int = 0


class UsageBody(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails
    completion_tokens_details: CompletionDetails


def usage_of(usages: list[Usage], num_per_prompt: int = 1) -> UsageBody:
    """The usage of all choices; a prompt counts once however many it has. `usages` in order of the choices."""
    prompt = sum(u.prompt_tokens for u in usages[::num_per_prompt])
    output = sum(u.completion_tokens for u in usages)
    return UsageBody(
        prompt,
        output,
        prompt + output,
        PromptDetails(min(prompt, sum(u.cached_tokens for u in usages[::num_per_prompt]))),
        CompletionDetails(sum(u.reasoning_tokens for u in usages)),
    )


class PromptLogprob(msgspec.Struct):
    logprob: float
    rank: int | None
    decoded_token: str


def prompt_logprobs(entries: list[TokenLogprob], tokenizer: Tokenizer) -> list[dict[str, PromptLogprob] | None]:
    """One entry per prompt position: null for the first, then token id -> logprob (the prompt's own token first)."""
    shown: list[dict[str, PromptLogprob] | None] = [None]
    for e in entries:
        ranked = [(e.token, e.logprob, e.rank), *((t, p, i + 1) for i, (t, p) in enumerate(e.top))]
        row: dict[str, PromptLogprob] = {}
        for token, logprob, rank in ranked:
            text = tokenizer.piece(token).decode(errors="replace")
            row.setdefault(str(token), PromptLogprob(finite(logprob), rank, text))
        shown.append(row)
    return shown


class NewIds:
    """The token ids of a stream: each is shown once, those that have no text yet with the next that have."""

    def __init__(self, wanted: bool | None) -> None:
        self._wanted, self._num_shown = bool(wanted), Counter[int]()

    def take(self, turn: Turn) -> list[int] | msgspec.UnsetType:
        """Those of the choice that were not taken yet."""
        if not self._wanted:
            return msgspec.UNSET
        found = turn.stream.token_ids[self._num_shown[turn.index] :]
        self._num_shown[turn.index] += len(found)
        return found


def answer_headers(request: Sampling, id: str) -> dict[str, str]:
    """The header with the request's id."""
    given = request.request_id or ""
    shown = given if given.isascii() and given.isprintable() and given else id
    return {"x-request-id": shown}


def fingerprint(served: Served) -> str:
    """The system_fingerprint of answers: another one when lmkit or the checkpoint changes."""
    made_by = f"{lmkit.__version__}/{served.about.get('root', served.names[0])}"
    return f"fp_{hashlib.sha256(made_by.encode()).hexdigest()[:10]}"


def chunk_frame(
    id: str, kind: str, created: int, model: str, fingerprint: str, with_usage: bool
) -> tuple[bytes, bytes]:
    """What stands before and after the encoded choice in every chunk of a stream: built once, not per token."""
    encode = msgspec.json.encode
    head = b'data: {"id":%b,"object":%b,"created":%d,"model":%b,"system_fingerprint":%b,"choices":[' % (
        encode(id), encode(kind), created, encode(model), encode(fingerprint),
    )  # fmt: skip
    return head, b'],"usage":null}\n\n' if with_usage else b"]}\n\n"
