"""Files and batches as they are kept on disk, and as clients see them."""

from __future__ import annotations

from typing import Any, Literal

import msgspec
from lmkit_run_batch.lines import Fault

Status = Literal[
    "validating", "in_progress", "finalizing", "cancelling", "completed", "failed", "expired", "cancelled"
]  # fmt: skip
UNFINISHED = frozenset({"validating", "in_progress", "finalizing", "cancelling"})
_TIMES = ("in_progress", "finalizing", "completed", "failed", "expired", "cancelling", "cancelled")


class File(msgspec.Struct):
    """One file. Times are seconds since 1970."""

    id: str
    tenant: str  # whose it is
    filename: str
    purpose: str
    bytes: int
    created_at: int
    expires_at: int

    def body(self) -> dict[str, Any]:
        return {
            "id": self.id, "object": "file", "bytes": self.bytes, "created_at": self.created_at,
            "expires_at": self.expires_at, "filename": self.filename, "purpose": self.purpose, "status": "processed",
        }  # fmt: skip


class Batch(msgspec.Struct):
    """One batch. `output_id` and `error_id` are the files that results are written to, from the beginning."""

    id: str
    tenant: str
    endpoint: str
    input_file_id: str
    output_id: str
    error_id: str
    created_at: int
    expires_at: int
    kept: int  # seconds that the files of its results are kept
    metadata: dict[str, str] | None = None
    status: Status = "validating"
    times: dict[str, int] = {}  # status -> when it began
    faults: list[Fault] = []
    total: int = 0
    completed: int = 0
    failed: int = 0
    has_output: bool = False
    has_errors: bool = False

    @property
    def finished(self) -> bool:
        return self.status not in UNFINISHED

    def body(self) -> dict[str, Any]:
        return {
            "id": self.id, "object": "batch", "endpoint": self.endpoint, "completion_window": "24h",
            "input_file_id": self.input_file_id, "status": self.status,
            "errors": {"object": "list", "data": self.faults} if self.faults else None,
            "output_file_id": self.output_id if self.has_output else None,
            "error_file_id": self.error_id if self.has_errors else None,
            "created_at": self.created_at, "expires_at": self.expires_at,
            **{f"{name}_at": self.times.get(name) for name in _TIMES},
            "request_counts": {"total": self.total, "completed": self.completed, "failed": self.failed},
            "metadata": self.metadata,
        }  # fmt: skip
