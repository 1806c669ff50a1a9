"""Reads the tensors of GGUF files as those of the family's own checkpoints.

Blocks of quantized linears are given as they are, as bytes that map the file; those of an embedding are dequantized, as
its rows are looked up and not multiplied. What converters have reordered is put back.
"""

from __future__ import annotations

import mmap
import warnings
from math import prod

import torch
from lmkit.api import Checkpoint, CheckpointError, TensorEntry
from torch import Tensor

from lmkit_loader_gguf.blocks import unpack
from lmkit_loader_gguf.config import DTYPES, PLAIN, Source, sources_of
from lmkit_loader_gguf.file import open_all
from lmkit_loader_gguf.layouts import LAYOUTS

AT_ONCE = 1 << 20  # numbers that are dequantized together: they stay in the cache


class GgufLoader:
    """One object per load. A file stays mapped as long as one of its tensors is in use."""

    def __init__(self) -> None:
        self._sources: dict[str, Source] = {}

    def tensors(self, checkpoint: Checkpoint) -> list[TensorEntry]:
        """Headers only. Raises CheckpointError naming a file that is damaged."""
        entries = []
        for source in sources_of(open_all(checkpoint.files[0])):
            if source.name in self._sources:
                raise CheckpointError(f"{source.file.path}: two tensors are {source.name}", fix="convert it anew")
            self._sources[source.name] = source
            entries.append(_entry(source))
        return entries

    def read(self, entry: TensorEntry) -> Tensor:
        source = self._sources[entry.name]
        data = _bytes(source)
        if source.layout and source.raw:
            return LAYOUTS[source.layout](data.view(_rows(source), -1), *source.sizes).flatten()
        if source.layout:
            others = [Source("", file, tensor) for file, tensor in source.rest]
            values = [_plain(each, _bytes(each)) for each in (source, *others)]
            return LAYOUTS[source.layout](*values, *source.sizes)
        if source.raw:
            return reordered(data.view(_rows(source), -1), source.heads).flatten() if source.heads else data
        value = _plain(source, data).view(entry.shape)
        if source.heads:
            value = reordered(value.view(entry.shape[0], -1), source.heads).view(entry.shape)
        return value - source.less if source.less else value

    def release(self) -> None:
        """Gives back the pages read so far. A tensor that is still in use is read from the file again."""
        if hasattr(mmap, "MADV_DONTNEED"):
            for file in {source.file.path: source.file for source in self._sources.values()}.values():
                file.data.madvise(mmap.MADV_DONTNEED)


def _shape(source: Source) -> tuple[int, ...]:
    shape = source.tensor.shape
    return shape if source.expert is None else shape[1:]


def _rows(source: Source) -> int:
    return prod(_shape(source)[:-1])


def _entry(source: Source) -> TensorEntry:
    tensor, shape = source.tensor, _shape(source)
    nbytes = tensor.nbytes // (1 if source.expert is None else tensor.shape[0])
    if source.raw:
        return TensorEntry(source.name, (nbytes,), "uint8", nbytes, str(source.file.path))
    if source.layout and not source.raw:
        shapes = [tensor.shape, *(other.shape for _, other in source.rest)]
        try:
            shape = tuple(LAYOUTS[source.layout](*(torch.empty(s, device="meta") for s in shapes), *source.sizes).shape)
        except (RuntimeError, ValueError, ZeroDivisionError, IndexError) as e:
            raise CheckpointError(f"{source.file.path}: {tensor.name} has the shape {list(tensor.shape)}: {e}") from e
    if source.name.endswith("shared_expert_gate.weight") and len(shape) == 1:
        shape = (1, *shape)
    return TensorEntry(source.name, shape, DTYPES.get(tensor.type.name, "float32"), nbytes, str(source.file.path))


def _bytes(source: Source) -> Tensor:
    """uint8, mapped."""
    tensor = source.tensor
    nbytes = tensor.nbytes // (1 if source.expert is None else tensor.shape[0])
    offset = tensor.offset + nbytes * (source.expert or 0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of a buffer that must not be written to: a copy would be changed
        return torch.frombuffer(source.file.data, dtype=torch.uint8, count=nbytes, offset=offset)


def _plain(source: Source, data: Tensor) -> Tensor:
    if source.tensor.type.name not in PLAIN:
        return _dequantized(source, data)
    return data.view(getattr(torch, DTYPES[source.tensor.type.name])).view(_shape(source))


def _dequantized(source: Source, data: Tensor) -> Tensor:
    """float32, some rows at a time."""
    kind, (rows, width) = source.tensor.type, (_rows(source), source.tensor.shape[-1])
    stored, out = data.view(rows, -1), torch.empty(rows, width)
    step = max(1, AT_ONCE // width)
    for first in range(0, rows, step):
        some = stored[first : first + step]
        out[first : first + step] = unpack(kind.name, some, len(some), kind.nbytes).dequantize()
    return out.view(_shape(source))


def reordered(rows: Tensor, heads: int) -> Tensor:
    """Rows [heads * size, ...] in which halves of a head follow one another, of such in which pairs lie together."""
    n = rows.shape[0]
    if n % (2 * heads):
        raise CheckpointError(f"{n} rows of queries or keys cannot be those of {heads} heads")
    return rows.view(heads, n // heads // 2, 2, -1).transpose(1, 2).reshape(n, -1)
