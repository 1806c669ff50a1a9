"""Bodies and queries of files and batches."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

from lmkit.api import InvalidParam
from lmkit_http.strict import NUMBER, Label, Open, Refused, Strict
from pydantic import Field

ENDPOINTS = (
    "/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses", "/v1/messages", "/v1/rerank",
    "/v1/score", "/rerank", "/score", "/classify", "/pooling",
)  # fmt: skip
HOUR, MONTH = 3600, 30 * 86_400  # seconds; how long files may be kept


class ExpiresAfter(Strict):
    anchor: Literal["created_at"]
    seconds: Annotated[int, Field(ge=HOUR, le=MONTH), NUMBER]


class UploadRequest(Open):
    filename: Annotated[str, Field(min_length=1, max_length=255)]
    bytes: Annotated[int, Field(ge=1, le=1 << 50), NUMBER]
    purpose: Annotated[str, Field(max_length=64)]
    mime_type: Label
    expires_after: ExpiresAfter | None = None

    def check(self) -> None:
        """Raises InvalidParam."""
        check_purpose(self.purpose)


class CompleteRequest(Open):
    part_ids: Annotated[list[Annotated[str, Field(max_length=128)]], Field(min_length=1, max_length=4096)]
    md5: Annotated[str, Field(min_length=32, max_length=32)] | None = None


class BatchRequest(Open):
    refused: ClassVar[Mapping[str, Refused]] = {"model": Refused("each request of the file names its model")}
    input_file_id: Annotated[str, Field(min_length=1, max_length=128)]
    endpoint: Annotated[str, Field(max_length=128)]
    completion_window: Literal["24h"]
    metadata: Annotated[dict[Annotated[str, Field(max_length=64)], Label], Field(max_length=16)] | None = None
    output_expires_after: ExpiresAfter | None = None

    def check(self) -> None:
        """Raises InvalidParam."""
        if self.endpoint not in ENDPOINTS:
            raise InvalidParam("endpoint", self.endpoint, f"one of {', '.join(ENDPOINTS)}")


def check_purpose(purpose: str) -> None:
    """Raises InvalidParam."""
    if purpose != "batch":
        raise InvalidParam("purpose", purpose[:100], "'batch': files are for nothing else here")


def limit_of(query: Mapping[str, str], default: int, most: int) -> int:
    """How many entries of a list are wanted. Raises InvalidParam."""
    text = query.get("limit") or str(default)
    if not text.isascii() or not text.isdigit() or len(text) > 9 or not 1 <= int(text) <= most:
        raise InvalidParam("limit", text[:20], f"a number from 1 to {most}")
    return int(text)
