"""Linears stored as 8-bit floating point numbers, with a scale for each tensor, row or block."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol, runtime_checkable

from lmkit.api import CannotSplit, CheckpointError, LinearSpec, ParamSpec, QuantFormat

if TYPE_CHECKING:
    import torch
    from torch import Tensor


def _divides(whole: int, here: int, block: int) -> bool:
    """Whether a rank's share `here` of a length `whole` holds whole blocks, or all lie in one block."""
    return here == whole or here % block == 0 or whole <= block


LARGEST = 448.0  # of float8 e4m3


@dataclass(frozen=True, slots=True)
class Rounding:
    """How activations [..., in] become float8 e4m3 and back: what shares a scale, and where that is from.

    stored: all of a layer, the checkpoint's number. tensor, token, group: the largest magnitude of all values at hand,
    of a row, of `group` columns of a row is 448 of it; with `powers` it is the next power of two.
    """

    kind: Literal["stored", "tensor", "token", "group"]
    group: int = 0
    powers: bool = False

    def apply(self, x: Tensor, stored: float = 1.0) -> Tensor:
        """x in its dtype; what is beyond 448 times its scale becomes that."""
        codes, scales = self.codes(x, stored)
        found = codes.float().mul_(scales)
        return (found.flatten(-2)[..., : x.shape[-1]] if self.kind == "group" else found).to(x.dtype)

    def codes(self, x: Tensor, stored: float = 1.0) -> tuple[Tensor, Tensor]:
        """float8 numbers and the float32 scales that they are multiplied with: x of "group" is [..., groups, group]."""
        import torch
        from torch.nn import functional as F

        values = x.float()
        if self.kind == "group":
            values = F.pad(values, (0, -x.shape[-1] % self.group)).unflatten(-1, (-1, self.group))
        if self.kind == "stored":
            scales = values.new_tensor(stored)
        else:
            largest = values.abs().amax() if self.kind == "tensor" else values.abs().amax(-1, keepdim=True)
            scales = (largest / LARGEST).clamp_(min=torch.finfo(torch.float32).tiny)
            scales = scales.log2().ceil().exp2() if self.powers else scales
        return (values / scales).clamp_(-LARGEST, LARGEST).to(torch.float8_e4m3fn), scales


@dataclass(slots=True)
class Floats:
    """A weight as float8: w[i, j] = codes[i, j] * scales[i // rows, j // columns]; of all columns where that is 0."""

    codes: Tensor  # [out, in] float8_e4m3fn, all of them numbers
    scales: Tensor  # [out / rows, groups] float32
    rows: int = 1
    columns: int = 0
    input_scale: float = 1.0  # of activations, where it is stored


@runtime_checkable
class FloatFormat(QuantFormat, Protocol):
    """A format of float8 numbers: kernels that multiply those run any of these."""

    @property
    def columns(self) -> int:
        """How many of the weight share a scale; 0 = all."""
        ...

    @property
    def inputs(self) -> Rounding | None:
        """How the checkpoint wants activations to be rounded; None = not at all."""
        ...

    def floats(self, params: Mapping[str, Tensor], rounds: bool) -> Floats:
        """The stored tensors as codes and scales; with `rounds` the scale of activations as well.

        Raises CheckpointError for what is no number.
        """
        ...


