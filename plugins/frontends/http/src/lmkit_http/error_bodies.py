"""The bodies of errors, as the dialect of a request writes them; as most clients read them where the dialect cannot."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lmkit.api import LmkitError, guard

from lmkit_http.dialect import error_json

if TYPE_CHECKING:
    from lmkit.api import ErrorInfo

    from lmkit_http.dialect import Dialect


def written_error(dialect: Dialect | None, info: ErrorInfo) -> bytes:
    """The body of an error as its dialect writes it; as most clients read it where the dialect cannot."""
    body = _written(dialect, "error", info) if dialect is not None else None
    return error_json(info) if body is None else body


def written_error_chunk(dialect: Dialect, info: ErrorInfo) -> bytes:
    """The error in the middle of a stream, likewise."""
    body = _written(dialect, "error_chunk", info)
    return b"data: " + error_json(info) + b"\n\n" if body is None else body


def _written(dialect: Dialect, method: str, info: ErrorInfo) -> bytes | None:
    try:
        with guard(dialect.owner, method):
            body: object = getattr(dialect, method)(info)
    except LmkitError:
        return None
    return body if isinstance(body, bytes) else None
