"""The tensors of a file, made those that formats have: rows of codes with a scale for every few columns.

A file has, of a weight [out, in], beside it or for it:

    _weight_qdata            float8 or int8 [out, in]; of 4 bits int8 [out, in / 2], signed, the first column in the low
                             ones, or in tiles int32 [out / 8, in / 128, 32, 4], both sizes filled up
    _weight_scale            [out, groups], or [blocks, blocks], or one; of 4 bits [groups, out]
    _weight_zero_point       int8 like scales: an integer; of 4 bits a number, which is added
    _weight_scale_and_zero   of tiles, both: [groups, out, 2]

Sources: `flatten_tensor_state_dict`, `Int4Tensor`, `Int4TilePackedTo4dTensor`, `Int8Tensor`, `IntxUnpackedToInt8Tensor`
and `Float8Tensor` of torchao, and `matrix_to_m16n8k16_Bint4_layout` of torch.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from lmkit.api import Checkpoint, CheckpointError, TensorEntry, UnsupportedModel
from lmkit_layouts.made import MadeTensors, part_of
from lmkit_layouts.words import pack_fours, unpack
from torch import Tensor

from lmkit_quantization_torchao.configs import TENSOR, Stored

PART = re.compile(r"(.+)[.]_weight_(\w+)")
KEYS = {
    "int4": ("qdata", "scale", "zero_point"), "tiles": ("qdata", "scale_and_zero"), "float8": ("qdata", "scale"),
    "integers": ("qdata", "scale", "zero_point"),
}  # fmt: skip
FLOATS = ("float32", "bfloat16", "float16")
TILE = (8, 128, 1024)  # rows and columns of a tile; columns are filled up to multiples of the last

Made = dict[str, tuple[tuple[int, ...], str, Callable[[], Tensor]]]  # name -> shape, dtype, how


@dataclass(slots=True, kw_only=True)
class TorchaoTensors(MadeTensors):
    """`weight`, `weight_scale`, `weight_zero_point` and `weight_offset`, as formats have them.

    `of_module` says how the weight of a module is stored. Those that the model wants plain, as embeddings are, are
    dequantized.
    """

    of_module: Callable[[str], Stored | None]

    def tensors(self, checkpoint: Checkpoint) -> list[TensorEntry]:
        entries: list[TensorEntry] = []
        weights: dict[str, dict[str, TensorEntry]] = {}
        for entry in self.loader.tensors(checkpoint):
            if (part := PART.fullmatch(entry.name)) is None:
                self.check_plain(entry, "that it is not", "name it in quantization_config.modules_to_not_convert")
                entries.append(entry)
            else:
                weights.setdefault(part[1], {})[part[2]] = entry
        for module, parts in weights.items():
            entries += self._weight(module, parts)
        return entries

    def _weight(self, module: str, parts: Mapping[str, TensorEntry]) -> list[TensorEntry]:
        name, codes = f"{module}.weight", parts.get("qdata")
        if codes is None:
            raise CheckpointError(f"{module}._weight_qdata is missing")
        stored = self.of_module(module)
        if stored is None:
            raise CheckpointError(f"{codes.name} is there, and quantization_config says that {module} is plain")
        for key, entry in parts.items():
            if key not in KEYS[stored.kind]:
                raise UnsupportedModel(entry.name, f"{entry.dtype} {list(entry.shape)}", ", ".join(KEYS[stored.kind]))
        rows, columns = self._sizes(name, codes, stored)
        made = {"int4": self._four, "tiles": self._tiles, "integers": self._rows, "float8": self._rows}[stored.kind](
            module, parts, stored, (rows, columns)
        )
        if self.plain(name):
            fmt = stored.layout((rows,), columns)

            def whole() -> Tensor:
                return fmt.dequantize({key: how() for key, (_, _, how) in made.items()}, torch.float32)

            return [self.make(name, (rows, columns), "float32", codes.file, whole)]
        return [self.make(f"{module}.{key}", *each[:2], codes.file, each[2]) for key, each in made.items()]

    def _sizes(self, name: str, codes: TensorEntry, stored: Stored) -> tuple[int, int]:
        """Rows and columns of a weight. Raises CheckpointError."""
        dimensions = 4 if stored.kind == "tiles" else 2
        if len(codes.shape) != dimensions:
            raise CheckpointError(f"{codes.name} has shape {list(codes.shape)}, needs {dimensions} dimensions")
        if dimensions == 2:
            return codes.shape[0], codes.shape[1] * (2 if stored.kind == "int4" else 1)
        param, filled = self.wanted(name), codes.shape[1] * TILE[1]
        width = filled if param is None else param.shape[-1] * (1 if self.plain(name) else 2)
        return codes.shape[0] * TILE[0], min(width, filled)

    def _rows(self, module: str, parts: Mapping[str, TensorEntry], stored: Stored, sizes: tuple[int, int]) -> Made:
        """One number for the whole is one for each row."""
        grouped = tuple(1 if not block else -(-size // block) for size, block in zip(sizes, stored.block, strict=True))
        shape = (sizes[0], 1) if stored.block == TENSOR else grouped
        integers = stored.kind == "integers"
        dtype = "int8" if integers else "float8_e4m3fn"
        made: Made = {"weight": (sizes, dtype, self._part(module, parts, "qdata", (dtype,), sizes))}
        scale = self._part(module, parts, "scale", FLOATS, grouped)
        made["weight_scale"] = (shape, "float32", lambda: scale().float().expand(shape))
        if integers and "zero_point" in parts:
            zero = self._part(module, parts, "zero_point", ("int8",), grouped)
            made["weight_zero_point"] = (shape, "int8", lambda: zero().expand(shape))
        elif integers:
            made["weight_zero_point"] = (shape, "int8", lambda: torch.zeros(shape, dtype=torch.int8))
        return made

    def _four(self, module: str, parts: Mapping[str, TensorEntry], stored: Stored, sizes: tuple[int, int]) -> Made:
        rows, columns = sizes
        groups = columns // stored.block[1]
        codes = self._part(module, parts, "qdata", ("int8",), (rows, columns // 2))
        scale, zero = (self._part(module, parts, key, FLOATS, (groups, rows)) for key in ("scale", "zero_point"))
        return {
            "weight": ((rows, columns // 2), "uint8", lambda: codes().view(torch.uint8) ^ 0x88),  # signed, in each half
            "weight_scale": ((rows, groups), "float32", lambda: scale().float().t()),
            "weight_offset": ((rows, groups), "float32", lambda: -zero().float().t()),
        }

    def _tiles(self, module: str, parts: Mapping[str, TensorEntry], stored: Stored, sizes: tuple[int, int]) -> Made:
        rows, columns = sizes
        filled = -(-columns // TILE[2]) * TILE[2]
        groups = columns // stored.block[1]
        codes = self._part(module, parts, "qdata", ("int32",), (rows // TILE[0], filled // TILE[1], 32, 4))
        both = self._part(module, parts, "scale_and_zero", FLOATS, (filled // stored.block[1], rows, 2))

        def half(i: int) -> Tensor:
            return both()[:groups, :, i].float().t()

        return {
            "weight": ((rows, columns // 2), "uint8", lambda: pack_fours(untile(codes())[:, :columns])),
            "weight_scale": ((rows, groups), "float32", lambda: half(0)),
            "weight_offset": ((rows, groups), "float32", lambda: -half(1)),
        }

    def _part(
        self, module: str, parts: Mapping[str, TensorEntry], key: str, dtypes: tuple[str, ...], shape: tuple[int, ...]
    ) -> Callable[[], Tensor]:
        entry = part_of(parts.get(key), f"{module}._weight_{key}", dtypes, shape)
        return lambda: self.loader.read(entry)


def untile(words: Tensor) -> Tensor:
    """int32 [n / 8, k / 128, 32, 4] -> the codes in them, uint8 [n, k].

    Word [a, b, 4 c + d, e] holds those of row 8 a + c; its bits 4 (4 g + f) and up that of column
    128 b + 32 e + 8 f + 2 d + g.
    """
    tiles, blocks = words.shape[:2]
    codes = unpack(words.reshape(-1, 4), 4).view(tiles, blocks, 8, 4, 4, 2, 4)  # a b c d e g f
    return codes.permute(0, 2, 1, 4, 6, 3, 5).reshape(tiles * 8, blocks * 128)
