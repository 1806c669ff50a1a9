"""Errors in the shape of the OpenAI API: {"error": {"message", "type", "param", "code"}}, never a stack trace."""

from __future__ import annotations

import msgspec
from lmkit.api import EngineDead, EngineError, ErrorInfo, LmkitError, RequestError
from starlette.responses import Response

_TYPES = {400: "invalid_request_error", 401: "authentication_error", 404: "not_found_error",
          413: "invalid_request_error", 431: "invalid_request_error", 503: "service_unavailable"}  # fmt: skip


_INTERNAL = ErrorInfo("internal", "internal server error", "the server's log has the cause", status=500)


class UnsupportedField(RequestError):
    """A field, or a value of it, that cannot be honoured."""

    code = "unsupported"

    def __init__(self, field: str, message: str, *, fix: str = "") -> None:
        self.field = field
        super().__init__(message, fix=fix)


class UnknownModel(RequestError):
    code = "model_not_found"
    status = 404
    field = "model"


class HttpError(LmkitError):
    """An error of the transport: `status` and `code` are given."""

    def __init__(self, status: int, code: str, message: str, *, fix: str = "", field: str | None = None) -> None:
        super().__init__(message, fix=fix)
        self.status, self.code, self.field = status, code, field  # type: ignore[misc]


def is_inside(info: ErrorInfo) -> bool:
    """Whether an error tells of the machine and the code, which concerns whoever runs the server."""
    return info.status >= 500 and info.code in (EngineDead.code, EngineError.code, _INTERNAL.code)


def public(info: ErrorInfo) -> ErrorInfo:
    """What a client learns of an error; the server's log has the rest."""
    if not is_inside(info):
        return info
    if info.code == EngineDead.code:
        return msgspec.structs.replace(info, message="the engine is not running", fix="try again in a while")
    return msgspec.structs.replace(_INTERNAL, code=info.code, status=info.status)


def body_of(info: ErrorInfo) -> dict[str, object]:
    """The JSON body. The fix is part of the message, so that every client shows it."""
    info = public(info)
    message = f"{info.message}. {info.fix[:1].upper()}{info.fix[1:]}" if info.fix else info.message
    kind = _TYPES.get(info.status, "invalid_request_error" if info.status < 500 else "server_error")
    return {"error": {"message": message, "type": kind, "param": info.field, "code": info.code}}


def error_response(info: ErrorInfo) -> Response:
    headers = {"Retry-After": "1"} if info.status == 503 and info.retryable else {}
    if info.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    content = msgspec.json.encode(body_of(info))
    return Response(content, info.status, headers, media_type="application/json")


def info_of(error: BaseException) -> ErrorInfo:
    """An untyped error is a bug of ours: clients learn that, and nothing else."""
    if isinstance(error, LmkitError):
        return error.info()
    return _INTERNAL
