"""Linears stored as codes along their rows [out, in], with a scale and perhaps a zero for each group of columns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lmkit.api import CheckpointError, Integers, LinearSpec, ParamSpec

from lmkit_layouts.grouped import GroupedIntegers, finite, uniform

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedRows(GroupedIntegers):
    """weight_packed int32 [out, in * bits / 32]: streams of bits along the rows, of codes that have 2^(bits - 1) added.

    weight_scale is [out, groups] of any floating point type, rounded to float16; weight_zero_point int32
    [out * bits / 32, groups], streams of bits along the columns, if `zeros`; weight_g_idx int32 [in] names the group of
    each column; weight_shape int64 [2] says out and in. Source: `pack_to_int32` and `PackedQuantizationCompressor` of
    compressed-tensors.
    """

    zeros: bool = False

    def params(self, layer: LinearSpec, dtype: str) -> dict[str, ParamSpec]:
        word = 32 if self.stored_bits == 3 else 32 // self.stored_bits  # codes that fill whole words
        self.check(layer, word, word if self.zeros else 1)
        k, n, groups = layer.in_features, layer.total_out, self.num_groups(layer.in_features)
        words = tuple(size * self.stored_bits // 32 for size in layer.out_features)
        shapes = (2,) * len(words)
        zeros = {"weight_zero_point": ParamSpec((sum(words), groups), "int32", part_sizes=words)}
        return {
            "weight_packed": ParamSpec((n, k * self.stored_bits // 32), "int32"),
            "weight_scale": ParamSpec((n, groups), "float32"),
            **(zeros if self.zeros else {}),
            "weight_g_idx": ParamSpec((k,), "int32", part_axis=None, optional=True),
            "weight_shape": ParamSpec((sum(shapes),), "int64", part_sizes=shapes, optional=True),
            **unused(layer),
        }

    def integers(self, params: Mapping[str, Tensor]) -> Integers:
        from lmkit_layouts.words import unpack

        shape = params.get("weight_shape")
        if shape is not None and shape.tolist() != [size for n in self.parts for size in (n, self.width)]:
            raise CheckpointError(f"weight_shape is {shape.tolist()}, not {self.parts} rows of {self.width}")
        codes = unpack(params["weight_packed"], self.stored_bits)
        order = self.column_order(params.get("weight_g_idx"), codes.shape[1])
        codes = codes if order is None else codes[:, order]
        zeros: Tensor | int = 1 << (self.stored_bits - 1)
        if self.zeros:
            zeros = uniform(unpack(params["weight_zero_point"].t(), self.stored_bits).t().contiguous())
        return Integers(codes, finite(params["weight_scale"].half().float()), zeros, order)


@dataclass(frozen=True, slots=True, kw_only=True)
class ByteRows(GroupedIntegers):
    """weight int8 [out, in], whatever `stored_bits` is; weight_scale of any floating point type, rounded to float16,
    and if `zeros` weight_zero_point int8: [out, groups], or one for each merged part if `whole`. Sources:
    `NaiveQuantizationCompressor` of compressed-tensors, `Int8Tensor` and `IntxUnpackedToInt8Tensor` of torchao."""

    stored_bits: int = 8
    zeros: bool = False
    whole: bool = False

    def params(self, layer: LinearSpec, dtype: str) -> dict[str, ParamSpec]:
        self.check(layer, 1, 1)
        ones = (1,) * len(layer.out_features)
        shape = (len(ones),) if self.whole else (layer.total_out, self.num_groups(layer.in_features))
        sizes = ones if self.whole else ()
        return {
            "weight": ParamSpec((layer.total_out, layer.in_features), "int8"),
            "weight_scale": ParamSpec(shape, "float32", part_sizes=sizes),
            **({"weight_zero_point": ParamSpec(shape, "int8", part_sizes=sizes)} if self.zeros else {}),
            **unused(layer),
        }

    def integers(self, params: Mapping[str, Tensor]) -> Integers:
        import torch

        codes, scales = self._codes(params["weight"]), finite(params["weight_scale"].half().float())
        zeros: Tensor | int = 1 << (self.stored_bits - 1)
        given = self._codes(params["weight_zero_point"]) if self.zeros else None
        if self.whole:
            rows = torch.tensor(
                [n * len(codes) // sum(self.parts) for n in self.parts], device=codes.device
            )  # of this rank
            scales = scales.repeat_interleave(rows).unsqueeze(1)
            given = None if given is None else given.repeat_interleave(rows).unsqueeze(1)
        if given is not None:
            zeros = uniform(given)
        return Integers(codes, scales, zeros)

    def _codes(self, values: Tensor) -> Tensor:
        """The same from 0 on. Raises CheckpointError for those that `stored_bits` cannot hold."""
        import torch

        codes = values.view(torch.uint8) + (1 << (self.stored_bits - 1))  # modulo 256
        if self.stored_bits < 8 and codes.numel() and int(codes.max()) >> self.stored_bits:
            raise CheckpointError(f"holds integers that are none of {self.stored_bits} bits")
        return codes


@dataclass(frozen=True, slots=True, kw_only=True)
class OffsetRows(GroupedIntegers):
    """w[i, j] = (codes[i, j] - 2^(bits - 1)) * weight_scale[i, g] - weight_offset[i, g].

    weight uint8 [out, in * bits / 8], `bits` of 4 or 8, the first column in the low ones; weight_scale and
    weight_offset float32 [out, groups]. What loaders make of files whose zeros are floating point numbers.
    """

    stored_bits: int = 4

    def params(self, layer: LinearSpec, dtype: str) -> dict[str, ParamSpec]:
        self.check(layer, 8 // self.bits, 1)
        n, groups = layer.total_out, self.num_groups(layer.in_features)
        return {
            "weight": ParamSpec((n, layer.in_features * self.bits // 8), "uint8"),
            "weight_scale": ParamSpec((n, groups), "float32"),
            "weight_offset": ParamSpec((n, groups), "float32"),
        }

    def integers(self, params: Mapping[str, Tensor]) -> Integers:
        from lmkit_layouts.words import unpack

        scales, offsets = finite(params["weight_scale"]), finite(params["weight_offset"])
        return Integers(unpack(params["weight"], self.bits), scales, 1 << (self.bits - 1), offsets=offsets)


def unused(layer: LinearSpec) -> dict[str, ParamSpec]:
    """What says how activations may be rounded; kernels here choose that from the activations."""
    ones = (1,) * len(layer.out_features)
    number = {"input_scale": "float32", "input_zero_point": "int8"}
    return {name: ParamSpec((len(ones),), dtype, part_sizes=ones, optional=True) for name, dtype in number.items()}
