"""AdapterBank: the adapters of a loaded model, and to which tokens of a step each applies.

A linear's output gets x @ a @ b added for the tokens of each adapter, after its kernel, so every weight format and
kernel serves; embedding and head may have a weight of the adapter's own. Steps without adapters run as if there were
none.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol, cast

import torch
from lmkit.api import EngineError, Model
from torch import Tensor, nn
from torch.nn import functional as F

from lmkit_layers.embedding import Embedding
from lmkit_layers.experts import Experts, LinearExperts, Mixture, PackedExperts, Router
from lmkit_layers.latent import Latent
from lmkit_layers.linear import Linear

HEAD = "lm_head"  # runs on the rows that are sampled, after the other modules


class Delta(Protocol):
    """Added to outputs [low, high) of a linear: x @ a @ b; of an embedding: a[ids] @ b. See loading.adapter."""

    low: int
    high: int
    a: Tensor  # [in, rank]
    b: Tensor  # [rank, high - low]
    gain: Tensor | None  # [high - low]: of the sum without its bias


@dataclass(frozen=True, slots=True)
class Adapter:
    """Immutable once loaded: rows that hold it keep it, whatever its name means later."""

    id: str
    deltas: Mapping[str, Sequence[Delta]]  # by module
    whole: Mapping[str, Tensor]  # weights of its own, [out, in] of a linear, [ids, out] of an embedding

    @property
    def modules(self) -> set[str]:
        return {*self.deltas, *self.whole}


class AdapterBank:
    """Rows are slots of the worker. Modules are hooked for the time of a step that needs it."""

    def __init__(self) -> None:
        self.loaded: dict[str, Adapter] = {}
        self.rows: dict[int, Adapter] = {}  # slot -> its adapter
        self._active: dict[int, list[tuple[Adapter, Tensor]]] = {}  # those that run, with their tokens of so many
        self._seen: set[str] = set()  # modules that ran in this step
        self._modules: dict[str, nn.Module] = {}  # of the model, found when first needed

    def put(self, slot: int, id: str) -> None:
        """Raises EngineError when the adapter is not loaded."""
        if id not in self.loaded:
            raise EngineError(f"adapter {id!r} is not loaded in this worker")
        self.rows[slot] = self.loaded[id]

    @contextmanager
    def applied(
        self, model: Model, slots: Sequence[int], lengths: Sequence[int], read: Sequence[int] | None = None,
        head: bool = False,
    ) -> Iterator[None]:  # fmt: skip
        """Within, `model` gives the tokens of each row (in batch order) what its adapter adds: all modules but the
        head, or only the `head`. Modules may run on fewer tokens, those `read`, but not on as many others.

        Raises EngineError at the end when the model computed around a module that an adapter changes.
        """
        assert isinstance(model, nn.Module)
        found = [self.rows.get(slot) for slot, length in zip(slots, lengths, strict=True) for _ in range(length)]
        for adapters in [found] if read is None else [found, [found[token] for token in read]]:
            self._active[len(adapters)] = _tokens_of(adapters, next(model.parameters()).device)
        names = {name for adapter, _ in self._active[len(found)] for name in adapter.modules if (name == HEAD) == head}
        self._modules = self._modules or _changeable(model)
        hooked = {self._modules[name]: name for name in sorted(names)}  # one hook for both linears of experts
        hooks = [module.register_forward_hook(self._hook(name)) for module, name in hooked.items()]
        self._seen.clear()
        try:
            yield
        finally:
            self._active = {}
            for hook in hooks:
                hook.remove()
        if missed := names - self._seen:
            raise EngineError(f"adapters had no effect on {', '.join(sorted(missed)[:3])}")

    def _hook(self, name: str) -> Any:
        """What module `name` does in addition."""

        def add(module: nn.Module, args: tuple[Any, ...], out: Any) -> Any:
            self._seen.add(name)
            for adapter, tokens in self._active[len(args[0])]:
                x = args[0][tokens]
                if isinstance(module, Router):
                    for whole, part in zip(out, routed(module, x, adapter.deltas.get(name, ())), strict=True):
                        whole[tokens] = part
                    continue
                if isinstance(module, Latent):
                    for delta in adapter.deltas.get(name, ()):
                        out[tokens] = module.changed(x, args[1], delta.a, delta.b, delta.gain)
                    continue
                if isinstance(module, Mixture):
                    out[tokens] += self._regated(module, x, adapter, adapter.deltas.get(name, ()))
                    continue
                if isinstance(module, Experts):
                    up, down = (adapter.deltas.get(linear.spec.name, ()) for linear in (module.up, module.down))
                    self._seen |= {linear.spec.name for linear in (module.up, module.down)}
                    if up or down:
                        out[tokens] = through_experts(module, x, args[1][tokens], args[2][tokens], up, down)
                    continue
                embeds = isinstance(module, Embedding)
                if (weight := adapter.whole.get(name)) is not None:
                    out[tokens] = weight[x] if embeds else F.linear(x, weight, module.bias)  # type: ignore[arg-type]
                for delta in adapter.deltas.get(name, ()):
                    change = (delta.a[x] if embeds else x @ delta.a) @ delta.b
                    part, bias = slice(delta.low, delta.high), None if embeds else cast("Tensor | None", module.bias)
                    if delta.gain is not None:
                        change = gained(out[tokens, part], None if bias is None else bias[part], change, delta.gain)
                    out[tokens, part] += change
            return out

        return add

    def _regated(self, module: Mixture, x: Tensor, adapter: Adapter, deltas: Sequence[Delta]) -> Tensor | float:
        """What more, or less, the shared expert says of `x` with `deltas` added to its gate."""
        if not deltas or module.shared is None or module.shared_gate is None:
            return 0.0
        kept, self._active = self._active, {len(x): [(adapter, torch.arange(len(x), device=x.device))]}
        try:
            said = module.shared(x)
        finally:
            self._active = kept
        gate = module.shared_gate
        changed = gate + sum((delta.a @ delta.b).T for delta in deltas)
        return (F.linear(x, changed).sigmoid() - F.linear(x, gate).sigmoid()) * said


def _tokens_of(adapters: Sequence[Adapter | None], device: torch.device) -> list[tuple[Adapter, Tensor]]:
    """Each of those that tokens have, with its tokens."""
    tokens: dict[str, list[int]] = {}
    for token, adapter in enumerate(adapters):
        if adapter is not None:
            tokens.setdefault(adapter.id, []).append(token)
    held = {adapter.id: adapter for adapter in adapters if adapter is not None}
    return [(held[id], torch.tensor(found, device=device)) for id, found in tokens.items()]


def gained(before: Tensor, bias: Tensor | None, change: Tensor, gain: Tensor) -> Tensor:
    """What is to be added to `before`, a linear's output, so that all of it but the bias has the gain."""
    plain = before if bias is None else before - bias
    return (plain + change) * gain - plain


