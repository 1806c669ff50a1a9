"""The OpenAI API: chat and completions."""

from __future__ import annotations

from typing import TypeVar

from lmkit.front.dialect import Dialect, Exchange, Served
from lmkit_http.strict import parse

from lmkit_dialect_openai.chat import Chat
from lmkit_dialect_openai.completions import Completions
from lmkit_dialect_openai.schema import ChatRequest, CompletionRequest, Sampling

Request = TypeVar("Request", bound=Sampling)
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


class OpenAI(Dialect):
    routes = (CHAT, COMPLETIONS)
    stream_end = b"data: [DONE]\n\n"

    def parse(self, route: str, body: bytes | bytearray, served: Served) -> Exchange:
        if route == CHAT:
            return Chat(_checked(ChatRequest, body, served), served)
        return Completions(_checked(CompletionRequest, body, served), served)


def _checked(kind: type[Request], body: bytes | bytearray, served: Served) -> Request:
    request = parse(kind, body, served.max_values)
    served.check_model(request.model)
    request.check()
    return request
