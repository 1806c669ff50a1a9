"""What stands in a GGUF file before its data: metadata, and where each tensor lies (versions 2 and 3, little-endian).

magic, version, number of tensors, number of pairs; the pairs: key, type, value; the tensors: name, number of axes, axes
from the innermost on, type, offset; then, at the next multiple of the alignment, the data. Source: ggml/docs/gguf.md.

Files come from strangers: every count and size is checked against what is left of the file before it is used.
"""

from __future__ import annotations

import mmap
import re
import struct
from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import prod
from pathlib import Path
from typing import Any

from lmkit.api import CheckpointError

STRING, ARRAY, BOOL = 8, 9, 7
NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}  # by type
MAX_PAIRS, MAX_TENSORS, MAX_AXES, MAX_NAME, MAX_KEY = 1 << 16, 1 << 18, 4, 512, 1 << 16
MAX_SIZE = 1 << 48  # numbers in a tensor
ALIGNMENT = 32
SPLIT = re.compile(r"(?P<stem>.+)-(?P<no>\d{5})-of-(?P<count>\d{5})\.gguf")


@dataclass(frozen=True, slots=True)
class BlockType:
    """How numbers of one type are stored: `elements` of them in `nbytes`."""

    name: str
    elements: int
    nbytes: int


TYPES = {
    number: BlockType(*fields)
    for number, fields in {
        0: ("F32", 1, 4), 1: ("F16", 1, 2), 30: ("BF16", 1, 2), 2: ("Q4_0", 32, 18), 3: ("Q4_1", 32, 20),
        6: ("Q5_0", 32, 22), 7: ("Q5_1", 32, 24), 8: ("Q8_0", 32, 34), 10: ("Q2_K", 256, 84), 11: ("Q3_K", 256, 110),
        12: ("Q4_K", 256, 144), 13: ("Q5_K", 256, 176), 14: ("Q6_K", 256, 210), 20: ("IQ4_NL", 32, 18),
        23: ("IQ4_XS", 256, 136), 39: ("MXFP4", 32, 17),
    }.items()
}  # fmt: skip
OTHERS = {
    9: "Q8_1", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S", 21: "IQ3_S", 22: "IQ2_S", 24: "I8",
    25: "I16", 26: "I32", 27: "I64", 28: "F64", 29: "IQ1_M", 34: "TQ1_0", 35: "TQ2_0", 40: "NVFP4", 41: "Q1_0",
    4: "Q4_2", 5: "Q4_3", 31: "Q4_0_4_4", 32: "Q4_0_4_8", 33: "Q4_0_8_8", 36: "IQ4_NL_4_4", 37: "IQ4_NL_4_8",
    38: "IQ4_NL_8_8",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """`shape` is as in torch: the innermost axis last. `offset` counts from the beginning of the file."""

    name: str
    shape: tuple[int, ...]
    type: BlockType
    offset: int
    nbytes: int


class GgufFile:
    """One file. Raises CheckpointError, naming it, for all that is not as it should be."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                self.data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        except (OSError, ValueError) as e:  # ValueError: an empty file cannot be mapped
            raise self._bad(f"it cannot be read: {e}") from e
        try:
            self._at = 0
            magic, version, self._num_tensors, num_pairs = self._take("<4sIQQ")
            if magic != b"GGUF" or version not in (2, 3):
                what = f"version {version}" if magic == b"GGUF" else f"a beginning of {bytes(magic)!r}"
                raise self._bad(f"it has {what}; versions 2 and 3 of GGUF, little-endian, are read")
            if num_pairs > MAX_PAIRS or self._num_tensors > MAX_TENSORS:
                raise self._bad(f"it says that it has {num_pairs} pairs of metadata and {self._num_tensors} tensors")
            self.metadata: dict[str, Any] = {}
            for _ in range(num_pairs):
                key = self._text(MAX_KEY)
                if key in self.metadata:
                    raise self._bad(f"it has {key!r} twice")
                self.metadata[key] = self._value(*self._take("<I"))
        except (struct.error, UnicodeDecodeError) as e:
            raise self._bad(f"its metadata are cut off or damaged: {e}") from e
        self._pairs_end = self._at

    @cached_property
    def tensors(self) -> dict[str, TensorInfo]:
        """By name, in the order of the file."""
        self._at = self._pairs_end
        try:
            found = [self._tensor() for _ in range(self._num_tensors)]
        except (struct.error, UnicodeDecodeError) as e:
            raise self._bad(f"its list of tensors is cut off or damaged: {e}") from e
        alignment = self.metadata.get("general.alignment", ALIGNMENT)
        if not isinstance(alignment, int) or alignment not in (1 << i for i in range(3, 21)):
            raise self._bad(f"general.alignment is {alignment!r}; a power of two from 8 to {1 << 20} is needed")
        start = -(-self._at // alignment) * alignment
        tensors: dict[str, TensorInfo] = {}
        for name, shape, kind, offset in found:
            nbytes = prod(shape[:-1]) * (shape[-1] // kind.elements) * kind.nbytes
            if name in tensors:
                raise self._bad(f"it has the tensor {name!r} twice")
            if offset % alignment:
                raise self._bad(f"{name} begins at {offset}, which is no multiple of {alignment}")
            if start + offset + nbytes > len(self.data):
                raise self._bad(f"{name} ends {start + offset + nbytes - len(self.data)} bytes past the end")
            tensors[name] = TensorInfo(name, shape, kind, start + offset, nbytes)
        self._no_overlap(tensors)
        return tensors

    def _no_overlap(self, tensors: dict[str, TensorInfo]) -> None:
        end, before = 0, ""
        for tensor in sorted(tensors.values(), key=lambda t: t.offset):
            if tensor.offset < end:
                raise self._bad(f"{tensor.name} and {before} overlap")
            end, before = tensor.offset + tensor.nbytes, tensor.name

    def _tensor(self) -> tuple[str, tuple[int, ...], BlockType, int]:
        name = self._text(MAX_NAME)
        (axes,) = self._take("<I")
        if not 0 < axes <= MAX_AXES:
            raise self._bad(f"{name} has {axes} axes; 1 to {MAX_AXES} are read")
        shape = tuple(reversed(self._take(f"<{axes}Q")))
        number, offset = self._take("<IQ")
        kind = TYPES.get(number)
        if kind is None:
            known = ", ".join(each.name for each in TYPES.values())
            raise self._bad(f"{name} is of type {OTHERS.get(number, number)}; those that are read are {known}")
        if not 0 < prod(shape) <= MAX_SIZE or shape[-1] % kind.elements:
            raise self._bad(f"{name} has the shape {list(shape)}, in blocks of {kind.elements}")
        return name, shape, kind, offset

    def _take(self, layout: str) -> tuple[Any, ...]:
        found = struct.unpack_from(layout, self.data, self._at)
        self._at += struct.calcsize(layout)
        return found

    def _text(self, longest: int | None = None) -> str:
        (size,) = self._take("<Q")
        self._has(size, longest)
        self._at += size
        return self.data[self._at - size : self._at].decode()

    def _value(self, kind: int) -> Any:
        if kind == STRING:
            return self._text()
        if kind == ARRAY:
            return self._array()
        if kind not in NUMBERS:
            raise self._bad(f"it has a value of type {kind}")
        return self._take(f"<{NUMBERS[kind]}")[0]

    def _array(self) -> list[Any]:
        of, count = self._take("<IQ")
        if of == STRING:
            self._has(count * 8)
            return self._texts(count)
        if of not in NUMBERS:
            raise self._bad(f"it has an array of values of type {of}; texts and numbers are read")
        self._has(count * struct.calcsize(NUMBERS[of]))
        return list(self._take(f"<{count}{NUMBERS[of]}"))

    def _texts(self, count: int) -> list[str]:
        """As `_text`, a hundred thousand of them in a few hundredths of a second."""
        data, at, end, size_of = self.data, self._at, len(self.data), struct.Struct("<Q").unpack_from
        found = []
        for _ in range(count):
            (size,) = size_of(data, at)
            at += 8 + size
            if at > end:
                raise self._bad(f"it says that {size} bytes follow, where there are {end - at + size}")
            found.append(data[at - size : at].decode())
        self._at = at
        return found

    def _has(self, size: int, longest: int | None = None) -> None:
        """Whether so many bytes are left of the file, and no more than the longest allowed."""
        if size > len(self.data) - self._at or (longest is not None and size > longest):
            raise self._bad(f"it says that {size} bytes follow, where there are {len(self.data) - self._at}")

    def _bad(self, what: str) -> CheckpointError:
        return CheckpointError(f"{self.path}: {what}", fix="download it again, or convert it anew")


def parts_of(path: Path) -> list[Path]:
    """The files that belong together: those of a split file (NAME-00001-of-00003.gguf), by any of them."""
    match = SPLIT.fullmatch(path.name)
    if match is None:
        return [path]
    count = int(match["count"])
    if not 0 < count <= 1000:
        raise CheckpointError(f"{path.name} is a part of {count}", fix="give the first file of a split checkpoint")
    return [path.with_name(f"{match['stem']}-{i:05}-of-{match['count']}.gguf") for i in range(1, count + 1)]


def open_all(path: Path) -> list[GgufFile]:
    """The file, or all of a split one: the first has the metadata. Raises CheckpointError."""
    paths = parts_of(path)
    missing = next((each for each in paths if not each.is_file()), None)
    if missing is not None:
        raise CheckpointError(f"{missing} is missing", fix="download all parts into one folder")
    stamps = [each.stat() for each in paths]
    return list(_open(tuple(paths), tuple((stamp.st_ino, stamp.st_size, stamp.st_mtime_ns) for stamp in stamps)))


@lru_cache(maxsize=1)
def _open(paths: tuple[Path, ...], stamps: tuple[tuple[int, int, int], ...]) -> tuple[GgufFile, ...]:
    """Read once for configuration, vocabulary, template and weights: a vocabulary takes a third of a second."""
    files = tuple(GgufFile(each) for each in paths)
    for i, file in enumerate(files):
        given = file.metadata.get("split.count", 1), file.metadata.get("split.no", 0)
        if given != (len(files), i):
            raise CheckpointError(
                f"{file.path} is part {given[1]} of {given[0]} by its metadata", fix="download it again"
            )
    return files
