"""Errors as answers: {"error": {"message", "type", "param", "code"}}, unless a dialect says otherwise."""

from __future__ import annotations

from collections.abc import Callable
from math import ceil

import msgspec
from lmkit.api import EngineDead, EngineError, ErrorInfo, LmkitError
from starlette.responses import Response

from lmkit_http.dialect import error_json
from lmkit_http.encoding import ENCODINGS

ErrorWriter = Callable[[ErrorInfo], bytes]  # the body of an error, as a dialect writes it
_INTERNAL = ErrorInfo("internal", "internal server error", "the server's log has the cause", status=500)


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


def error_response(info: ErrorInfo, body: ErrorWriter = error_json, retry_after: float | None = None) -> Response:
    """`body`: how the dialect that was spoken writes errors. `retry_after`: seconds; None: one, where trying helps."""
    headers = retry_headers(info, retry_after)
    if info.status == 415:  # RFC 9110, 12.5.3: which codings of a body would be read
        headers["Accept-Encoding"] = ", ".join(sorted(ENCODINGS - {"identity"}))
    if info.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return Response(body(public(info)), info.status, headers, media_type="application/json")


def retry_headers(info: ErrorInfo, retry_after: float | None) -> dict[str, str]:
    """When to come back, of which an error need not know anything."""
    if retry_after is not None:  # whole seconds; some clients read the finer one first
        return {"Retry-After": str(max(1, ceil(retry_after))), "retry-after-ms": str(ceil(retry_after * 1000))}
    return {"Retry-After": "1"} if info.status == 503 and info.retryable else {}


def info_of(error: BaseException) -> ErrorInfo:
    """An untyped error is a bug of ours: clients learn that, and nothing else."""
    if isinstance(error, LmkitError):
        return error.info()
    return _INTERNAL
