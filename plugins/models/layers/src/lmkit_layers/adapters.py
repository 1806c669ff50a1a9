"""AdapterBank: the adapters of a loaded model, and to which tokens of a step each applies.

A linear's output gets x @ a @ b added for the tokens of each adapter, after its kernel, so every weight format and
kernel serves; embedding and head may have a weight of the adapter's own. What linears and the embedding get is made
for all tokens at once, from tables on the device: a step that has no more than that may be captured. Routers, experts
and latents are changed for the tokens of one adapter after another, and the host waits to know them. Steps without
adapters run as if there were none. Ranks keep of each adapter what their shares of linears need; where a linear's
output is the sum of theirs, so is what is added to it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from lmkit.api import EngineError, Model, StepInputs
from torch import Tensor, nn
from torch.nn import functional as F

from lmkit_layers.adapter_tables import AdapterTable, AdapterTokens, Delta, gained, share_of_rank
from lmkit_layers.embedding import Embedding
from lmkit_layers.experts import Experts, LinearExperts, Mixture, PackedExperts, Router
from lmkit_layers.latent import Latent
from lmkit_layers.linear import Linear

HEAD = "lm_head"  # runs on the rows that are sampled, after the other modules
NONE = -1  # in place of an adapter's number


@dataclass(frozen=True, slots=True, eq=False)
class Adapter:
    """Immutable once loaded: rows that hold it keep it, whatever its name means later.

    Its tensors are those of the host, of which tables on the device are made.
    """

    id: str
    deltas: Mapping[str, Sequence[Delta]]  # by module
    whole: Mapping[str, Tensor]  # weights of its own, [out, in] of a linear, [ids, out] of an embedding

    @property
    def modules(self) -> set[str]:
        return {*self.deltas, *self.whole}


class AdapterBank:
    """Rows are slots of the worker. An adapter has a number as long as it is loaded, or a row holds it."""

    def __init__(self, model: Model, num_slots: int, device: torch.device) -> None:
        self.model, self.device = model, device
        self.of_slot = np.full(num_slots, NONE, np.int64)  # the number of each row's adapter
        self.loaded: dict[str, int] = {}
        self._held: dict[int, Adapter] = {}  # by number
        self._modules: dict[str, nn.Module] = {}  # of the model, found when first needed
        self.tables = Tables(model, {}, {}, device)

    @property
    def used(self) -> bool:
        return bool(self._held)

    def load(self, adapter: Adapter) -> None:
        """Under its id, in place of another of that id. Raises EngineError for a module that the model has not."""
        assert isinstance(self.model, nn.Module)
        self._modules = self._modules or _changeable(self.model)
        if unknown := sorted(adapter.modules - set(self._modules)):
            raise EngineError(f"the model has no {', '.join(unknown[:3])} that adapter {adapter.id!r} could change")
        linears = {m.spec.name: m for m in self.model.modules() if isinstance(m, Linear)}
        own = {n: share_of_rank(linears[n], found) if n in linears else found for n, found in adapter.deltas.items()}
        self.loaded.pop(adapter.id, None)
        number = next(n for n in range(len(self._held) + 1) if n not in self._held)
        whole = {n: weight[linears[n].own_rows] if n in linears else weight for n, weight in adapter.whole.items()}
        self._settle({**self._held, number: replace(adapter, deltas=own, whole=whole)})
        self.loaded[adapter.id] = number

    def drop(self, id: str) -> None:
        """Rows that hold it keep it."""
        if self.loaded.pop(id, None) is not None:
            self._settle(self._held)

    def put(self, slot: int, id: str) -> None:
        """Raises EngineError when the adapter is not loaded."""
        if id not in self.loaded:
            raise EngineError(f"adapter {id!r} is not loaded in this worker")
        self.of_slot[slot] = self.loaded[id]

    def remove(self, slot: int) -> None:
        number = int(self.of_slot[slot])
        self.of_slot[slot] = NONE
        if number != NONE and number not in self.loaded.values() and number not in self.of_slot:
            self._settle(self._held)

    def clear(self) -> None:
        """Forgets all rows."""
        self.of_slot[:] = NONE
        if len(self._held) > len(self.loaded):
            self._settle(self._held)

    def _settle(self, held: Mapping[int, Adapter]) -> None:
        """Tables of what is loaded, or held by a row."""
        kept = {*self.loaded.values(), *self.of_slot.tolist(), *(held.keys() - self._held.keys())}
        self._held = {number: adapter for number, adapter in held.items() if number in kept}
        self.tables = Tables(self.model, self._held, self._modules, self.device, self.tables)

    # ------------------------------------------------------------------------------------------- steps

    def of(self, slots: np.ndarray) -> np.ndarray | None:
        """The adapters of rows [R]; None where none has one."""
        found = self.of_slot[slots]
        return found if (found != NONE).any() else None

    def logits(self, hidden: Tensor, adapters: Tensor) -> Tensor:
        """The head's, where it is changed too. `adapters` [S]: of each hidden state [S, D]."""
        with self.tables.applied({len(hidden): adapters}, head=True):
            return self.model.logits(hidden)


