"""The Ollama API. One model is served, which is always loaded: what would change models is refused by name."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, TypeVar

import msgspec
from lmkit.api import ErrorInfo, RequestError
from lmkit_http.dialect import Answer, ContextTooLong, Dialect, Exchange, Incoming, Served, error_text
from lmkit_http.strict import InvalidBody, parse, warnings_header

from lmkit_dialect_ollama.answers import Chat, Embed, Generate, now
from lmkit_dialect_ollama.schema import Base, ChatRequest, EmbeddingsRequest, EmbedRequest, GenerateRequest, Named

# clients decide by the version what they send: that of the API whose fields are known here
VERSION = "0.13.0"
_NEVER = "9999-12-31T23:59:59Z"
_CHANGES = {
    "POST /api/pull": "pulling", "POST /api/push": "pushing", "POST /api/create": "creating",
    "POST /api/copy": "copying", "DELETE /api/delete": "deleting", "POST /api/blobs/{digest}": "uploading",
}  # fmt: skip
Request = TypeVar("Request", bound=Base)
REQUESTS: Mapping[str, type[Base]] = {
    "POST /api/chat": ChatRequest, "POST /api/generate": GenerateRequest, "POST /api/embed": EmbedRequest,
    "POST /api/embeddings": EmbeddingsRequest,
}  # fmt: skip


class NoSuchWork(RequestError):
    """What this server does not do to models."""

    code = "unsupported"


class Ollama(Dialect):
    """Lines of JSON; errors are {"error": "..."}."""

    keeps = False
    routes = tuple(REQUESTS)
    light_routes = ("GET /api/tags", "GET /api/ps", "GET /api/version", "POST /api/show", *_CHANGES)
    stream_type = "application/x-ndjson"

    def parse(self, incoming: Incoming, served: Served) -> Exchange | Answer:
        match incoming.route:
            case "POST /api/chat":
                chat, adapter = _checked(ChatRequest, incoming, served)
                if not chat.messages:
                    return _loaded(chat, {"message": {"role": "assistant", "content": ""}})
                return Chat(chat, served, adapter)
            case "POST /api/generate":
                generate, adapter = _checked(GenerateRequest, incoming, served)
                if not generate.prompt:
                    return _loaded(generate, {"response": ""})
                return Generate(generate, served, adapter)
            case "POST /api/embed":
                return Embed(*_with(EmbedRequest, incoming, served))
            case "POST /api/embeddings":
                return Embed(*_with(EmbeddingsRequest, incoming, served))
            case "GET /api/tags":
                return _json({"models": [_model(name, served) for name in _names(served)]})
            case "GET /api/ps":
                more = {"expires_at": _NEVER, "size_vram": 0, "context_length": served.max_length}
                return _json({"models": [_model(name, served) | more for name in _names(served)]})
            case "GET /api/version":
                return _json({"version": VERSION})
            case "POST /api/show":
                return _show(incoming, served)
        what = _CHANGES[incoming.route]
        raise NoSuchWork(f"{what} models is not done here", fix="start lmkit serve with the model you want")

    def error(self, info: ErrorInfo) -> bytes:
        text = error_text(info)
        if info.code == ContextTooLong.code:
            text = f"the input length exceeds the context length: {info.value} tokens > {info.limit}"
        return msgspec.json.encode({"error": text})

    def error_chunk(self, info: ErrorInfo) -> bytes:
        return self.error(info) + b"\n"


def _checked(kind: type[Request], incoming: Incoming, served: Served) -> tuple[Request, str | None]:
    """The request, and the adapter that it asks for. Raises RequestError."""
    request = parse(kind, incoming.body, served.max_values, served.lenient)
    name = _known(request.model, served)
    request.check(served)
    return request, served.adapter(name)


def _with(kind: type[Request], incoming: Incoming, served: Served) -> tuple[Request, Served, str | None]:
    request, adapter = _checked(kind, incoming, served)
    return request, served, adapter


def _known(name: str, served: Served) -> str:
    """The name as it is served: clients add the tag that stands for none. Raises UnknownModel."""
    plain = name.removesuffix(":latest")
    known = plain if plain in (*served.names, *served.adapters) else name
    served.check_model(known)
    return known


def _names(served: Served) -> list[str]:
    return [*served.names, *sorted(served.adapters)]


def _loaded(request: ChatRequest | GenerateRequest, said: dict[str, Any]) -> Answer:
    """Whoever asks nothing wants the model to be loaded, which it is."""
    headers = warnings_header(request.dropped)
    body = {"model": request.model, "created_at": now(), **said, "done": True, "done_reason": "load"}
    return Answer(msgspec.json.encode(body), headers=headers)


def _model(name: str, served: Served) -> dict[str, Any]:
    """What is known of a model. The digest tells served models apart; sizes of files are not known here."""
    since = datetime.fromtimestamp(served.about["created"], UTC).isoformat().replace("+00:00", "Z")
    digest = hashlib.sha256(f"{served.about['root']}/{name}".encode()).hexdigest()
    return {"name": name, "model": name, "modified_at": since, "size": 0, "digest": digest, "details": _DETAILS}


_DETAILS = {
    "parent_model": "", "format": "", "family": "", "families": None, "parameter_size": "", "quantization_level": "",
}  # fmt: skip


def _show(incoming: Incoming, served: Served) -> Answer:
    request = parse(Named, incoming.body, lenient=served.lenient)
    name = request.model or request.name
    if not name:
        raise InvalidBody("model is required", "model")
    shown = _model(_known(name, served), served)
    able = served.about["capabilities"]
    found = [("completion", served.pooler is None), ("tools", able["tools"]), ("thinking", able["reasoning"])]
    found.append(("embedding", "embed" in able["tasks"]))
    return _json({
        "modelfile": "", "parameters": "", "template": served.tokenizer.chat_template or "",
        "details": _DETAILS, "modified_at": shown["modified_at"],
        "model_info": {"general.architecture": "lmkit", "lmkit.context_length": served.max_length},
        "capabilities": [what for what, has in found if has],
    })  # fmt: skip


def _json(value: dict[str, Any]) -> Answer:
    return Answer(msgspec.json.encode(value))
