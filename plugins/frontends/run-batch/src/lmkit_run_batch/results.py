"""Results of a batch: a line for each request, at most one, each whole or not there, whatever ends the process."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any
from uuid import uuid4

import msgspec
from lmkit.api import ConfigError
from lmkit_http.dialect import Answer


class _Response(msgspec.Struct):
    status_code: int
    request_id: str
    body: msgspec.Raw


class _Result(msgspec.Struct):
    id: str
    custom_id: str
    response: _Response | None = None
    error: dict[str, str] | None = None

    @property
    def failed(self) -> bool:
        return self.response is None or self.response.status_code >= 400


_HEAD = b'{"id":"batch_req_'
_decode = msgspec.json.Decoder(_Result).decode


class Results:
    """Lines are added to two files, which may be the same: `output`, and `errors` for requests that failed.

    What a killed process left unfinished at the end of a file is cut off when it is opened; the rest counts. Used from
    several threads. `grow` is told how many bytes are about to be added, and may refuse them. Raises OSError, and
    ConfigError for a file of something else.
    """

    def __init__(self, output: Path, errors: Path, grow: Callable[[int], None] = lambda size: None) -> None:
        self._lock, self._grow = threading.Lock(), grow
        self.num_completed = self.num_failed = 0
        self.ids: set[str] = set()  # of requests that have their line
        self._files: dict[bool, Any] = {}
        self._files[False] = self._open(output)
        self._files[True] = self._files[False] if errors == output else self._open(errors)

    def _open(self, path: Path) -> Any:
        file = path.open("a+b", buffering=0)
        file.seek(0)
        end = 0
        with os.fdopen(os.dup(file.fileno()), "rb") as lines:
            for raw in lines:
                if not self._count(raw):
                    if lines.read(1) or not (end or _begun(raw)):
                        self.close()
                        file.close()
                        raise ConfigError(f"{path} has a line that is no result", fix="choose another file")
                    break
                end += len(raw)
        file.truncate(end)
        return file

    def _count(self, raw: bytes) -> bool:
        """Counts a line that was written whole."""
        try:
            result = _decode(raw) if raw.endswith(b"\n") else None
        except (msgspec.DecodeError, RecursionError):
            result = None
        if result is not None:
            self._add(result)
        return result is not None

    def _add(self, result: _Result) -> None:
        self.ids.add(result.custom_id)
        self.num_failed += result.failed
        self.num_completed += not result.failed

    def answered(self, custom_id: str, answer: Answer) -> None:
        """Nothing when the request has its line already. Raises OSError, and what `grow` does."""
        assert isinstance(answer.body, (bytes, bytearray))
        response = _Response(answer.status, answer.headers.get("x-request-id", ""), _one_line(answer.body))
        self._write(_Result(f"batch_req_{uuid4().hex}", custom_id, response))

    def given_up(self, custom_id: str, code: str, message: str) -> None:
        """The same for a request that was never answered."""
        self._write(_Result(f"batch_req_{uuid4().hex}", custom_id, error={"code": code, "message": message}))

    def _write(self, result: _Result) -> None:
        line = msgspec.json.encode(result) + b"\n"
        with self._lock:
            if result.custom_id in self.ids:
                return
            self._grow(len(line))
            file = self._files[result.failed]
            end = file.seek(0, os.SEEK_END)
            try:
                view = memoryview(line)
                while view:
                    view = view[file.write(view) :]
            except OSError:
                file.truncate(end)
                raise
            self._add(result)

    def close(self) -> None:
        """What was written is on disk then. Idempotent."""
        with self._lock:
            for file in set(self._files.values()):
                if not file.closed:
                    os.fsync(file.fileno())
                    file.close()


def _begun(line: bytes) -> bool:
    """Whether a line may be the beginning of a result, or was never written to the disk."""
    return line[: len(_HEAD)] == _HEAD[: len(line)] or not line.strip(b"\0")


def _one_line(body: bytes | bytearray) -> msgspec.Raw:
    """JSON without line ends; what is no JSON as a text."""
    try:
        if b"\n" not in body:
            msgspec.json.decode(body, type=msgspec.Raw)
            return msgspec.Raw(bytes(body))
        return msgspec.Raw(msgspec.json.encode(msgspec.json.decode(body)))
    except msgspec.DecodeError:
        return msgspec.Raw(msgspec.json.encode(bytes(body).decode(errors="replace")))
