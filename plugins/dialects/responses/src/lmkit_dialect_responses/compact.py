"""/v1/responses/compact: a long conversation becomes its messages and a summary that the model writes.

The summary is an item that clients send back unread, in place of the answers, calls and results that it tells of.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any
from uuid import uuid4

import msgspec
from lmkit.api import SamplingParams, ToolChoice
from lmkit_http.dialect import ChatAsk, Exchange, Served, Turn

from lmkit_dialect_responses.conversation import Placed, sealed
from lmkit_dialect_responses.history import kept_item
from lmkit_dialect_responses.usage import usage_of

INSTRUCTION = (
    "Summarize the conversation above for whoever goes on with it: what was asked, what was done and found out, what "
    "is decided, and what is still to do. Keep names, paths and figures. Write the summary alone."
)


class Compact(Exchange):
    """One request: its answer has the messages of the client and the summary."""

    def __init__(self, ask: ChatAsk, items: Sequence[Placed], served: Served) -> None:
        messages = [*ask.messages, {"role": "user", "content": INSTRUCTION}]
        places = [*ask.places, "input"]
        params = SamplingParams(max_tokens=None, **served.default_params)
        super().__init__(
            replace(ask, messages=messages, places=places, tools=(), tool_choice=ToolChoice(), params=params)
        )
        self.id = f"resp_{uuid4().hex}"
        self.headers = {"x-request-id": self.id}
        self._created = int(time.time())
        self._kept = [kept_item(item) for _, item in items if item.kind == "message" and item.role != "assistant"]

    def whole(self, turns: Sequence[Turn]) -> bytes:
        turn = turns[0]
        summary = {"type": "compaction", "id": f"cmp_{uuid4().hex}", "encrypted_content": sealed(turn.message.content)}
        body: dict[str, Any] = {
            "id": self.id, "object": "response.compaction", "created_at": self._created,
            "output": [*self._kept, summary], "usage": usage_of([turn.stream.usage]),
        }  # fmt: skip
        return msgspec.json.encode(body)
