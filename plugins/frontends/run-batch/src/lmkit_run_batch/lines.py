"""Input files of batches: a request on each line, as the OpenAI API writes them."""

from __future__ import annotations

from codecs import BOM_UTF8
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import msgspec

MAX_REQUESTS = 50_000  # of a batch, as in the OpenAI API
MAX_LINE = 64 << 20  # bytes; what a request may have is the server's to say
MAX_FAULTS = 32  # that are listed


class Fault(msgspec.Struct):
    """What is wrong with an input file, or keeps a batch from going on."""

    code: str
    message: str
    line: int | None = None
    param: str | None = None


class _Request(msgspec.Struct, forbid_unknown_fields=True):
    custom_id: Annotated[str, msgspec.Meta(min_length=1, max_length=512)]
    method: Literal["POST"]
    url: Annotated[str, msgspec.Meta(pattern=r"^/[\w./-]{1,128}$")]
    body: msgspec.Raw


@dataclass(frozen=True, slots=True)
class Line:
    """One request of a batch. `body` is a JSON object."""

    number: int
    custom_id: str
    url: str
    body: bytes


_read = msgspec.json.Decoder(_Request).decode


def read_lines(path: Path, begin: int = 0, end: int | None = None) -> Iterator[Line | Fault]:
    """All lines but empty ones; a Fault for each that is no request. `begin`, `end`: of some lines, in bytes."""
    with path.open("rb") as file:
        number, _ = 0, file.seek(begin)
        while (end is None or file.tell() < end) and (raw := file.readline(MAX_LINE + 1)):
            number += 1
            if begin == 0 and number == 1:
                raw = raw.removeprefix(BOM_UTF8)  # which editors and shells of Windows write
            if len(raw) > MAX_LINE:
                yield Fault("line_too_long", f"a line has more than {MAX_LINE} bytes", number)
                return
            if raw.strip():
                yield _line(raw, number)


def requests(path: Path) -> Iterator[Line]:
    """The requests of a file that was checked."""
    return (line for line in read_lines(path) if isinstance(line, Line))


def check_lines(path: Path, endpoint: str | None = None, most: int = MAX_REQUESTS) -> tuple[int, list[Fault]]:
    """How many requests a file has, and what is wrong with it: the first so many faults.

    `endpoint`: of all requests; None: each may have its own.
    """
    seen: set[str] = set()
    faults: list[Fault] = []
    for line in read_lines(path):
        if len(seen) >= most:
            faults.append(Fault("too_many_requests", f"a batch has at most {most} requests"))
        elif isinstance(line, Fault):
            faults.append(line)
        elif line.custom_id in seen:
            message = f"custom_id {line.custom_id!r} came before"
            faults.append(Fault("duplicate_custom_id", message, line.number, "custom_id"))
        elif endpoint is not None and line.url != endpoint:
            message = f"the url {line.url!r} is not the batch's endpoint {endpoint!r}"
            faults.append(Fault("mismatched_endpoint", message, line.number, "url"))
        else:
            seen.add(line.custom_id)
        if len(faults) >= MAX_FAULTS or (faults[-1:] and faults[-1].code == "too_many_requests"):
            break
    if not seen and not faults:
        faults.append(Fault("empty_file", "the file has no requests"))
    return len(seen), faults


def _line(raw: bytes, number: int) -> Line | Fault:
    try:
        request = _read(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        message = f"not a request with custom_id, method, url and body: {str(error)[:300]}"
        return Fault("invalid_json_line", message, number)
    body = bytes(request.body)
    if not body.startswith(b"{"):
        return Fault("invalid_json_line", "the body is not a JSON object", number, "body")
    return Line(number, request.custom_id, request.url, body)