class Tables:
    """What some adapters change of a model. A function of steps: new adapters make a new one, and what was captured of
    the old one goes with it."""

    def __init__(
        self, model: Model, adapters: Mapping[int, Adapter], modules: Mapping[str, nn.Module], device: torch.device,
        before: Tables | None = None,
    ) -> None:  # fmt: skip
        """`modules` by name. Tables of modules for which nothing has changed since `before` are taken over."""
        self.model, self.modules = model, modules
        self.tables: dict[str, AdapterTable] = {}
        self.special: dict[str, dict[int, Adapter]] = {}  # modules that are changed adapter by adapter
        self._of = {
            name: {n: adapter for n, adapter in adapters.items() if name in adapter.modules}
            for name in sorted({name for adapter in adapters.values() for name in adapter.modules})
        }
        for name, of in self._of.items():
            if not isinstance(modules[name], Linear | Embedding):
                self.special[name] = {n: _moved(adapter, device) for n, adapter in of.items()}
            elif before is not None and before._of.get(name) == of:
                self.tables[name] = before.tables[name]
            else:
                deltas = {n: adapter.deltas[name] for n, adapter in of.items() if name in adapter.deltas}
                whole = {n: adapter.whole[name] for n, adapter in of.items() if name in adapter.whole}
                self.tables[name] = AdapterTable(deltas, whole, device)
        owners = {table.owners for table in self.tables.values()}
        self._owners = {owner: torch.tensor(owner, device=device) for owner in owners}
        self._active: dict[int, AdapterTokens] = {}  # of a run, by its number of tokens
        self._seen: set[str] = set()  # modules that ran

    @property
    def capturable(self) -> bool:
        return not self.special

    @property
    def changes_head(self) -> bool:
        return HEAD in self.tables

    def __call__(self, x: StepInputs) -> Tensor:
        """The model's hidden states, with what the adapters of its tokens add."""
        assert x.adapters is not None
        read = {len(x.logits_rows): x.adapters[x.logits_rows]} if x.only_logits else {}
        with self.applied({**read, len(x.adapters): x.adapters}):
            return self.model.forward(x)

    @contextmanager
    def applied(self, tokens: Mapping[int, Tensor], head: bool = False) -> Iterator[None]:
        """Within, all modules but the head, or only the `head`, do what adapters change in addition. Modules may run on
        as many tokens as `tokens` says, each time with the adapter of each.

        Raises EngineError at the end when the model computed around a module that an adapter changes.
        """
        self._active = {n: AdapterTokens(adapters, self._owners) for n, adapters in tokens.items()}
        names = {name for name in (*self.tables, *self.special) if (name == HEAD) == head}
        hooked: dict[nn.Module, list[str]] = {}  # one hook for both linears of experts
        for name in sorted(names):
            hooked.setdefault(self.modules[name], []).append(name)
        self._seen.clear()
        try:
            with ExitStack() as stack:
                for module, names_of in hooked.items():
                    stack.callback(_attach(module, self._hook(names_of)))
                yield
        finally:
            self._active = {}
        if missed := names - self._seen:
            raise EngineError(f"adapters had no effect on {', '.join(sorted(missed)[:3])}")

    def _hook(self, names: Sequence[str]) -> Callable[[nn.Module, tuple[Any, ...], Any], Any]:
        """What the module of these names does in addition."""
        table = self.tables.get(names[0])
        adapters = {n: adapter for name in names for n, adapter in self.special.get(name, {}).items()}

        def add(module: nn.Module, args: tuple[Any, ...], out: Any) -> Any:
            self._seen.update(names)
            tokens = self._active[len(args[0])]
            if table is not None:
                return table.add(module, args[0], out, tokens)
            for number, adapter in adapters.items():
                self._change(module, names[0], adapter, tokens.adapters, tokens.numbers(number), args, out)
            return out

        return add

    def _change(
        self, module: nn.Module, name: str, adapter: Adapter, adapters: Tensor, tokens: Tensor, args: tuple[Any, ...],
        out: Any,
    ) -> None:  # fmt: skip
        """What `adapter` changes of `out`, in place, for its `tokens` [N]. `adapters`: of all tokens of `args`."""
        if not len(tokens):
            return
        x, deltas = args[0][tokens], adapter.deltas.get(name, ())
        if isinstance(module, Router):
            for whole, part in zip(out, routed(module, x, deltas), strict=True):
                whole[tokens] = part
        elif isinstance(module, Latent):
            for delta in deltas:
                out[tokens] = module.changed(x, args[1], delta.a, delta.b, delta.gain)
        elif isinstance(module, Mixture):
            out[tokens] += self._regated(module, x, adapters[tokens], deltas)
        elif isinstance(module, Experts):
            up, down = (adapter.deltas.get(linear.spec.name, ()) for linear in (module.up, module.down))
            out[tokens] = through_experts(module, x, args[1][tokens], args[2][tokens], up, down)

    def _regated(self, module: Mixture, x: Tensor, adapters: Tensor, deltas: Sequence[Delta]) -> Tensor | float:
        """What more, or less, the shared expert says of `x`, whose tokens have these adapters, with `deltas` added to
        its gate."""
        if not deltas or module.shared is None or module.shared_gate is None:
            return 0.0
        kept = self._active
        self._active = {len(x): AdapterTokens(adapters, self._owners)}
        try:
            said = module.shared(x)
        finally:
            self._active = kept
        gate = module.shared_gate
        changed = gate + sum((delta.a @ delta.b).T for delta in deltas)
        return (F.linear(x, changed).sigmoid() - F.linear(x, gate).sigmoid()) * said


