"""Linears whose weights are the blocks of a GGUF file, as they are stored."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from lmkit.api import (
    CannotSplit,
    CheckpointError,
    IntegerFormat,
    Integers,
    LinearSpec,
    ParamSpec,
    QuantFormat,
    QuantScheme,
    UnsupportedModel,
)

from lmkit_loader_gguf.file import TYPES

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from lmkit_loader_gguf.blocks import Blocks

KINDS = {kind.name: kind for kind in TYPES.values()}
GROUP = {"Q2_K": 16, "Q3_K": 16, "Q6_K": 16}  # numbers that share a scale; 32 of the others
FOUR_BITS = ("Q4_0", "Q4_1", "Q4_K", "Q2_K", "Q3_K")  # codes that fit; the others take 8 bits
LOOKED_UP = (("IQ4_NL", "IQ4_XS"), ("MXFP4",))  # those of 4 bits, too, that share a table


@dataclass(frozen=True, slots=True)
class GgufFormat(IntegerFormat):
    """`weight` uint8 [bytes of all rows]: parts of a merged linear, each of its own type, one after another.

    Kernels for integers run all of them, codes of parts that share no table as what they stand for. Products of scales
    are rounded to float16 there.
    """

    types: tuple[str, ...]  # of each part
    parts: tuple[int, ...]  # rows of each
    width: int
    activations: Literal["float", "int8"] = "int8"
    ordered: bool = False
    rounding: Literal["", "symmetric", "range"] = ""

    @property
    def bits(self) -> int:  # type: ignore[override]
        return 4 if any(set(self.types) <= set(kinds) for kinds in (FOUR_BITS, *LOOKED_UP)) else 8

    @property
    def group(self) -> int:  # type: ignore[override]
        return min(GROUP.get(kind, 32) for kind in self.types)

    @property
    def name(self) -> str:  # type: ignore[override]
        return "int4" if self.bits == 4 else "w8a8"

    def params(self, layer: LinearSpec, dtype: str) -> dict[str, ParamSpec]:
        if layer.in_features != self.width:
            raise CannotSplit(f"{layer.name}: blocks of columns cannot be split over ranks")
        sizes = []
        for name, rows in zip(self.types, layer.out_features, strict=True):
            kind = KINDS[name]
            if self.width % kind.elements:
                raise UnsupportedModel(f"columns of {layer.name}", self.width, f"a multiple of {kind.elements}")
            sizes.append(rows * (self.width // kind.elements) * kind.nbytes)
        return {"weight": ParamSpec((sum(sizes),), "uint8", part_axis=0, part_sizes=tuple(sizes))}

    def _blocks(self, params: Mapping[str, Tensor]) -> list[Blocks]:
        """Those of each part."""
        from lmkit_loader_gguf.blocks import unpack

        data = params["weight"].flatten()
        row_bytes = [self.width // KINDS[name].elements * KINDS[name].nbytes for name in self.types]
        whole = sum(rows * size for rows, size in zip(self.parts, row_bytes, strict=True))
        share, found, at = data.numel() / whole, [], 0
        for name, rows, size in zip(self.types, self.parts, row_bytes, strict=True):
            here = round(rows * share)  # on this rank
            found.append(unpack(name, data[at : at + here * size], here, KINDS[name].nbytes))
            at += here * size
        return found

    def dequantize(self, params: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
        import torch

        return torch.cat([blocks.dequantize() for blocks in self._blocks(params)]).to(dtype)

    def integers(self, params: Mapping[str, Tensor]) -> Integers:
        import torch

        found = self._blocks(params)
        scales = [_grouped(blocks.scales, self.width // self.group) for blocks in found]
        codes, table = torch.cat([blocks.codes for blocks in found]), None
        zero: Tensor | int = found[0].zero
        if len({(blocks.zero, blocks.table) for blocks in found}) == 1:
            if found[0].table:
                zero = -min(found[0].table)
                table = torch.tensor([value + zero for value in found[0].table], dtype=torch.uint8)
        elif self.bits == 4:
            zero = torch.cat([
                torch.full_like(scale, blocks.zero, dtype=torch.uint8)
                for blocks, scale in zip(found, scales, strict=True)
            ])  # fmt: skip
        else:
            zero = 128
            codes = torch.cat([(blocks.values() + zero).to(torch.uint8) for blocks in found])
        offsets = None
        if any(blocks.offsets is not None for blocks in found):
            offsets = torch.cat([
                torch.zeros_like(scale) if blocks.offsets is None else _grouped(blocks.offsets, scale.shape[1])
                for blocks, scale in zip(found, scales, strict=True)
            ])  # fmt: skip
            finite(offsets)
        return Integers(codes, finite(torch.cat(scales)), zero, offsets=offsets, table=table)


def _grouped(values: Tensor, groups: int) -> Tensor:
    return values.repeat_interleave(groups // values.shape[1], 1)


def finite(values: Tensor) -> Tensor:
    """The same. Raises CheckpointError for what is no number, or too large for the float16 of kernels."""
    if not bool(values.half().isfinite().all()):
        raise CheckpointError("scales are not numbers, or too large (more than 65504)")
    return values


@dataclass(frozen=True, slots=True)
class GgufScheme(QuantScheme):
    types: Mapping[str, str]  # module of the checkpoint -> type of its blocks, or types, with commas
    name: str = "gguf"

    @classmethod
    def parse(cls, quantization_config: Mapping[str, Any]) -> GgufScheme:
        found = quantization_config.get("tensors")
        kinds = ",".join(map(str, found.values())).split(",") if isinstance(found, Mapping) else [""]
        if not isinstance(found, Mapping) or not set(kinds) <= set(KINDS):
            raise UnsupportedModel("quantization_config.tensors", "missing", "those of a GGUF file")
        return cls(found)

    def for_layer(self, layer: LinearSpec) -> QuantFormat | None:
        names = layer.sources or (layer.name,)
        types = [kind for name in names for kind in self.types.get(name, "").split(",")]
        if not any(types):
            return None
        if not all(types):
            plain = next(name for name in names if name not in self.types)
            raise UnsupportedModel(
                f"type of {plain}", "one that is not quantized", f"blocks, as the other parts of {layer.name} have"
            )
        parts = len(layer.out_features)
        each = [kind for kind in types if kind] * (parts // len(types) or 1)
        experts = [tuple(each[i : i + parts]) for i in range(0, len(each), parts)]
        if any(kinds != experts[0] for kinds in experts):
            raise UnsupportedModel(f"types of {layer.name}", sorted(set(each)), "the same for each expert")
        return GgufFormat(experts[0], layer.out_features, layer.in_features)
