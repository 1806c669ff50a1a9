"""The tensors of a file, made those that formats have: rows of codes with a scale and an offset for a few columns.

A file has of a linear [out, in], beside its bias and what says how it was found:

    W_q                  the codes of all groups, [groups, columns of a group], the first of every n parts of them in
                         the highest bits of a number: bytes, or of 3 bits, of which ten fill one, int32; perhaps named
                         as floating point numbers
    scale, zero          [groups, 1]: a weight is (code - zero) * scale
    nbits, group_size, axis, shape, packing, view_as_float, ...

Source: `HQQLinear.state_dict`, `Quantizer.quantize` and `BitPack` of hqq.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from lmkit.api import Checkpoint, CheckpointError, TensorEntry, UnsupportedModel
from lmkit_layouts.made import MadeTensors, part_of
from lmkit_layouts.words import pack_fours
from torch import Tensor

from lmkit_quantization_hqq.stored import Stored

FLOATS = ("float32", "bfloat16", "float16")
NAMES = {1: "1bit_u8", 2: "2bit_u8", 3: "3bit_32", 4: "4bit_u8", 8: "8bit_u8"}  # of packings
# What describes a weight, and is no tensor of it. Only some of it says how it is stored.
MEANT = ("nbits", "group_size", "axis", "shape", "packing")
META = (
    *MEANT, "view_as_float", "unpack_view_dtype", "quant_scale", "quant_zero", "compute_dtype", "offload_meta",
    "encoded_state_dict", "stores_quant_config", "channel_wise", "optimize", "round_zero",
)  # fmt: skip
KEYS = ("W_q", "scale", "zero", *META)
MAX_META = 64  # numbers in one of them
LIST = "quantization_config.skip_modules"


@dataclass(slots=True, kw_only=True)
class HqqTensors(MadeTensors):
    """`weight`, `weight_scale` and `weight_offset`, as formats have them. `of_module` says how a weight is stored."""

    of_module: Callable[[str], Stored | None]

    def tensors(self, checkpoint: Checkpoint) -> list[TensorEntry]:
        found = {entry.name: entry for entry in self.loader.tensors(checkpoint)}
        modules = [name.removesuffix(".W_q") for name in found if name.endswith(".W_q")]
        parts = {f"{module}.{key}": key for module in modules for key in KEYS}
        entries = []
        for name, entry in found.items():
            if name not in parts:
                self.check_plain(entry, "that it is not", f"name it in {LIST}")
                entries.append(entry)
        for module in modules:
            entries += self._weight(module, found)
        return entries

    def _weight(self, module: str, found: Mapping[str, TensorEntry]) -> list[TensorEntry]:
        stored, codes = self.of_module(module), found[f"{module}.W_q"]
        if stored is None:
            raise CheckpointError(f"{codes.name} is there, and quantization_config says that {module} is plain")
        meta = {key: self._meta(module, key, found) for key in MEANT}
        if len(meta["shape"]) != 2 or min(meta["shape"]) <= 0:
            raise CheckpointError(f"{module}.shape is {meta['shape']}, needs rows and columns")
        rows, columns = meta["shape"]
        group = stored.group or columns
        packing = list(NAMES[stored.bits].encode())
        said = {"nbits": [stored.bits], "group_size": [group], "axis": [1], "packing": packing}
        for key, value in said.items():
            if meta[key] != value:
                raise CheckpointError(f"{module}.{key} is {meta[key]}, and quantization_config says {value}")
        if columns % group:
            raise UnsupportedModel(f"columns of {module}", columns, f"a multiple of group_size {group}")
        groups = rows * columns // group
        each = 10 if stored.bits == 3 else 8 // stored.bits  # codes in a number
        width = 4 if stored.bits == 3 else 1  # its bytes
        if codes.nbytes != -(-groups // each) * group * width:
            raise CheckpointError(f"{codes.name} has {codes.nbytes} bytes, and {module}.shape is {meta['shape']}")
        scale, zero = (
            part_of(found.get(f"{module}.{key}"), f"{module}.{key}", FLOATS, (groups, 1)) for key in ("scale", "zero")
        )
        fmt, shape = stored.layout((rows,), columns), (rows, columns // group)
        middle = 1 << (fmt.bits - 1)

        def weight() -> Tensor:
            numbers = self.loader.read(codes).reshape(-1).view(torch.int32 if width == 4 else torch.uint8)
            plain = unpacked(numbers.view(-1, group), stored.bits, each)[:groups].reshape(rows, columns)
            return plain if fmt.bits == 8 else pack_fours(plain)

        def scales() -> Tensor:
            return self.loader.read(scale).float().view(shape)

        def offsets() -> Tensor:
            return (self.loader.read(zero).float().view(shape) - middle) * scales()

        if self.plain(f"{module}.weight"):

            def whole() -> Tensor:
                made = {"weight": weight(), "weight_scale": scales(), "weight_offset": offsets()}
                return fmt.dequantize(made, torch.float32)

            return [self.make(f"{module}.weight", (rows, columns), "float32", codes.file, whole)]
        packed = (rows, columns * fmt.bits // 8)
        return [
            self.make(f"{module}.weight", packed, "uint8", codes.file, weight),
            self.make(f"{module}.weight_scale", shape, "float32", codes.file, scales),
            self.make(f"{module}.weight_offset", shape, "float32", codes.file, offsets),
        ]

    def _meta(self, module: str, key: str, found: Mapping[str, TensorEntry]) -> list[int]:
        """The numbers of a tensor that describes a weight. Raises CheckpointError."""
        entry = found.get(f"{module}.{key}")
        if entry is None:
            raise CheckpointError(f"{module}.{key} is missing")
        if len(entry.shape) > 1 or sum(entry.shape) > MAX_META or entry.dtype not in ("int64", "int32", "uint8"):
            raise CheckpointError(f"{entry.name} is {entry.dtype} {list(entry.shape)}, needs a few integers")
        return [int(number) for number in self.loader.read(entry).reshape(-1).tolist()]


def unpacked(numbers: Tensor, bits: int, each: int) -> Tensor:
    """[n, columns] -> the codes in them, uint8 [n * each, columns]: the first n are in the highest bits."""
    shifts = range(bits * (each - 1), -1, -bits)
    return torch.cat([((numbers >> shift) & ((1 << bits) - 1)).to(torch.uint8) for shift in shifts])
