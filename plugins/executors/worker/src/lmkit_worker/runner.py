"""The runner: steps of a loaded model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from lmkit.api import (
    GrammarMasks,
    KVConfig,
    LogitsProcessor,
    NewRow,
    NullEvent,
    PoolingParams,
    Proposer,
    RowWork,
    SamplingParams,
    StepInputs,
    StepLimits,
    StepPlan,
    StepResult,
)
from lmkit_layers.adapters import AdapterBank
from lmkit_layers.drafts import DraftProposer

from lmkit_worker.blocks import Blocks
from lmkit_worker.branches import Mover
from lmkit_worker.drafting import Drafting, Source, Texts
from lmkit_worker.heads import Follower, RowHead, TokenHead
from lmkit_worker.inputs import InputBuilder, Step
from lmkit_worker.loaded import LoadedModel
from lmkit_worker.pooling import RowPooler
from lmkit_worker.proposals import Proposals
from lmkit_worker.rows import RowTable
from lmkit_worker.sampling import Sampler
from lmkit_worker.trees import TreeDrafting

if TYPE_CHECKING:
    from lmkit.api import AttentionBackend, Event, Graphs, Platform
    from torch import Tensor

Function = Callable[[StepInputs], "Tensor"]  # hidden states of a step


class Unread:
    """The answer of a step that the device may still be working on."""

    def __init__(self, result: StepResult, done: Event, finish: Callable[[], None], before: Unread | None) -> None:
        """`finish` fills the result once the event has passed. `before` is that of the step before, if unread."""
        self.result, self.before = result, before
        self._done, self._finish = done, finish
        self._error: Exception | None = None
        self.is_read = False

    def is_done(self) -> bool:
        """Whether `read` would not wait."""
        try:
            return self.is_read or self._done.query()
        except Exception:  # reading it raises that
            return True

    def wait(self) -> None:
        """Until the device is done. In any thread: nothing is read by it."""
        self._done.wait()

    def read(self) -> StepResult:
        """Waits for the device. Steps are read in order; raises what reading this one raised."""
        if not self.is_read:
            before, self.before = self.before, None
            if before is not None:
                with suppress(Exception):  # it is raised where that step is read
                    before.read()
            self.is_read = True
            try:
                self._done.wait()
                with torch.inference_mode():
                    self._finish()
            except Exception as e:
                self._error = e
        if self._error is not None:
            raise self._error
        return self.result


def _contents(saved: Sequence[Tensor]) -> list[bytes]:
    """One of each block, from what `Blocks.read` gave."""
    return [block.tobytes() for part in saved for block in part.cpu().numpy()]


@dataclass(slots=True)
class Pending:
    """A step between forward and sample."""

    step: Step | None  # None: the plan has no rows
    hidden: Tensor | None
    saved: list[Tensor]  # content of plan.saves


class Runner:
    """Runs steps of a loaded model: applies plans to rows, builds inputs, calls the model, hands over to its head.

    Knows neither configuration nor loading; Worker makes it once the KV cache is configured.
    """

    def __init__(
        self, loaded: LoadedModel, kv: KVConfig, limits: StepLimits, backends: Sequence[AttentionBackend],
        platform: Platform, device: torch.device, *, eos_token_ids: Sequence[int] = (), max_drafts: int = 0,
        seed: int = 0, processors: Mapping[str, LogitsProcessor] | None = None,
        proposer: Proposer | DraftProposer | None = None, proposer_owner: str = "", debug_kv: bool = False,
    ) -> None:  # fmt: skip
        """`backends`: one per KV group of attention layers. `proposer_owner`: how errors name the proposer's plugin.

        `debug_kv` fills fresh blocks with NaN: reading what nobody wrote shows.
        """
        self.model, self.kv_config, self.debug_kv = loaded.model, kv, debug_kv
        needs = [need for need, _ in loaded.info.kv_groups()]
        self.blocks = Blocks(kv, loaded.info.layers, needs, backends, platform, device)
        max_blocks = [limits.max_blocks_per_row for _ in kv.specs]
        self.rows = RowTable(limits.max_rows, limits.max_length + max_drafts + 1, max_blocks)
        planners = [b.planner(need, limits, platform) for b, need in zip(backends, needs, strict=True)]
        pooler = loaded.info.pooler
        self.graphs = platform.graphs(limits)
        self.inputs = InputBuilder(
            self.rows, limits, kv.specs, planners, self.blocks.kv, platform, self.graphs, pooler is not None,
            self.blocks.state,
        )  # fmt: skip
        self.head: RowHead
        if not loaded.has_head:
            self.head = Follower(self.rows)
        elif pooler is not None:
            self.head = RowPooler(pooler, self.rows, loaded.model, loaded.dense)
        else:
            vocab_size = loaded.info.vocab_size
            sampler = Sampler(limits.max_rows, vocab_size, eos_token_ids, processors, loaded.rows)
            source = (
                self._source(loaded, proposer, platform.graphs(limits), max_drafts) if proposer is not None else None
            )
            if source is not None and proposer_owner:
                source.name = proposer_owner
            proposals = Proposals(source, self.rows, max_drafts, vocab_size) if source is not None else None
            move = Mover(self.rows, self.blocks, needs, backends)
            self.argmax = sampler.rows.argmax
            self.head = TokenHead(sampler, self.rows, self._logits, self._largest, seed, move, proposals)
        self.platform = platform
        self.unread: Unread | None = None  # of the last step, while it is
        self.adapters = AdapterBank(loaded.model, limits.max_rows, device)
        self.plain = loaded.model.forward  # one object, of which graphs are captured
        self._uncaptured: WeakKeyDictionary[Function, list[int]] = WeakKeyDictionary()  # sizes of steps
        self.pooling = PoolingParams(pooler.task) if pooler is not None else None  # of steps that nobody asked for
        self.pending: dict[int, Pending] = {}  # step -> work to sample

    @torch.inference_mode()
    def forward(self, plan: StepPlan) -> None:
        """Applies the diff, then computes hidden states of plan.rows."""
        saved = self.blocks.read(plan.saves)
        self.rows.apply(plan, self._removed, self._added)
        if self.debug_kv:
            self._poison(plan)
        self.blocks.apply(plan)
        if not plan.rows:
            self.pending[plan.step] = Pending(None, None, saved)
            return
        step = self.inputs.build(plan, self.adapters if self.adapters.used else None)
        self.head.prepare(step)
        self.pending[plan.step] = Pending(step, self._hidden(step), saved)

    @torch.inference_mode()
    def sample(self, number: int, masks: GrammarMasks | None = None) -> Unread:
        """What the head makes of step `number`: tokens, which are appended to their rows, or vectors."""
        pending = self.pending.pop(number)
        if pending.step is None or pending.hidden is None:
            return Unread(StepResult(number, [], saved=_contents(pending.saved)), NullEvent(), lambda: None, None)
        before = self.unread if self.unread is not None and not self.unread.is_read else None
        if before is not None and self.head.reads_tokens:
            before.read()
        step, done = pending.step, self.platform.event()
        result = StepResult(number, [[] for _ in step.plan.rows])
        finish, tokens = self.head.start(step, pending.hidden, masks, result)
        done.record()

        def finish_all() -> None:
            finish()
            result.saved = _contents(pending.saved)

        self.unread = Unread(result, done, finish_all, before)
        if done.query():
            self.unread.read()
        elif tokens is not None:
            self.inputs.drawn.put(tokens)
        return self.unread

    def told(self, step: int, tokens: Sequence[Sequence[int]]) -> None:
        """What the rank that has the head drew for the rows of a step."""
        assert isinstance(self.head, Follower), "this rank draws tokens itself"
        self.head.told(step, tokens)

    def warm(self) -> None:
        """Steps of rows that nobody asked for, where the platform wants them: kernels are compiled before the first
        request, not in it. What they write to the cache belongs to nobody."""
        if not self.graphs.sizes or self.pooling is not None:
            return
        limits, greedy = self.inputs.limits, SamplingParams(temperature=0)
        for n in self.graphs.sizes:
            self._try([1] * n, greedy)
        most = min(limits.max_tokens, limits.max_length)
        self._try([most], greedy)
        if most > 1:  # compilers tell even numbers from odd ones
            self._try([most - 1], greedy)
        if most > 1 and limits.max_rows > 1:
            self._try([1, most - 1], greedy)
        for n in self.graphs.sizes[:2]:  # and one from others
            self._try([1] * n, SamplingParams(top_k=10, top_p=0.9, seed=0))

    def work_ahead(self) -> bool:
        """Captures one more size of decode steps, the largest first, whose memory the others share; False: all are.

        No step is under way. The rows of these stand for nothing, so nothing that others hold is read or written.
        """
        if not self.inputs.capturable or self.pooling is not None:
            return False
        functions: list[Function] = [self.plain]
        if self.adapters.used and self.adapters.tables.capturable:
            functions.append(self.adapters.tables)
        for function in functions:
            left = self._uncaptured.get(function)
            if left is None:
                left = self._uncaptured[function] = list(self.graphs.sizes)
            if left:
                self._capture(function, left.pop())
                return True
        return False

    @torch.inference_mode()
    def _capture(self, function: Function, num_rows: int) -> None:
        """Kernels are compiled in the first run, and the second is captured."""
        for _ in range(2):
            self.graphs.run(function, self.inputs.nothing(num_rows, adapters=function is not self.plain))

    def largest(self) -> None:
        """The steps that take most memory: as many rows as there may be, with as many tokens, and all that sampling
        can be asked for; and one prompt as long as a step."""
        limits = self.inputs.limits
        rows = min(limits.max_rows, limits.max_tokens)
        asked = SamplingParams(top_k=10, top_p=0.9, min_p=0.01, seed=0, logprobs=5, frequency_penalty=0.5)
        for lengths in ([limits.max_tokens // rows] * rows, [limits.max_tokens]):
            self._try([min(length, limits.max_length) for length in lengths], asked)

    def _try(self, lengths: Sequence[int], params: SamplingParams) -> None:
        """One step of rows with prompts of these lengths, in a block that is free."""
        blocks = [[1] * -(-max(lengths) // spec.block_size) for spec in self.kv_config.specs]
        new = [
            NewRow(f"warm {i}", 0, [0] * n, n, blocks, 0, params, pooling=self.pooling) for i, n in enumerate(lengths)
        ]
        self.forward(StepPlan(0, new=new, rows=[RowWork(row.id, 0, 0, len(row.tokens), [], True) for row in new]))
        self.sample(0).read()
        self.reset()

    def reset(self) -> None:
        """Forgets all rows and steps in flight, after a step that failed somewhere in the middle."""
        self.pending.clear()
        self.unread = None
        self.adapters.clear()
        self.head.clear()
        self.rows.clear()

    def check(self) -> None:
        """Invariants of the worker; AssertionError naming the broken one."""
        self.rows.check()
        assert self.head.slots == sorted(self.rows.slot_of.values()), "state of the head belongs to exactly the rows"

    # ------------------------------------------------------------------------------------------- details

    def _source(self, loaded: LoadedModel, proposer: Any, graphs: Graphs, max_drafts: int) -> Source:
        if loaded.draft is None:
            return Texts(proposer, self.rows)
        if proposer.children:
            return TreeDrafting(proposer, self.rows, self.inputs)
        return Drafting(proposer, self.rows, self.inputs, graphs, len(loaded.draft.info.layers), max_drafts)

    def _hidden(self, step: Step) -> Tensor:
        hidden = self.graphs.run(self.plain if step.inputs.adapters is None else self.adapters.tables, step.inputs)
        num_read = len(step.logit_slots)  # in a graph all are, but those of rows that stand for nothing
        return hidden[:num_read] if step.inputs.capture and len(hidden) > num_read else hidden

    def _logits(self, hidden: Tensor, slots: Sequence[int]) -> Tensor:
        """The head, on hidden states [S, D], one for each of `slots`."""
        adapters = self.adapters.of(np.array(slots)) if self.adapters.tables.changes_head else None
        if adapters is None:
            return self.graphs.then(self.model.logits, hidden)
        return self.adapters.logits(hidden, self.inputs.push_adapters(adapters))

    def _largest(self, hidden: Tensor, slots: Sequence[int]) -> tuple[Tensor, Tensor]:
        """The token with the largest logit for each of `slots`, and that logit: [S] both."""
        if self.adapters.tables.changes_head:
            return self.argmax(self._logits(hidden, slots))
        return self.graphs.then(self._plain_largest, hidden)

    def _plain_largest(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        return self.argmax(self.model.logits(hidden))

    def _added(self, slot: int, row: NewRow) -> None:
        if row.adapter is not None:
            self.adapters.put(slot, row.adapter)
        self.head.add(slot, row)

    def _removed(self, slot: int) -> None:
        self.adapters.remove(slot)
        self.head.remove(slot)

    def _poison(self, plan: StepPlan) -> None:
        """NaN into blocks that nobody has written: all that a row got beyond what is computed already."""
        fresh = [(row.blocks, row.num_computed) for row in plan.new] + [(blocks, 0) for _, blocks in plan.grown]
        for blocks, computed in fresh:
            for group, ids in enumerate(blocks):
                self.blocks.poison(group, ids[-(-computed // self.kv_config.specs[group].block_size) :])
