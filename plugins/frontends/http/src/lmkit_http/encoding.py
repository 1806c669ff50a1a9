"""Compressed request bodies, made plain piece by piece: never more at once than a part of what a body may have."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from importlib import import_module
from typing import Any, Protocol

from lmkit.api import LmkitError

PIECE = 256 << 10  # bytes that are made plain at a time
_GZIP, _ZLIB = 16 + zlib.MAX_WBITS, zlib.MAX_WBITS
_ZSTD_WINDOW = 8 << 20  # bytes of memory; what RFC 9659 allows a sender


class UnsupportedEncoding(LmkitError):
    """A body is compressed in a way that is not read, or in several."""

    code = "unsupported-encoding"
    status = 415

    def __init__(self) -> None:
        super().__init__(
            "this Content-Encoding is not read", fix=f"send one of {', '.join(sorted(ENCODINGS))}, or none"
        )


class BrokenEncoding(LmkitError):
    """A body is not what its Content-Encoding says, or ends too soon."""

    code = "broken-encoding"
    status = 400

    def __init__(self, encoding: str) -> None:
        super().__init__(f"the body is no whole {encoding} data", fix="check how the body is compressed")


class Decoder(Protocol):
    """Makes a body plain."""

    def feed(self, part: bytes) -> Iterator[bytes]:
        """Pieces of at most PIECE bytes. Raises BrokenEncoding."""
        ...

    def end(self) -> None:
        """Raises BrokenEncoding for a body that goes on."""
        ...


class Plain:
    """A body that is not compressed."""

    def feed(self, part: bytes) -> Iterator[bytes]:
        yield part

    def end(self) -> None:
        """Whatever came is whole."""


class Inflate:
    """gzip, or deflate as RFC 9110 has it (with the header of zlib)."""

    def __init__(self, encoding: str) -> None:
        self._encoding = encoding
        self._inflate = zlib.decompressobj(_GZIP if encoding == "gzip" else _ZLIB)

    def feed(self, part: bytes) -> Iterator[bytes]:
        more = bool(part)
        while more:
            if self._inflate.eof:  # a second member, or rubbish
                raise BrokenEncoding(self._encoding)
            try:
                piece = self._inflate.decompress(part, PIECE)
            except zlib.error:
                raise BrokenEncoding(self._encoding) from None
            part = self._inflate.unused_data if self._inflate.eof else self._inflate.unconsumed_tail
            more = bool(part) or (len(piece) == PIECE and not self._inflate.eof)
            if piece:
                yield piece

    def end(self) -> None:
        if not self._inflate.eof:
            raise BrokenEncoding(self._encoding)


class Zstd:
    """zstd by the standard library (Python 3.14)."""

    def __init__(self, encoding: str) -> None:
        assert _zstd is not None
        self._errors = _zstd.ZstdError
        log = _ZSTD_WINDOW.bit_length() - 1
        self._inflate = _zstd.ZstdDecompressor(options={_zstd.DecompressionParameter.window_log_max: log})

    def feed(self, part: bytes) -> Iterator[bytes]:
        while part or not (self._inflate.eof or self._inflate.needs_input):
            if self._inflate.eof:
                raise BrokenEncoding("zstd")
            try:
                piece = self._inflate.decompress(part, PIECE)
            except self._errors:
                raise BrokenEncoding("zstd") from None
            part = self._inflate.unused_data if self._inflate.eof else b""
            if piece:
                yield piece

    def end(self) -> None:
        if not self._inflate.eof:
            raise BrokenEncoding("zstd")


def _find_zstd() -> Any:
    try:
        return import_module("compression.zstd")
    except ImportError:
        pass
    try:
        return import_module("backports.zstd")  # the same for older versions
    except ImportError:
        return None


_zstd = _find_zstd()
_DECODERS: dict[str, Callable[[str], Decoder]] = {"gzip": Inflate, "x-gzip": Inflate, "deflate": Inflate}
if _zstd is not None:
    _DECODERS["zstd"] = Zstd
ENCODINGS = frozenset({"identity", *_DECODERS})


def decoder(encoding: str) -> Decoder:
    """`encoding`: of ENCODINGS."""
    name = encoding.strip().lower() or "identity"
    return Plain() if name == "identity" else _DECODERS[name]("gzip" if name == "x-gzip" else name)
