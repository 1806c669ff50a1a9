"""Linear layers: stored as a QuantFormat says, run as a LinearKernel wants it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from time import perf_counter

import torch
from lmkit.api import (
    CannotSplit,
    CheckpointError,
    Collectives,
    DeviceInfo,
    LinearKernel,
    LinearSpec,
    PackedWeight,
    ParamSpec,
    PluginError,
    QuantFormat,
)
from torch import Tensor, nn
from torch.nn import functional as F


class PlainFormat:
    """An unquantized weight [out, in] in the model's dtype: just another format."""

    name = "plain"

    def params(self, layer: LinearSpec, dtype: str) -> dict[str, ParamSpec]:
        return {"weight": ParamSpec((layer.total_out, layer.in_features), dtype)}

    def dequantize(self, params: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
        return params["weight"].to(dtype)


PLAIN = PlainFormat()


@dataclass(frozen=True, slots=True)
class DenseWeight:
    """[out, in] in the dtype of the activations."""

    weight: Tensor

    @property
    def nbytes(self) -> int:
        return self.weight.nbytes


class ReferenceLinear:
    """torch's own linear over the dequantized weight: runs every format, at the memory of an unquantized model."""

    name = "linear_reference"

    def can_run(self, fmt: QuantFormat, layer: LinearSpec, device: DeviceInfo) -> str | None:
        return None

    def pack(self, fmt: QuantFormat, params: dict[str, Tensor], layer: LinearSpec, dtype: torch.dtype) -> DenseWeight:
        weight = fmt.dequantize(params, dtype)
        params.clear()
        return DenseWeight(weight)

    def apply(self, x: Tensor, weight: PackedWeight, bias: Tensor | None) -> Tensor:
        assert isinstance(weight, DenseWeight)
        return F.linear(x, weight.weight, bias)


def shard(spec: LinearSpec, rank: int, size: int) -> LinearSpec:
    """The part of a linear that one tensor-parallel rank holds. Raises CannotSplit when it does not divide."""
    if size == 1 or spec.shard == "none":
        return spec
    sizes = spec.out_features if spec.shard == "column" else (spec.in_features,)
    if any(n % size for n in sizes):
        raise CannotSplit(f"{spec.name}: sizes {sizes} cannot be split over {size} ranks")
    if spec.shard == "column":
        return replace(spec, out_features=tuple(n // size for n in sizes))
    return replace(spec, in_features=spec.in_features // size)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


class Linear(nn.Module):
    """x [..., in] -> [..., out]. Parameters exist from construction (meta device) until `pack`.

    `stored` describes the whole layer's tensors as the checkpoint has them, `params` this rank's share.
    """

    bias: nn.Parameter | None

    def __init__(
        self,
        spec: LinearSpec,
        fmt: QuantFormat,
        kernel: LinearKernel,
        dtype: torch.dtype,
        collectives: Collectives | None = None,
        local: LinearSpec | None = None,
        dealt: tuple[LinearSpec, QuantFormat] | None = None,
    ) -> None:
        """`local`: this rank's share, where parts of it are those of other ranks too. `dealt`: the same linear with the
        experts of which this rank has a share, and their format."""
        super().__init__()
        self.rank, self.size = (collectives.rank, collectives.size) if collectives else (0, 1)
        size = self.size
        self.dealt, self.format = dealt or (spec, fmt)
        self.deals = spec.experts // self.dealt.experts if dealt else 1  # ranks that follow each other: one gets each
        size //= self.deals
        self.spec, self.kernel, self.dtype = spec, kernel, dtype
        self.local = local or shard(self.dealt, self.rank // self.deals, size)
        self.gathers = spec.is_head and self.local is not spec  # a part of the vocabulary is here
        self.collectives = collectives if self.size > 1 and (spec.shard == "row" or self.gathers) else None
        name = _name(dtype)
        self.stored = fmt.params(spec, name) | self._bias_spec(spec, name)
        self.params = self.format.params(self.local, name) | self._bias_spec(self.local, name)
        held = self.format.params(self.dealt, name) | self._bias_spec(self.dealt, name)
        for key, p in self.params.items():
            if local is None and any(
                whole not in (here, here * size) for whole, here in zip(held[key].shape, p.shape, strict=True)
            ):
                raise CannotSplit(f"{spec.name}.{key}: {self.stored[key].shape} cannot be split over {size} ranks")
            tensor = torch.empty(p.shape, dtype=getattr(torch, p.dtype))
            self.register_parameter(key, nn.Parameter(tensor, requires_grad=False))
        if "bias" not in self.params:
            self.register_parameter("bias", None)
        self.packed: PackedWeight | None = None
        self.pack_seconds = 0.0
        self.owner: tuple[nn.Module, ...] = ()
        self.silent = False  # another rank adds the bias
        self.before_ranks: Callable[[Tensor, Tensor], Tensor] | None = None  # meet: like a forward hook (x, out)

    @staticmethod
    def _bias_spec(spec: LinearSpec, dtype: str) -> dict[str, ParamSpec]:
        return {"bias": ParamSpec((spec.total_out,), dtype)} if spec.bias else {}

    def tie(self, owner: nn.Module) -> None:
        """Use the `weight` [out, in] of another module (tied embeddings) when packing; it is not loaded twice."""
        if "weight" not in self.stored or self.stored["weight"] != PLAIN.params(self.spec, _name(self.dtype))["weight"]:
            raise PluginError(f"{self.spec.name}: only a linear that is stored unquantized can be tied")
        self.stored = {k: v for k, v in self.stored.items() if k != "weight"}
        self.weight = None
        self.owner = (owner,)  # in a tuple: not a submodule

    def untie(self) -> None:
        """Have a weight of its own after all, to be loaded."""
        self.stored = self.format.params(self.spec, _name(self.dtype)) | self.stored
        stored = self.params["weight"]
        weight = torch.empty(stored.shape, dtype=getattr(torch, stored.dtype), device="meta")
        self.owner = ()
        self._parameters["weight"] = nn.Parameter(weight, requires_grad=False)

    @property
    def tied(self) -> bool:
        return bool(self.owner)

    def pack(self) -> None:
        """Hand the loaded parameters to the kernel and forget them (the bias stays)."""
        tensors: dict[str, Tensor] = {}
        for key in self.params:
            if key != "bias":
                parameter = getattr(self.owner[0] if self.owner else self, key)
                if parameter is not None:  # an optional one that is absent
                    tensors[key] = parameter.data[self.own_rows] if self.owner else parameter.data
                delattr(self, key)
        if any(t.is_meta for t in tensors.values()):
            raise PluginError(f"{self.spec.name}: packed before it was loaded")
        began = perf_counter()
        try:
            self.packed = self.kernel.pack(self.format, tensors, self.local, self.dtype)
        except CheckpointError as e:
            raise CheckpointError(f"{self.spec.name}: {e.message}", fix=e.fix) from e
        except (ArithmeticError, LookupError, RuntimeError, TypeError, ValueError) as e:
            what = f"{self.spec.name}: {self.kernel.name} cannot pack {self.format.name}: {e}"
            raise PluginError(
                what, fix="choose another kernel with --op, or report it to the author of the plugin"
            ) from e
        self.pack_seconds = perf_counter() - began

    @property
    def own_rows(self) -> slice:
        """Outputs of the whole that are here, of a linear that is divided by them and has one part."""
        size = self.local.total_out
        return slice(self.rank * size, (self.rank + 1) * size) if size < self.spec.total_out else slice(0, size)

    def restore(self, packed: PackedWeight) -> None:
        """Take what an earlier `pack` made of the same parameters, which are not loaded then (the bias is)."""
        for key in self.params:
            if key != "bias":
                delattr(self, key)
        self.packed = packed

    def settle(self) -> None:
        """When all is loaded."""
        if self.silent and self.bias is not None:
            self.bias = nn.Parameter(torch.zeros_like(self.bias), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        assert self.packed is not None
        if self.collectives is None:
            return self.kernel.apply(x, self.packed, self.bias)
        part = self.kernel.apply(x, self.packed, self.bias if self.gathers else None)
        if self.before_ranks is not None:
            part = self.before_ranks(x, part)
        if self.gathers:
            return self.collectives.all_gather(part, -1)
        out = self.collectives.all_reduce(part)
        return out if self.bias is None else out + self.bias

    def extra_repr(self) -> str:
        return f"{self.spec.in_features} -> {self.spec.out_features}, {self.format.name} by {self.kernel.name}"
