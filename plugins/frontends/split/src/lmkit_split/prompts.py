"""From a request for an answer to one that computes its prompt, and nothing that shows."""

from __future__ import annotations

import json
from typing import Any

from lmkit.api import RequestError
from lmkit_http.shape import check_shape

LIMITS = {
    "/v1/chat/completions": ("max_completion_tokens", "max_tokens"),
    "/v1/completions": ("max_tokens",),
    "/v1/messages": ("max_tokens",),
    "/v1/responses": ("max_output_tokens",),
}  # routes that generate -> the fields of a body that bound its answer, the usual one first
MAX_VALUES = 1 << 21  # of all lists and objects of a body: more token ids than a body of the largest size has
DROPPED = (
    *("stream_options", "min_tokens", "best_of", "use_beam_search", "logprobs", "top_logprobs", "response_format"),
    *("store", "background"),
)  # what would cost time or be refused beside one token, or be remembered


def prompt_only(path: str, body: bytes) -> bytes | None:
    """The body that asks for one token of the same prompt; None: the request is none that generates."""
    fields = LIMITS.get(path)
    if fields is None:
        return None
    try:
        check_shape(body, MAX_VALUES)
        asked: Any = json.loads(body)
    except (ValueError, RecursionError, RequestError):
        return None  # the server that answers says what is wrong with it
    if not isinstance(asked, dict):
        return None
    changed = {name: value for name, value in asked.items() if name not in (*DROPPED, *fields)}
    changed |= {fields[0]: 1, "stream": False}
    if "n" in asked:
        changed["n"] = 1
    return json.dumps(changed).encode()