@dataclass(frozen=True, slots=True)
class Fp8Format(FloatFormat):
    """weight [out, in] float8_e4m3fn, with scales per block of each merged part, per row if `rows`, or per part.

    Scales of blocks are called `block_scales`. `inputs`: how the checkpoint wants activations to be rounded, None =
    not at all; stored scales that this does not need are read and left aside.
    """

    block: tuple[int, int] | None
    parts: tuple[int, ...]  # rows of each merged part of the whole layer
    width: int  # columns of the whole layer
    rows: bool = False
    block_scales: str = "weight_scale_inv"
    inputs: Rounding | None = None
    name: str = "fp8"

    def params(self, layer: LinearSpec, dtype: str) -> dict[str, ParamSpec]:
        weight = ParamSpec((layer.total_out, layer.in_features), "float8_e4m3fn")
        ones = (1,) * len(layer.out_features)
        loose = ParamSpec((len(ones),), "float32", part_sizes=ones, optional=True)
        unused = {"input_scale": loose, "activation_scale": loose}
        if self.rows:
            return {"weight": weight, "weight_scale": ParamSpec((layer.total_out, 1), "float32"), **unused}
        if self.block is None:  # either name is in use
            return {"weight": weight, "weight_scale": loose, "weight_scale_inv": loose, **unused}
        rows, columns = self.block
        lengths = [*zip(self.parts, layer.out_features, strict=True)]
        if not all(_divides(*pair, rows) for pair in lengths) or not _divides(self.width, layer.in_features, columns):
            raise CannotSplit(f"{layer.name}: blocks of {rows} x {columns} would straddle two ranks")
        sizes = tuple(-(-n // rows) for n in layer.out_features)
        scale = ParamSpec((sum(sizes), -(-layer.in_features // columns)), "float32", part_sizes=sizes)
        return {"weight": weight, self.block_scales: scale, **unused}

    def dequantize(self, params: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
        weight, scales = params["weight"], self.row_scales(params)
        if self.block is not None:
            scales = scales.repeat_interleave(self.block[1], 1)[:, : weight.shape[1]]
        return (weight.float() * scales).to(dtype)

    @property
    def columns(self) -> int:
        return self.block[1] if self.block else 0

    def floats(self, params: Mapping[str, Tensor], rounds: bool) -> Floats:
        stored = rounds and self.inputs is not None and self.inputs.kind == "stored"
        input_scale = self.input_scale(params) if stored else 1.0
        codes, scales, rows = checked(params["weight"]), self.row_scales(params), 1
        if self.block is not None and all(n % self.block[0] == 0 for n in self._parts(params)[:-1]):
            rows = self.block[0]
            scales = scales[::rows].contiguous()
        return Floats(codes, scales, rows, self.columns, input_scale)

    def row_scales(self, params: Mapping[str, Tensor]) -> Tensor:
        """Scale of each row: [out, blocks of columns] float32, or [out, 1] without blocks. Raises CheckpointError."""
        scales = self._row_scales(params)
        if not bool(scales.isfinite().all()):
            raise CheckpointError("scales of float8 weights are not numbers")
        return scales

    def input_scale(self, params: Mapping[str, Tensor]) -> float:
        """The stored scale of activations; of merged parts the largest, with which nothing is cut. CheckpointError."""
        found = [params[key] for key in ("input_scale", "activation_scale") if key in params]
        fix = "--op fp8_weights leaves activations as they are"
        if len(found) != 1:
            raise CheckpointError("static activations need exactly one of input_scale and activation_scale", fix=fix)
        if not bool(((found[0] > 0) & found[0].isfinite()).all()):
            raise CheckpointError(f"scales of activations are {found[0].tolist()}, not positive numbers", fix=fix)
        return float(found[0].max())

    def _row_scales(self, params: Mapping[str, Tensor]) -> Tensor:
        import torch

        if self.rows:
            return params["weight_scale"]
        parts = self._parts(params)
        if self.block is None:
            found = [params[key] for key in ("weight_scale", "weight_scale_inv") if key in params]
            if len(found) != 1:
                raise CheckpointError("a float8 layer needs exactly one of weight_scale and weight_scale_inv")
            return found[0].repeat_interleave(torch.tensor(parts, device=found[0].device)).unsqueeze(1)
        scale, rows = params[self.block_scales], self.block[0]
        per_part = scale.split([-(-n // rows) for n in parts])
        return torch.cat([s.repeat_interleave(rows, 0)[:n] for s, n in zip(per_part, parts, strict=True)])

    def _parts(self, params: Mapping[str, Tensor]) -> list[int]:
        """Rows of each merged part that this rank has."""
        height = params["weight"].shape[0]
        return [n * height // sum(self.parts) for n in self.parts]


def checked(weight: Tensor) -> Tensor:
    """The same float8 weight. Raises CheckpointError: not all are numbers."""
    import torch

    if weight.numel() and int((weight.view(torch.uint8) & 0x7F).max()) == 0x7F:
        raise CheckpointError("holds weights that are not numbers (NaN)")
    return weight
