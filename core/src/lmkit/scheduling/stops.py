"""When an output is complete."""

from __future__ import annotations

from collections.abc import Collection

from lmkit.api import FinishReason
from lmkit.scheduling.request import Request


def finish_reason(r: Request, token: int, eos_token_ids: Collection[int]) -> FinishReason | None:
    """Whether `token`, the last of r.tokens, ends the request: eos before stop ids before length.

    eos and stop ids count only after `min_tokens` other tokens (workers mask them until then).
    """
    params = r.params
    if r.num_output > params.min_tokens and (
        (token in eos_token_ids and not params.ignore_eos) or token in params.stop_token_ids
    ):
        return "stop"
    return "length" if len(r.tokens) >= r.max_length else None
