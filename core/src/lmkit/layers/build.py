"""Builder: the BuildContext that core gives to model plugins."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from lmkit.api import (
    AttentionBackend,
    Collectives,
    DeviceInfo,
    LinearSpec,
    ModelInfo,
    NormKind,
    QuantFormat,
    QuantScheme,
    RowOps,
    SelectionError,
)
from lmkit.layers.attention import Attention
from lmkit.layers.embedding import Embedding
from lmkit.layers.linear import PLAIN, Linear
from lmkit.layers.moe import Experts
from lmkit.layers.norm import Norm, make_norm
from lmkit.layers.rotary import Rotary
from lmkit.layers.rowwise import TorchRowOps

HEAD = "lm_head"


class Builder:
    """Makes modules with the chosen implementations.

    `kernels` maps "op:format" (ops "linear" and "moe") to kernels, preferred first: each layer gets the first that can
    run it, and a line in `warnings` when that is not the very first. `online`: the scheme quantizes a checkpoint that
    is not, its output head too; else only what a checkpoint may store so. `strict` names those which the user chose:
    there a refusal is an error.
    """

    def __init__(
        self,
        info: ModelInfo,
        dtype: torch.dtype,
        device: DeviceInfo,
        attention: AttentionBackend,
        kernels: Mapping[str, Sequence[Any]],
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
        fmt, kernel = self._kernel("linear", spec)
        return Linear(spec, fmt, kernel, self.dtype, self.collectives)

    def experts(self, up: LinearSpec, down: LinearSpec, act: str) -> Experts:
        linears, kernels = [], []
        for spec in (up, down):
            fmt, kernel = self._kernel("moe", spec)
            linears.append(Linear(spec, fmt, kernel, self.dtype, self.collectives))
            kernels.append(kernel)
        if kernels[0] is not kernels[1]:
            raise SelectionError(
                f"{up.name}, {down.name}: {kernels[0].name} and {kernels[1].name} cannot share experts"
            )
        return Experts(linears[0], linears[1], act, kernels[0], self.rows)

    def _kernel(self, op: str, spec: LinearSpec) -> tuple[QuantFormat, Any]:
        """The weight format of a linear and the first kernel for `op` that runs it."""
        fmt = self.scheme.for_layer(spec) if self.scheme and spec.name in self._quantizable else None
        fmt = fmt or PLAIN
        refusals: list[str] = []
        for kernel in self.kernels.get(f"{op}:{fmt.name}", ()):
            reason = kernel.can_run(fmt, spec, self.device)
            if reason is None:
                if refusals:
                    self.warnings.append(f"{spec.name}: runs on {kernel.name} ({'; '.join(refusals)})")
                return fmt, kernel
            refusals.append(f"{kernel.name} refused: {reason}")
            if f"{op}:{fmt.name}" in self.strict:
                break
        reasons = "; ".join(refusals) or "none was chosen"
        raise SelectionError(f"no kernel for {op} with format {fmt.name!r}, layer {spec.name}: {reasons}")

    def attention(self, layer: int, scale: float) -> Attention:
        group, need = self._group_of[layer]
        return Attention(self.backend, need, layer, group, scale)

    def norm(self, size: int, eps: float, kind: NormKind = "rms") -> Norm:
        return make_norm(kind, size, eps, self.dtype, self.rows)

    def embedding(self, num: int, size: int) -> Embedding:
        return Embedding(num, size, self.dtype, self.rows)

    def rotary(self, head_dim: int, rope: Mapping[str, object]) -> Rotary:
        return Rotary(head_dim, rope, self.rows)
