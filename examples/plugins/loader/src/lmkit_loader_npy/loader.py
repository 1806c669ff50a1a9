"""Reads tensors/NAME.npy, mapped into memory; of types that NumPy has no name for, NAME.TYPE.npy with their bits."""

from math import prod
from pathlib import Path

import numpy as np
import torch
from lmkit.api import CheckpointError, TensorEntry, itemsize

BITS = {"bfloat16": np.uint16, "float8_e4m3fn": np.uint8, "float8_e5m2": np.uint8}
PLAIN = ("float64", "float32", "float16", "int64", "int32", "int16", "int8", "uint8", "bool")


class NpyLoader:
    """Contract: lmkit.api.Loader. One object per load; a damaged file is a CheckpointError that names it."""

    def tensors(self, checkpoint):
        return [entry_of(path) for path in checkpoint.files]

    def read(self, entry):
        """It may become a parameter as it is: nothing is copied until somebody writes."""
        array = opened(Path(entry.file))
        tensor = torch.from_numpy(array)
        return tensor.view(getattr(torch, entry.dtype)) if entry.dtype in BITS else tensor

    def release(self):
        """What was read so far is packed or copied: here nothing is kept."""


def entry_of(path):
    array = opened(path)  # of a mapped file only the header is read
    name, _, dtype = path.stem.rpartition(".")
    if dtype not in BITS:
        name, dtype = path.stem, array.dtype.name
    if array.dtype != BITS.get(dtype, array.dtype) or dtype not in (*BITS, *PLAIN):
        raise CheckpointError(f"{path} has elements of {array.dtype}", fix=f"one of {', '.join((*BITS, *PLAIN))}")
    return TensorEntry(name, array.shape, dtype, prod(array.shape) * itemsize(dtype), str(path))


def opened(path):
    try:
        array = np.load(path, mmap_mode="c" if path.stat().st_size > 128 else None, allow_pickle=False)
        return np.ascontiguousarray(array) if array.ndim else array
    except (OSError, ValueError, EOFError) as e:
        raise CheckpointError(f"{path}: {e}", fix="write the checkpoint again") from e
