"""Builder: the BuildContext that core gives to model plugins."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from lmkit.api import (
    AttentionBackend,
    Collectives,
    DeviceInfo,
    LinearKernel,
    LinearSpec,
    ModelInfo,
    NormKind,
    QuantScheme,
    RowOps,
    SelectionError,
)
from lmkit.layers.attention import Attention
from lmkit.layers.embedding import Embedding
from lmkit.layers.linear import PLAIN, Linear
from lmkit.layers.norm import Norm, make_norm
from lmkit.layers.rotary import Rotary
from lmkit.layers.rowwise import TorchRowOps

HEAD = "lm_head"


class Builder:
    """Makes modules with the chosen implementations.

    `kernels` maps a weight format to its kernels, preferred first: each layer gets the first that can run it, and a
    line in `warnings` when that is not the very first. `online`: the scheme quantizes a checkpoint that is not, its
    output head too; else only what a checkpoint may store so. `strict` names formats whose kernel the user chose: there
    a refusal is an error.
    """

    def __init__(
        self,
        info: ModelInfo,
        dtype: torch.dtype,
        device: DeviceInfo,
        attention: AttentionBackend,
        kernels: Mapping[str, Sequence[LinearKernel]],
        *,
        scheme: QuantScheme | None = None,
        online: bool = False,
        strict: frozenset[str] = frozenset(),
        collectives: Collectives | None = None,
        rows: RowOps | None = None,
    ) -> None:
        self.info, self.dtype, self.device = info, dtype, device
        self.kernels, self.scheme, self.strict = kernels, scheme, strict
        self.collectives = collectives
        self.tp_rank, self.tp_size = (collectives.rank, collectives.size) if collectives else (0, 1)
        self.rows = rows or TorchRowOps()
        self.warnings: list[str] = []
        self.backend = attention
        self._quantizable = {spec.name for spec in info.linears} | ({HEAD} if online else set())
        groups = info.kv_groups()
        self._group_of = {i: (g, need) for g, (need, layers) in enumerate(groups) for i in layers}

    def linear(self, spec: LinearSpec) -> Linear:
        fmt = self.scheme.for_layer(spec) if self.scheme and spec.name in self._quantizable else None
        fmt = fmt or PLAIN
        refusals: list[str] = []
        for kernel in self.kernels.get(fmt.name, ()):
            reason = kernel.can_run(fmt, spec, self.device)
            if reason is None:
                if refusals:
                    self.warnings.append(f"{spec.name}: runs on {kernel.name} ({'; '.join(refusals)})")
                return Linear(spec, fmt, kernel, self.dtype, self.collectives)
            refusals.append(f"{kernel.name} refused: {reason}")
            if fmt.name in self.strict:
                break
        reasons = "; ".join(refusals) or "none was chosen"
        raise SelectionError(f"no kernel for linear format {fmt.name!r}, layer {spec.name}: {reasons}")

    def attention(self, layer: int, scale: float) -> Attention:
        group, need = self._group_of[layer]
        return Attention(self.backend, need, layer, group, scale)

    def norm(self, size: int, eps: float, kind: NormKind = "rms") -> Norm:
        return make_norm(kind, size, eps, self.dtype, self.rows)

    def embedding(self, num: int, size: int) -> Embedding:
        return Embedding(num, size, self.dtype, self.rows)

    def rotary(self, head_dim: int, rope: Mapping[str, object]) -> Rotary:
        return Rotary(head_dim, rope, self.rows)
