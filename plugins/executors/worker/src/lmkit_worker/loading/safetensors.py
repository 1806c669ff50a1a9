"""Loader of safetensors files: headers first, tensors memory-mapped.

The library checks the headers. Tensors are taken from a map of our own, whose pages can be let go once a tensor has
been packed: what is resident is then what is used, not the whole file.
"""

from __future__ import annotations

import json
import mmap
from collections import Counter
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lmkit.api import Checkpoint, CheckpointError, TensorEntry, itemsize
from lmkit.checkpoint import index_of, read_index
from lmkit.files import open_regular
from safetensors import SafetensorError, safe_open

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

DTYPES = {
    "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2", "F8_E8M0": "float8_e8m0fnu", "I64": "int64", "I32": "int32", "I16": "int16",
    "I8": "int8", "U8": "uint8", "BOOL": "bool",
}  # fmt: skip


class SafetensorsLoader:
    """One object per load. A file stays mapped as long as one of its tensors is in use."""

    def __init__(self) -> None:
        self._maps: dict[str, tuple[mmap.mmap, int, dict[str, Any]]] = {}  # file -> map, start of data, header

    def tensors(self, checkpoint: Checkpoint) -> list[TensorEntry]:
        """Headers only. Raises CheckpointError naming a file that is truncated, corrupt or not what the index says."""
        entries: dict[str, TensorEntry] = {}
        for path in checkpoint.files:
            for entry in self.header(path):
                if entry.name in entries:
                    raise CheckpointError(f"{entry.name} is both in {entries[entry.name].file} and in {path}")
                entries[entry.name] = entry
        if (index := index_of(checkpoint.path, checkpoint.files)) is not None:
            self._check_index(index, entries)
        return list(entries.values())

    def read(self, entry: TensorEntry) -> Tensor:
        """A CPU tensor that maps the file; writing to it would change a copy."""
        import torch

        dtype = getattr(torch, entry.dtype)
        if not entry.nbytes:
            return torch.empty(entry.shape, dtype=dtype)
        with reading(entry.file):
            mapped, data, header = self._map(entry.file)
            start = data + header[entry.name]["data_offsets"][0]
            return torch.frombuffer(mapped, dtype=dtype, count=prod(entry.shape), offset=start).view(entry.shape)

    def release(self) -> None:
        """Gives back the pages read so far. A tensor that is still in use is read from the file again."""
        if hasattr(mmap, "MADV_DONTNEED"):
            for mapped, _, _ in self._maps.values():
                mapped.madvise(mmap.MADV_DONTNEED)

    def _map(self, file: str) -> tuple[mmap.mmap, int, dict[str, Any]]:
        if file not in self._maps:
            with open_regular(file) as f:
                mapped = mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_COPY)
            size = int.from_bytes(mapped[:8], "little")  # of the header, which the library has checked
            self._maps[file] = (mapped, 8 + size, json.loads(mapped[8 : 8 + size]))
        return self._maps[file]

    def header(self, path: Path) -> Iterator[TensorEntry]:
        """The tensors of one file."""
        with reading(path), _opened(path) as file:
            _check_names(path)
            for name in file.keys():  # noqa: SIM118  (not a mapping)
                view = file.get_slice(name)
                shape, dtype = tuple(view.get_shape()), DTYPES.get(view.get_dtype())
                if dtype is None:
                    raise CheckpointError(f"{path}: {name} has dtype {view.get_dtype()}, which is not supported")
                yield TensorEntry(name, shape, dtype, prod(shape) * itemsize(dtype), str(path))

    @staticmethod
    def metadata(path: Path) -> dict[str, str]:
        """The texts that a file holds beside its tensors."""
        with reading(path), _opened(path) as file:
            return file.metadata() or {}

    @staticmethod
    def _check_index(index: Path, entries: dict[str, TensorEntry]) -> None:
        names = read_index(index)
        for name, file in names.items():
            if name not in entries or Path(entries[name].file).name != file:
                raise CheckpointError(f"{index} says that {name} is in {file}, where it is not")
        extra = next((n for n in entries if n not in names), None)
        if extra:
            raise CheckpointError(f"{entries[extra].file} holds {extra}, which {index.name} does not name")


def _opened(path: Path) -> Any:
    """The library's reader, which would wait for whoever writes a pipe. Raises OSError for what is no regular file."""
    open_regular(path).close()
    return safe_open(path, framework="pt", device="cpu")


def _check_names(path: Path) -> None:
    """That no name stands twice in the header, of which readers would take one or the other. Raises ValueError."""

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            ((name, _),) = Counter(name for name, _ in pairs).most_common(1)
            raise ValueError(f"its header holds {name!r} twice")
        return found

    with open_regular(path) as file:
        size = int.from_bytes(file.read(8), "little")  # which the library has checked
        json.loads(file.read(size), object_pairs_hook=once)


@contextmanager
def reading(path: Path | str) -> Iterator[None]:
    """Whatever goes wrong with the file becomes a CheckpointError that names it."""
    try:
        yield
    except (SafetensorError, OSError, RuntimeError, ValueError) as e:
        raise CheckpointError(f"{path} is damaged or cannot be read: {e}", fix="download the checkpoint again") from e
