"""Builder: the BuildContext that core gives to model plugins."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from lmkit.api import (
    AttentionBackend,
    Collectives,
    DeviceInfo,
    LinearKernel,
    LinearSpec,
    ModelInfo,
    QuantScheme,
    SelectionError,
)
from lmkit.layers.attention import Attention
from lmkit.layers.embedding import Embedding
from lmkit.layers.linear import PLAIN, Linear, ReferenceLinear
from lmkit.layers.norm import RMSNorm
from lmkit.layers.rotary import Rotary


class Builder:
    """Makes modules with the chosen implementations. `kernels` maps a weight format to its chosen kernel.

    `strict` names formats whose kernel the user chose: there a layer the kernel refuses is an error; elsewhere
    such a layer falls back to the reference kernel and leaves a line in `warnings`.
    """

    def __init__(
        self,
        info: ModelInfo,
        dtype: torch.dtype,
        device: DeviceInfo,
        attention: AttentionBackend,
        kernels: Mapping[str, LinearKernel],
        *,
        scheme: QuantScheme | None = None,
        strict: frozenset[str] = frozenset(),
        collectives: Collectives | None = None,
    ) -> None:
        self.info, self.dtype, self.device = info, dtype, device
        self.kernels, self.scheme, self.strict = kernels, scheme, strict
        self.collectives = collectives
        self.tp_rank, self.tp_size = (collectives.rank, collectives.size) if collectives else (0, 1)
        self.warnings: list[str] = []
        self.backend = attention
        self._quantizable = {spec.name for spec in info.linears}
        groups = info.kv_groups()
        self._group_of = {i: (g, need) for g, (need, layers) in enumerate(groups) for i in layers}

    def linear(self, spec: LinearSpec) -> Linear:
        fmt = self.scheme.for_layer(spec) if self.scheme and spec.name in self._quantizable else None
        fmt = fmt or PLAIN
        kernel: LinearKernel | None = self.kernels.get(fmt.name)
        if kernel is None:
            raise SelectionError(f"no kernel was chosen for linear format {fmt.name!r} (layer {spec.name})")
        reason = kernel.can_run(fmt, spec, self.device)
        if reason and fmt.name in self.strict:
            raise SelectionError(
                f"{kernel.name} cannot run {spec.name}: {reason}", fix="choose another kernel or 'auto'"
            )
        if reason:
            self.warnings.append(f"{spec.name}: {kernel.name} refused ({reason}), using {ReferenceLinear.name}")
            return Linear(spec, fmt, ReferenceLinear(), self.dtype, self.collectives)
        return Linear(spec, fmt, kernel, self.dtype, self.collectives)

    def attention(self, layer: int, scale: float) -> Attention:
        group, need = self._group_of[layer]
        return Attention(self.backend, need, layer, group, scale)

    def norm(self, size: int, eps: float) -> RMSNorm:
        return RMSNorm(size, eps, self.dtype)

    def embedding(self, num: int, size: int) -> Embedding:
        return Embedding(num, size, self.dtype)

    def rotary(self, head_dim: int, rope: Mapping[str, object]) -> Rotary:
        return Rotary(head_dim, rope, self.info.max_length, self.dtype)
