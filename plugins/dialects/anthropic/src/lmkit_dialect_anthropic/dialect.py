"""The dialect `anthropic`: routes, models, and the shape of errors."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

import msgspec
from lmkit.api import ErrorInfo
from lmkit_http.dialect import Answer, ContextTooLong, Dialect, Exchange, Incoming, Served, error_text
from lmkit_http.strict import parse

from lmkit_dialect_anthropic.messages import Count, Messages
from lmkit_dialect_anthropic.schema import CountRequest, MessagesRequest

MESSAGES, COUNT = "POST /v1/messages", "POST /v1/messages/count_tokens"
MODELS, MODEL = "GET /v1/models", "GET /v1/models/{name:path}"
REQUESTS: Mapping[str, type[CountRequest]] = {MESSAGES: MessagesRequest, COUNT: CountRequest}
_KINDS = {
    401: "authentication_error", 403: "permission_error", 404: "not_found_error", 413: "request_too_large",
    429: "rate_limit_error", 503: "overloaded_error",
}  # fmt: skip


class Anthropic(Dialect):
    keeps = False
    routes = tuple(REQUESTS)
    light_routes = (MODELS, MODEL)
    mark = "anthropic-version"

    def parse(self, incoming: Incoming, served: Served) -> Exchange | Answer:
        if incoming.route == MODELS:
            models = [_model(name, served) for name in (*served.names, *sorted(served.adapters))]
            body = {"data": models, "has_more": False, "first_id": models[0]["id"], "last_id": models[-1]["id"]}
            return Answer(msgspec.json.encode(body))
        if incoming.route == MODEL:
            served.check_model(incoming.path["name"])
            return Answer(msgspec.json.encode(_model(incoming.path["name"], served)))
        request = parse(REQUESTS[incoming.route], incoming.body, served.max_values, served.lenient)
        request.model = request.model or None
        served.check_model(request.model)
        return Messages(request, served) if isinstance(request, MessagesRequest) else Count(request, served)

    def waiting(self) -> bytes:
        return b'event: ping\ndata: {"type": "ping"}\n\n'

    def error(self, info: ErrorInfo) -> bytes:
        message = error_text(info)
        if info.code == ContextTooLong.code:
            message = f"prompt is too long: {info.value} tokens > {info.limit} maximum"
        elif info.field and info.field not in message:
            message = f"{info.field}: {message}"
        kind = _KINDS.get(info.status, "invalid_request_error" if info.status < 500 else "api_error")
        return msgspec.json.encode({"type": "error", "error": {"type": kind, "message": message}})

    def error_chunk(self, info: ErrorInfo) -> bytes:
        return b"event: error\ndata: " + self.error(info) + b"\n\n"


def _model(name: str, served: Served) -> dict[str, Any]:
    created = datetime.fromtimestamp(served.about.get("created", 0), UTC).isoformat().replace("+00:00", "Z")
    return {
        "type": "model", "id": name, "display_name": name, "created_at": created, "lifecycle": "active",
        "max_input_tokens": served.max_length, "max_tokens": served.max_length, "capabilities": None,
    }  # fmt: skip
