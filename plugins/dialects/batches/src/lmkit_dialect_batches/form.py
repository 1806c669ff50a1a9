"""multipart/form-data of bounded bodies (RFC 7578): the parts by their names."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from lmkit_http.strict import InvalidBody
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

MAX_PARTS = 16


@dataclass(slots=True)
class Part:
    filename: str | None = None
    data: bytearray = field(default_factory=bytearray)

    def text(self, most: int = 1024) -> str:
        return bytes(self.data[:most]).decode(errors="replace")


def read_form(content_type: str, body: bytes | bytearray) -> dict[str, Part]:
    """Raises InvalidBody."""
    kind, options = parse_options_header(content_type)
    if kind != b"multipart/form-data" or not (boundary := options.get(b"boundary")):
        raise InvalidBody("the body is not multipart/form-data with a boundary", "file")
    reader = _Reader()
    try:
        parser = MultipartParser(boundary, reader.callbacks())
        parser.write(bytes(body))
        parser.finalize()
    except (FormParserError, ValueError) as error:
        raise InvalidBody(f"the body is not valid multipart/form-data: {str(error)[:200]}") from None
    if not reader.ended:
        raise InvalidBody("the body of multipart/form-data does not end")
    return reader.parts


class _Reader:
    """What the parser calls."""

    def __init__(self) -> None:
        self.parts: dict[str, Part] = {}
        self.ended = False
        self._name, self._value = bytearray(), bytearray()
        self._headers: dict[bytes, bytes] = {}
        self._part = Part()

    def callbacks(self) -> Any:
        return {
            "on_part_begin": self._begin, "on_header_field": self._field, "on_header_value": self._of_field,
            "on_header_end": self._header, "on_headers_finished": self._headers_end, "on_part_data": self._data,
            "on_end": self._end,
        }  # fmt: skip

    def _begin(self) -> None:
        self._headers = {}

    def _field(self, data: bytes, start: int, end: int) -> None:
        self._name += data[start:end]

    def _of_field(self, data: bytes, start: int, end: int) -> None:
        self._value += data[start:end]

    def _header(self) -> None:
        self._headers[bytes(self._name).lower()] = bytes(self._value)
        self._name, self._value = bytearray(), bytearray()

    def _headers_end(self) -> None:
        _, options = parse_options_header(self._headers.get(b"content-disposition"))
        name, filename = options.get(b"name"), options.get(b"filename")
        if name is None:
            raise InvalidBody("a part of the body has no name")
        shown = name.decode(errors="replace")[:100]
        if shown in self.parts or len(self.parts) >= MAX_PARTS:
            raise InvalidBody(f"the body has several parts {shown!r}, or more than {MAX_PARTS}")
        self._part = self.parts[shown] = Part(None if filename is None else filename.decode(errors="replace"))

    def _data(self, data: bytes, start: int, end: int) -> None:
        self._part.data += data[start:end]

    def _end(self) -> None:
        self.ended = True