def _attach(module: nn.Module, hook: Callable[[nn.Module, tuple[Any, ...], Any], Any]) -> Callable[[], None]:
    """Adds what `hook` does, before ranks meet: each does a part. Returns what takes it away."""
    if not (isinstance(module, Linear) and module.collectives is not None):
        return module.register_forward_hook(hook).remove
    module.before_ranks = lambda x, out: hook(module, (x,), out)
    return lambda: setattr(module, "before_ranks", None)


def _moved(adapter: Adapter, device: torch.device) -> Adapter:
    """With its deltas on the device."""
    return replace(adapter, deltas={name: [d.to(device) for d in found] for name, found in adapter.deltas.items()})


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
    out, ids = torch.zeros_like(x), module.here(ids)
    for expert in ids[ids >= 0].unique().tolist():
        tokens, choice = (ids == expert).nonzero(as_tuple=True)
        y = through_expert(module.up, x[tokens], expert, up)
        y = module.rows.gate(y, module.act) if gated else module.rows.activate(y, module.act)
        y = through_expert(module.down, y, expert, down)
        out.index_add_(0, tokens, y * weights[tokens, choice, None])
    return out if module.down.collectives is None else module.down.collectives.all_reduce(out)


def through_expert(linear: Linear, x: Tensor, expert: int, deltas: Sequence[Delta]) -> Tensor:
    """x [N, in] through the linear of one expert among those stacked in `linear`."""
    if not (isinstance(linear.kernel, LinearExperts) and isinstance(linear.packed, PackedExperts)):
        raise EngineError(f"{linear.spec.name}: adapters need experts that run one linear after the other")
    size = linear.local.total_out // linear.local.experts
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
