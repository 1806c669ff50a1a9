"""AdapterBank: the adapters of a loaded model, and to which tokens of a step each applies.

A linear's output gets x @ a @ b added for the tokens of each adapter, after its kernel, so every weight format and
kernel serves; embedding and head may have a weight of the adapter's own. Steps without adapters run as if there were
none.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lmkit.api import EngineError, Model
from lmkit.layers.embedding import Embedding
from lmkit.layers.linear import Linear

HEAD = "lm_head"  # runs on the rows that are sampled, after the other modules


class Delta(Protocol):
    """Added to outputs [low, high) of a linear: x @ a @ b; of an embedding: a[ids] @ b. See loading.adapter."""

    low: int
    high: int
    a: Tensor  # [in, rank]
    b: Tensor  # [rank, high - low]


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
        hooks = [self._modules[name].register_forward_hook(self._hook(name)) for name in names]
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

        def add(module: nn.Module, args: tuple[Tensor, ...], out: Tensor) -> Tensor:
            self._seen.add(name)
            for adapter, tokens in self._active[len(args[0])]:
                x = args[0][tokens]
                embeds = isinstance(module, Embedding)
                if (weight := adapter.whole.get(name)) is not None:
                    out[tokens] = weight[x] if embeds else F.linear(x, weight, module.bias)  # type: ignore[arg-type]
                for delta in adapter.deltas.get(name, ()):
                    out[tokens, delta.low : delta.high] += (delta.a[x] if embeds else x @ delta.a) @ delta.b
            return out

        return add


def _tokens_of(adapters: Sequence[Adapter | None], device: torch.device) -> list[tuple[Adapter, Tensor]]:
    """Each of those that tokens have, with its tokens."""
    tokens: dict[str, list[int]] = {}
    for token, adapter in enumerate(adapters):
        if adapter is not None:
            tokens.setdefault(adapter.id, []).append(token)
    held = {adapter.id: adapter for adapter in adapters if adapter is not None}
    return [(held[id], torch.tensor(found, device=device)) for id, found in tokens.items()]


def _changeable(model: nn.Module) -> dict[str, nn.Module]:
    """The modules that an adapter may change: linears as their spec calls them, embeddings by their path."""
    linears = {m.spec.name: m for m in model.modules() if isinstance(m, Linear)}
    return {**linears, **{path: m for path, m in model.named_modules() if isinstance(m, Embedding)}}