def routed(module: Router, x: Tensor, deltas: Sequence[Delta]) -> Any:
    """What a router says of `x` with the sum of its weight and `deltas`."""
    kept = module.weight
    weight = kept + sum((delta.a @ delta.b).T for delta in deltas)
    try:
        module.weight = nn.Parameter(weight, requires_grad=False)
        return module.forward(x)
    finally:
        module.weight = kept


def through_experts(
    module: Experts, x: Tensor, ids: Tensor, weights: Tensor, up: Sequence[Delta], down: Sequence[Delta]
) -> Tensor:
    """What the experts `ids` [T, K] say of x [T, D], with `up` and `down` added to their linears."""
    gated = len(module.up.spec.parts) > module.up.spec.experts
    out = torch.zeros_like(x)
    for expert in ids.unique().tolist():
        tokens, choice = (ids == expert).nonzero(as_tuple=True)
        y = through_expert(module.up, x[tokens], expert, up)
        y = module.rows.gate(y, module.act) if gated else module.rows.activate(y, module.act)
        y = through_expert(module.down, y, expert, down)
        out.index_add_(0, tokens, y * weights[tokens, choice, None])
    return out


def through_expert(linear: Linear, x: Tensor, expert: int, deltas: Sequence[Delta]) -> Tensor:
    """x [N, in] through the linear of one expert among those stacked in `linear`."""
    if not (isinstance(linear.kernel, LinearExperts) and isinstance(linear.packed, PackedExperts)):
        raise EngineError(f"{linear.spec.name}: adapters need experts that run one linear after the other")
    size = linear.spec.total_out // linear.spec.experts
    first = expert * size
    bias = None if linear.bias is None else linear.bias[first : first + size]
    y = linear.kernel.kernel.apply(x, linear.packed.experts[expert], bias)
    for delta in deltas:
        if first <= delta.low < first + size:
            part, change = slice(delta.low - first, delta.high - first), x @ delta.a @ delta.b
            if delta.gain is not None:
                change = gained(y[:, part], None if bias is None else bias[part], change, delta.gain)
            y[:, part] += change
    return y


def _changeable(model: nn.Module) -> dict[str, nn.Module]:
    """The modules that an adapter may change: linears as their spec calls them, others by their path.

    Linears of experts and of latents are run by what holds them.
    """
    found: dict[str, nn.Module] = {m.spec.name: m for m in model.modules() if isinstance(m, Linear)}
    for path, module in model.named_modules():
        if isinstance(module, Embedding | Router):
            found[path] = module
        elif isinstance(module, Mixture) and module.shared_gate is not None:
            found[f"{path}.shared_gate"] = module
        elif isinstance(module, Experts):
            found |= {module.up.spec.name: module, module.down.spec.name: module}
        elif isinstance(module, Latent):
            found[module.linear.spec.name] = module
    return found
