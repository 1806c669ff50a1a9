"""/v1/chat/completions/batch: several conversations in one body, a choice for each in one answer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, ClassVar

import msgspec
from lmkit.api import RequestError
from lmkit_http.dialect import Ask, Served, Turn, UnsupportedField
from lmkit_http.strict import MAX_MESSAGES, Message, Refused
from pydantic import Field

from lmkit_dialect_openai.chat import Chat, ChatBody, ask_of
from lmkit_dialect_openai.schema import MAX_PROMPTS, ChatRequest
from lmkit_dialect_openai.wire import usage_of

_ONE = "send each conversation to /v1/chat/completions"
# fields of a chat that are not for several at once, and the values that change nothing
ALONE: Mapping[str, Refused] = {
    "stream": Refused(_ONE), "stream_options": Refused(_ONE), "tools": Refused(_ONE),
    "tool_choice": Refused(_ONE, ("none",)),
    "parallel_tool_calls": Refused(_ONE, (True,)), "n": Refused(_ONE, (1,)), "use_beam_search": Refused(_ONE),
    "length_penalty": Refused(_ONE, (1.0,)), "early_stopping": Refused(_ONE), "prompt_logprobs": Refused(_ONE),
}  # fmt: skip

Conversation = Annotated[list[Message], Field(fail_fast=True, min_length=1, max_length=MAX_MESSAGES)]


class BatchChatRequest(ChatRequest):
    refused: ClassVar[Mapping[str, Refused]] = {**ChatRequest.refused, **ALONE}
    messages: Annotated[  # type: ignore[assignment]  # of all conversations
        list[Conversation], Field(fail_fast=True, min_length=1, max_length=MAX_PROMPTS)
    ]

    @classmethod
    def states(cls) -> dict[str, str]:
        return {name: state for name, state in super().states().items() if not name.startswith("stream_options.")}

    def check(self) -> None:
        """Raises RequestError."""
        for one in self.each():
            one.check()

    def each(self) -> list[ChatRequest]:
        """The request of each conversation; what is dropped of one is dropped of all."""
        fields = {name: getattr(self, name) for name in ChatRequest.model_fields}
        requests = [ChatRequest.model_construct(**{**fields, "messages": m}) for m in self.messages]
        for request in requests:
            request._dropped = self._dropped
        return requests


class ChatBatch(Chat):
    """The choices are those of the conversations, in their order."""

    def __init__(self, request: BatchChatRequest, served: Served) -> None:
        several = request.each()
        if len(several) > served.max_choices:
            raise UnsupportedField(
                "messages", f"{len(several)} conversations are more than {served.max_choices}",
                fix="send fewer at once, or a batch of /v1/batches",
            )  # fmt: skip
        super().__init__(several[0], served)
        self._asks: list[Ask] = [self.ask, *(ask_of(one, served) for one in several[1:])]

    def turns(self, prepare: Callable[[Ask, str], list[Turn]]) -> list[Turn]:
        found: list[Turn] = []
        for i, ask in enumerate(self._asks):
            try:
                found += prepare(ask, f"{self.id}-{i}")
            except RequestError as error:
                error.message = f"conversation {i}: {error.message}"
                raise
            found[-1].index = i
        return found

    def whole(self, turns: Sequence[Turn]) -> bytes:
        choices, usage = [self._choice(turn) for turn in turns], usage_of([turn.stream.usage for turn in turns])
        body = ChatBody(self.id, "chat.completion", self._created, self._model, choices, usage, self._fingerprint)
        return msgspec.json.encode(body)
