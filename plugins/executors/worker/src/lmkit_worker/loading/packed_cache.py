"""Packed weights on disk: a later start maps them instead of reading and packing the checkpoint again.

A file is a safetensors file, data only. Its name holds a hash of all that packed weights depend on: files of the
checkpoint, chosen kernels and their versions, the processor, the dtype, the rank. The header describes every tensor,
with its checksum, and has a hash of its own; a file in which anything does not fit is not used.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any

import torch
from lmkit.api import Checkpoint, CheckpointError, Choice, ConfigError, Progress, ResolvedPlan
from lmkit_layers.linear import Linear
from torch import Tensor, nn

from lmkit_worker.loading.safetensors import DTYPES, SafetensorsLoader

VERSION = 3  # of the file's form
ALIGNMENT = 4096  # of the first tensor in the file
NAMES = {name: short for short, name in DTYPES.items()}
LINEARS, SHA256 = "linears", "sha256"  # texts of the header: packed weights by path, and the hash of that text


def key(resolved: ResolvedPlan, checkpoint: Checkpoint, *ranks: int) -> str:
    """Hash of what packed weights depend on."""

    def source(choice: Choice) -> list[Any]:
        return [choice.component, choice.dist, choice.version, choice.target, choice.options]

    files = [os.stat(file) for file in checkpoint.files]
    parts = {
        "version": VERSION,
        "files": [
            [os.path.basename(f), s.st_size, s.st_mtime_ns] for f, s in zip(checkpoint.files, files, strict=True)
        ],
        "choices": [source(c) for c in resolved.choices if c.kind in ("model", "op", "quantization")],
        "device": [resolved.device.name, sorted(resolved.device.flags)],
        "dtype": resolved.value("dtype"),
        "torch": torch.__version__,
        "ranks": ranks,
    }
    return sha256(json.dumps(parts, sort_keys=True, default=str))


@dataclass(frozen=True, slots=True)
class PackedCache:
    """`path` is the file of one model, which may not exist yet."""

    path: Path

    @classmethod
    def find(cls, folder: str, resolved: ResolvedPlan, checkpoint: Checkpoint, *ranks: int) -> PackedCache:
        """`ranks`: which, of how many, and to how many of these experts are dealt out.

        Raises ConfigError for a folder that cannot be made."""
        try:
            Path(folder).mkdir(parents=True, exist_ok=True)
        except OSError as e:
            raise ConfigError(f"packed weights cannot be kept in {folder}: {e}", fix="--packed-cache FOLDER") from e
        name = f"{checkpoint.path.name}-{key(resolved, checkpoint, *ranks)[:24]}.safetensors"
        return cls(Path(folder) / name)

    def restore(self, model: nn.Module) -> frozenset[Linear]:
        """Linears of `model` that need no loading any more but for their biases. Raises CheckpointError for damage."""
        if not self.path.is_file():
            return frozenset()
        loader = SafetensorsLoader()
        texts = loader.metadata(self.path)
        described = texts.get(LINEARS, "")
        if texts.get(SHA256) != sha256(described):
            raise CheckpointError(f"{self.path}: its header is damaged")
        entries = {entry.name: entry for entry in loader.header(self.path)}

        def load(name: str, dtype: str, shape: Sequence[int], checksum: int) -> Tensor:
            entry = entries.get(name)
            if entry is None or (entry.dtype, list(entry.shape)) != (dtype, shape):
                raise CheckpointError(f"{self.path}: the header of {name} is damaged")
            if checksum_of(tensor := loader.read(entry)) != checksum:
                raise CheckpointError(f"{self.path}: {name} is damaged")
            return tensor

        found = json.loads(described)
        packed = {
            linear: decode(found[path], packed_types(linear), load) for path, linear in linears(model) if path in found
        }
        for linear, weight in packed.items():  # only when all are whole
            linear.restore(weight)
        return frozenset(packed)

    def write(self, model: nn.Module, progress: Progress | None = None) -> None:
        """All linears whose kernels tell their types. Readers see the whole file or none."""
        tensors: dict[str, Tensor] = {}
        described = json.dumps({path: encode(linear.packed, path, tensors) for path, linear in linears(model)})
        if not tensors:
            return
        ordered = sorted(tensors.items(), key=lambda item: -item[1].nbytes)  # large ones stay aligned
        total = 0
        header: dict[str, Any] = {"__metadata__": {LINEARS: described, SHA256: sha256(described)}}
        for name, tensor in ordered:
            offsets = [total, total := total + tensor.nbytes]
            header[name] = {"dtype": NAMES[name_of(tensor.dtype)], "shape": list(tensor.shape), "data_offsets": offsets}
        text = json.dumps(header).encode()
        text += b" " * (-(8 + len(text)) % ALIGNMENT)
        with tempfile.NamedTemporaryFile(dir=self.path.parent, prefix=".", delete=False) as file:
            try:
                file.write(len(text).to_bytes(8, "little") + text)
                done = 0
                for _, tensor in ordered:
                    file.write(bytes_of(tensor).numpy().data)
                    done += tensor.nbytes
                    if progress is not None:
                        progress("keep packed weights", done, total, "B")
                file.flush()
                os.replace(file.name, self.path)
            except BaseException:
                os.unlink(file.name)
                raise


def sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def linears(model: nn.Module) -> Iterator[tuple[str, Linear]]:
    for path, module in model.named_modules():
        if isinstance(module, Linear) and packed_types(module):
            yield path, module


def packed_types(linear: Linear) -> Mapping[str, type]:
    return {kind.__name__: kind for kind in getattr(linear.kernel, "packed_types", ())}


def encode(value: Any, name: str, tensors: dict[str, Tensor]) -> Any:
    """A packed weight as JSON; its tensors go to `tensors`, under names that begin with `name`."""
    if isinstance(value, Tensor):
        tensors[name] = value
        about = [name_of(value.dtype), list(value.shape), checksum_of(value)]
        return {"tensor": [name, *about]}
    if isinstance(value, torch.dtype):
        return {"dtype": name_of(value)}
    if is_dataclass(value):
        parts = {f.name: encode(getattr(value, f.name), f"{name}.{f.name}", tensors) for f in fields(value)}
        return {"type": type(value).__name__, "fields": parts}
    return value


def decode(value: Any, types: Mapping[str, type], load: Any) -> Any:
    """What `encode` took apart. `load` gives a tensor for what stands there of it."""
    if not isinstance(value, dict):
        return value
    if "tensor" in value:
        return load(*value["tensor"])
    if "dtype" in value:
        return getattr(torch, value["dtype"])
    return types[value["type"]](**{name: decode(part, types, load) for name, part in value["fields"].items()})


def checksum_of(tensor: Tensor) -> int:
    """Sum of its 64-bit words, at the speed of memory: it finds what a disk or an interrupted copy does to a file."""
    data = bytes_of(tensor)
    whole = len(data) // 8 * 8
    return int(data[:whole].view(torch.int64).sum()) ^ int(data[whole:].sum())


def bytes_of(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)
