"""Constrained output of all requests of an engine: gates while grammars are compiled, masks in every step."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from time import monotonic, sleep, thread_time
from typing import Any, TypeVar

import numpy as np
from lmkit.api import (
    Choice,
    CompiledGrammar,
    ErrorInfo,
    Grammar,
    GrammarError,
    GrammarMasks,
    LmkitError,
    PluginError,
    StepPlan,
    StepResult,
    Vocabulary,
    is_interrupt,
)

from lmkit_structured_output_masks.channel import Channel
from lmkit_structured_output_masks.compiler import Compilation, Compiler, Wanted
from lmkit_structured_output_masks.constraint import Constraint

log = logging.getLogger("lmkit.engine")
T = TypeVar("T")


class GrammarGate:
    """Opens when the grammar is compiled and there is memory for it."""

    name = "grammar"

    def __init__(self, request: Any, compilation: Compilation, output: ConstrainedOutput) -> None:
        self._request, self._compilation, self._output = request, compilation, output

    def ready(self) -> bool:
        return self._output.start(self._request, self._compilation)

    def error(self) -> ErrorInfo | None:
        return self._compilation.error if self._compilation.done else None


class ConstrainedOutput:
    """Implements StructuredOutput."""

    def __init__(self, compiler: Compiler, max_rows: int = 0) -> None:
        """`max_rows`: rows of logits that a step may make; 0: no tokens are proposed."""
        self._compiler, self._max_rows = compiler, max_rows
        self._waiting: dict[str, Compilation] = {}  # by request
        self._used: dict[str, Compilation] = {}
        self._live: dict[str, Constraint] = {}
        self.broken: Sequence[tuple[str, ErrorInfo]] = ()

    def gate(self, request: Any) -> GrammarGate:
        params = request.params
        thinking = params.thinking and replace(params.thinking, inside=False, budget=None)
        wanted = Wanted(params.grammar, thinking, params.stop_token_ids)
        compilation = self._waiting[request.id] = self._compiler.submit(wanted)
        return GrammarGate(request, compilation, self)

    def start(self, request: Any, found: Compilation) -> bool:
        """Whether the request may start; then its constraint is followed."""
        if not found.done or found.error is not None or not self._has_room(found):
            return False
        self._waiting.pop(request.id, None)
        self._used[request.id] = found
        channel = None
        if found.markers is not None and request.params.thinking is not None:
            channel = Channel(found.markers, request.params.thinking)
        try:
            matcher = found.compiled.matcher() if found.compiled is not None else None
        except BaseException as error:
            if is_interrupt(error):
                raise
            self._compiler.spoil(found, self._typed(request.id, error).info())
            return False
        self._live[request.id] = Constraint(request, matcher, channel, found.ends, found.size)
        return True

    def _has_room(self, found: Compilation) -> bool:
        used = {id(c): c.nbytes for c in self._used.values()}
        return not used or id(found) in used or sum(used.values()) + found.nbytes <= self._compiler.limits.live_bytes

    def release(self, ids: Iterable[str]) -> None:
        """Requests that have ended, wherever they were."""
        for id in ids:
            if (waited := self._waiting.pop(id, None)) is not None:
                self._compiler.withdraw(waited)
            self._live.pop(id, None)
            used = self._used.pop(id, None)
            if used is not None and used.num_masks > self._compiler.limits.max_masks:
                self._compiler.forget(used)

    def concerns(self, plan: StepPlan) -> bool:
        return bool(self._live) and any(row.id in self._live for row in plan.rows)

    def fill(self, plan: StepPlan) -> GrammarMasks | None:
        if not self._live:
            return None
        rows: list[int] = []
        masks: list[np.ndarray] = []
        for i, work in enumerate(plan.rows):
            constraint = self._live.get(work.id)
            if constraint is None or not work.sample:
                continue
            began = thread_time()
            found = self._try(work.id, partial(constraint.masks, work.drafts, work.parents))
            if found is None or self._is_slow(work.id, len(found), thread_time() - began):
                continue
            if any(mask is not None for mask in found):
                rows += [i] * len(found)
                masks += [constraint.anything if mask is None else mask for mask in found]
        return GrammarMasks(rows, np.concatenate(masks).tobytes()) if rows else None

    def _is_slow(self, id: str, num_masks: int, seconds: float) -> bool:
        """All rows have waited for these masks: a request whose masks are too slow ends, and its grammar is refused."""
        used, limit = self._used[id], 2 * self._compiler.limits.mask_seconds
        used.num_masks += num_masks
        if seconds <= limit * num_masks:
            return False
        error = GrammarError(f"a step of the grammar takes more than {limit:g} s", fix="make it simpler")
        self._compiler.spoil(used, error.info())
        self._break(id, error)
        return True

    def propose(self, plan: StepPlan, result: StepResult) -> None:
        """Tokens that must follow become drafts: they are computed in one step, and verified like any others.

        Only while logits are left over: in a full step a row more costs as much as it saves.
        """
        room = self._max_rows - len(plan.rows)
        if room <= 0 or not self._live:
            return
        for i, (work, tokens) in enumerate(zip(plan.rows, result.tokens, strict=True)):
            constraint = self._live.get(work.id)
            if constraint is None or not tokens or constraint.request.epoch != work.epoch:
                continue
            forced = self._try(work.id, partial(constraint.forced, tokens))
            if forced and room > 0:
                result.drafts = result.drafts or [[] for _ in plan.rows]
                result.drafts[i] = forced[:room]
                if result.parents:
                    result.parents[i] = []
                room -= len(result.drafts[i])

    def _try(self, id: str, work: Callable[[], T]) -> T | None:
        """None when it fails, and then the request is broken."""
        try:
            return work()
        except BaseException as error:  # of a plugin, for this text: the other requests are not concerned
            if is_interrupt(error):
                raise
            self._break(id, self._typed(id, error))
            return None

    def _typed(self, id: str, error: BaseException) -> LmkitError:
        """The typed error for whatever a grammar backend raised; a native library may raise more than Exceptions."""
        if isinstance(error, GrammarError):
            return error
        log.error("request %s: the grammar backend failed", id, exc_info=error)
        found = self._compiler.blame(error)
        if isinstance(found, LmkitError):
            return found
        return PluginError(f"the grammar backend failed ({type(error).__name__})", fix="the engine's log has the cause")

    def _break(self, id: str, error: LmkitError) -> None:
        self.broken = [*self.broken, (id, error.info())]
        del self._live[id]

    def compile(self, grammar: Grammar, seconds: float) -> CompiledGrammar:
        """Waits for it. Raises GrammarError."""
        found = self._compiler.submit(Wanted(grammar, None, ()))
        end = monotonic() + seconds
        while not found.done:
            if monotonic() > end:
                raise GrammarError(f"it was not compiled in {seconds:g} s", fix="make it simpler")
            sleep(0.002)
        if found.compiled is None:
            raise GrammarError(found.error.message if found.error else "nothing was compiled")
        return found.compiled

    def close(self) -> None:
        """Idempotent."""
        self._compiler.close()


def constrained_output(
    backends: Sequence[Choice], open_vocabulary: Callable[[], Vocabulary], max_rows: int = 0
) -> ConstrainedOutput:
    """The plugin's target. `backends`: best first. Nothing is loaded before the first constraint comes."""
    return ConstrainedOutput(Compiler(backends, open_vocabulary), max_rows)
