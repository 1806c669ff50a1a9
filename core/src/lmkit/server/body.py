"""Request bodies, bounded."""

from __future__ import annotations

from starlette.requests import Request

from lmkit.server.errors import HttpError


async def read_body(request: Request, limit: int) -> bytes:
    """Raises HttpError 413, whatever Content-Length said."""
    parts, size = [], 0
    async for part in request.stream():
        size += len(part)
        if size > limit:
            raise HttpError(413, "body-too-large", f"the body is larger than {limit} bytes")
        parts.append(part)
    return b"".join(parts)
