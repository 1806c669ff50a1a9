"""Request bodies, bounded."""

from __future__ import annotations

import asyncio

from starlette.requests import Request

from lmkit.server.errors import HttpError

BODY_SECONDS = 60.0


async def read_body(request: Request, limit: int) -> bytes:
    """Raises HttpError 413, whatever Content-Length said, and 408 for a client that does not get on."""
    parts, size = [], 0
    try:
        async with asyncio.timeout(BODY_SECONDS):
            async for part in request.stream():
                size += len(part)
                if size > limit:
                    raise HttpError(413, "body-too-large", f"the body is larger than {limit} bytes")
                parts.append(part)
    except TimeoutError:
        raise HttpError(408, "body-timeout", f"the body did not arrive within {BODY_SECONDS:g} s") from None
    return b"".join(parts)
