"""The OpenAI API: chat and completions, and several chats at once as vLLM takes them."""

from __future__ import annotations

from typing import TypeVar

from lmkit_http.dialect import Dialect, Exchange, Incoming, Served
from lmkit_http.strict import MAX_LABEL, parse

from lmkit_dialect_openai.chat import Chat
from lmkit_dialect_openai.chat_batch import BatchChatRequest, ChatBatch
from lmkit_dialect_openai.completions import Completions
from lmkit_dialect_openai.schema import ChatRequest, CompletionRequest, Sampling

Request = TypeVar("Request", bound=Sampling)
CHAT, COMPLETIONS = "POST /v1/chat/completions", "POST /v1/completions"
CHAT_BATCH = "POST /v1/chat/completions/batch"

REQUESTS: dict[str, type[Sampling]] = {
    CHAT: ChatRequest, COMPLETIONS: CompletionRequest, CHAT_BATCH: BatchChatRequest,
}  # fmt: skip


class OpenAI(Dialect):
    keeps = False
    routes = tuple(REQUESTS)
    stream_end = b"data: [DONE]\n\n"

    def parse(self, incoming: Incoming, served: Served) -> Exchange:
        if incoming.route == CHAT:
            return Chat(_checked(ChatRequest, incoming, served), served)
        if incoming.route == CHAT_BATCH:
            return ChatBatch(_checked(BatchChatRequest, incoming, served), served)
        return Completions(_checked(CompletionRequest, incoming, served), served)


def _checked(kind: type[Request], incoming: Incoming, served: Served) -> Request:
    request = parse(kind, incoming.body, served.max_values, served.lenient)
    request.model = request.model or None
    served.check_model(request.model)
    request.check()
    if request.request_id is None and len(given := incoming.headers.get("x-request-id", "")) <= MAX_LABEL:
        request.request_id = given
    return request
