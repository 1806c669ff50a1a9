"""Builder: the BuildContext that core gives to model plugins."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from lmkit.api import (
    AttentionBackend,
    CannotSplit,
    Collectives,
    DeviceInfo,
    ExpertKernel,
    LinearKernel,
    LinearSpec,
    ModelInfo,
    NormKind,
    PluginError,
    QuantFormat,
    QuantScheme,
    RowOps,
    SelectionError,
)

from lmkit_layers.attention import Attention
from lmkit_layers.embedding import Embedding
from lmkit_layers.experts import Experts, LinearExperts, dealt_experts, one_expert
from lmkit_layers.linear import PLAIN, Linear, ReferenceLinear
from lmkit_layers.norm import Norm, make_norm
from lmkit_layers.rotary import Rotary
from lmkit_layers.rowwise import TorchRowOps

HEAD = "lm_head"


class Builder:
    """Makes modules with the chosen implementations.

    `kernels` maps "op:format" (ops "linear" and "moe") to kernels, preferred first: each layer gets the first that can
    run it, and a line in `warnings` when that is not the very first, or when it has a `caution`. `online`: the scheme
    quantizes a checkpoint that is not, its output head too; else only what a checkpoint may store so. `strict` names
    those of which the user chose the kernels: experts do not go to kernels for linears then. `cache`: whose layers
    share the KV cache, and where those of `info` begin among them. `deals`: experts are dealt out to so many ranks that
    follow each other.
    """

    def __init__(
        self,
        info: ModelInfo,
        dtype: torch.dtype,
        device: DeviceInfo,
        attention: AttentionBackend | None,
        kernels: Mapping[str, Sequence[Any]],
        *,
        scheme: QuantScheme | None = None,
        online: bool = False,
        strict: frozenset[str] = frozenset(),
        collectives: Collectives | None = None,
        rows: RowOps | None = None,
        recurrent: Any = None,
        cache: tuple[ModelInfo, int] | None = None,
        deals: int = 1,
    ) -> None:
        self.info, self.dtype, self.device = info, dtype, device
        self.kernels, self.scheme, self.strict = kernels, scheme, strict
        self.collectives = collectives
        self.tp_rank, self.tp_size = (collectives.rank, collectives.size) if collectives else (0, 1)
        self.deals = deals
        self.rows, self.recurrent = rows or TorchRowOps(), recurrent
        self._remarks: dict[str, list[str]] = {}  # what is said of linears -> their names
        self.backend = attention
        quantizable = {spec.name for spec in info.linears if not (online and spec.dense)}
        self._quantizable = quantizable | ({HEAD} if online else set())
        self._all, self._first = cache or (info, 0)
        groups = self._all.kv_groups()
        self._group_of = {i: (g, need) for g, (need, layers) in enumerate(groups) for i in layers}
        self._writers: dict[int, Attention] = {}  # of the cache of a layer

    @property
    def warnings(self) -> list[str]:
        return [
            f"{names[0]}{f' and {len(names) - 1} more' if len(names) > 1 else ''}: {remark}"
            for remark, names in self._remarks.items()
        ]

    def _remark(self, spec: LinearSpec, remark: str) -> None:
        self._remarks.setdefault(remark, []).append(spec.name)

    def linear(self, spec: LinearSpec, local: LinearSpec | None = None) -> Linear:
        fmt = self._format(spec)
        kernel = ReferenceLinear() if spec.dense else self._kernel(fmt, spec)
        try:
            return Linear(spec, fmt, kernel, self.dtype, self.collectives, local)
        except CannotSplit:
            if not spec.is_head or spec.shard == "none":
                raise
        whole = replace(spec, shard="none")  # a vocabulary that does not divide is whole on each rank
        return Linear(whole, fmt, kernel, self.dtype, self.collectives)

    def experts(self, up: LinearSpec, down: LinearSpec, act: str) -> Experts:
        """On a kernel for experts that runs both linears, else each expert on kernels for linears."""
        formats = {spec: self._format(spec) for spec in (up, down)}
        special = self._expert_kernel(formats, act)
        kernels: list[Any] = [special or self._linear_experts(spec) for spec in formats]
        first, last = (
            Linear(spec, fmt, kernel, self.dtype, self.collectives, dealt=self._dealt(spec))
            for (spec, fmt), kernel in zip(formats.items(), kernels, strict=True)
        )
        return Experts(first, last, act, kernels[0], self.rows)

    def _dealt(self, spec: LinearSpec) -> tuple[LinearSpec, QuantFormat] | None:
        """The experts of which this rank has a share, and the format of these; None: all."""
        if self.deals == 1:
            return None
        if self.tp_size % self.deals:
            raise CannotSplit(f"{spec.name}: {self.tp_size} ranks cannot deal out experts to {self.deals}")
        own = dealt_experts(spec, self.tp_rank, self.deals)
        return own, self._format(own)

    def _linear_experts(self, spec: LinearSpec) -> LinearExperts:
        """Each expert on the first linear kernel that runs the format of one: plain where those of all are."""
        one = one_expert(spec)
        fmt = PLAIN if self._format(spec) is PLAIN else self._format(one)
        return LinearExperts(self._kernel(fmt, one), fmt)

    def _expert_kernel(self, formats: Mapping[LinearSpec, QuantFormat], act: str) -> ExpertKernel | None:
        """The first that runs both linears; a line in `warnings` for those which do not."""
        up, down = formats
        op = f"moe:{formats[up].name}"
        refused: list[str] = []
        for kernel in self.kernels.get(op, ()):
            asked = ((up, act), (down, None))
            refusals = [r for spec, a in asked if (r := kernel.can_run(formats[spec], spec, self.device, a))]
            if self.deals > 1 and not getattr(kernel, "skips", False):
                refusals.append("does not leave out experts of other ranks")
            if not refusals:
                break
            refused.append(f"not on {kernel.name} ({'; '.join(dict.fromkeys(refusals))})")
        else:
            if op in self.strict:
                raise SelectionError(f"{up.name}: {'; '.join(refused)}", fix="--op auto")
            kernel = None
        for remark in refused:
            self._remark(up, remark)
        return kernel

    def _format(self, spec: LinearSpec) -> QuantFormat:
        fmt = self.scheme.for_layer(spec) if self.scheme and spec.name in self._quantizable else None
        return fmt or PLAIN

    def _kernel(self, fmt: QuantFormat, spec: LinearSpec) -> LinearKernel:
        """The first linear kernel that runs `fmt`."""
        op = f"linear:{fmt.name}"
        refusals: list[str] = []
        for kernel in self.kernels.get(op, ()):
            reason = kernel.can_run(fmt, spec, self.device)
            if reason is None:
                if refusals:
                    self._remark(spec, f"runs on {kernel.name} ({'; '.join(refusals)})")
                if caution := getattr(kernel, "caution", ""):
                    self._remark(spec, f"runs on {kernel.name}: {caution}")
                return kernel
            refusals.append(f"{kernel.name} refused: {reason}")
        reasons = "; ".join(refusals) or "none was chosen"
        raise SelectionError(f"no kernel for linear format {fmt.name!r}, layer {spec.name}: {reasons}")

    def attention(self, layer: int, scale: float) -> Attention:
        last = layer == len(self.info.layers) - 1 and not self.info.layers[layer].state  # which may depend on it
        layer += self._first
        kv_of = self._all.layers[layer].kv_of
        source = layer if kv_of is None else kv_of
        if self.backend is None or source not in self._group_of:
            raise PluginError(f"{self.info.architecture}: layer {layer} is described without attention")
        group, need = self._group_of[source]
        if self._all.layers[layer].attn != need:
            raise PluginError(f"{self.info.architecture}: layers {source} and {layer} cannot share keys and values")
        found = Attention(
            self.backend, need, source, group, scale, self._writers.get(source), last, (self.tp_rank, self.tp_size)
        )
        if source == layer:
            self._writers[layer] = found
        return found

    def norm(self, size: int, eps: float, kind: NormKind = "rms") -> Norm:
        return make_norm(kind, size, eps, self.dtype, self.rows)

    def embedding(self, num: int, size: int) -> Embedding:
        return Embedding(num, size, self.dtype, self.rows)

    def rotary(self, head_dim: int, rope: Mapping[str, object]) -> Rotary:
        return Rotary(head_dim, rope, self.rows)
