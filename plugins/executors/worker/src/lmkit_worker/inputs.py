"""StepInputs and AttnBatch of one step, built from plan.rows with numpy: no Python per token."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from lmkit.api import AttnBatch, EngineError, KVSpec, StateBatch, StepInputs, StepLimits, StepPlan
from lmkit_layers.adapters import NONE

from lmkit_worker import branches
from lmkit_worker.buffers import ArrayBuffer, SteadyBuffer
from lmkit_worker.rows import UNREAD, RowTable
from lmkit_worker.tables import StepTable

if TYPE_CHECKING:
    from lmkit.api import AttnPlanner, Buffer, Graphs, Platform
    from lmkit_layers.adapters import AdapterBank


class DrawnTokens:
    """The token drawn last of each slot, where the device has it: a step begins before the host has read them.

    One table: the tokens of the step that the host knows, then those drawn by slot.
    """

    def __init__(self, max_tokens: int, max_rows: int, buffer: Callable[[int], Buffer]) -> None:
        self.table = ArrayBuffer(buffer(max_tokens + max_rows))
        self.source, self.targets = (ArrayBuffer(SteadyBuffer(buffer(n))) for n in (max_tokens, max_rows))
        self.known = max_tokens
        self.ids = self.table.array[:max_tokens]  # of a step, as far as the host knows them
        self._expected = self.targets.push(0)

    def push(self, num_tokens: int, token_slots: np.ndarray) -> torch.Tensor:
        """The token ids of a step on the device, with UNREAD ones from the table. `token_slots` [T <= num_tokens]."""
        ids = self.table.push(num_tokens)
        n = len(token_slots)
        unread = self.ids[:n] == UNREAD
        if unread.any():
            self.source.array[:n] = np.where(unread, self.known + token_slots, np.arange(n))
            ids[:n].copy_(self.table.buffer.device.index_select(0, self.source.push(n)))
        return ids

    def expect(self, slots: np.ndarray) -> None:
        """Says whose tokens `put` will get: `slots` [S]."""
        self.targets.array[: len(slots)] = slots + self.known
        self._expected = self.targets.push(len(slots))

    def put(self, tokens: torch.Tensor) -> None:
        """Tokens drawn [S], before the next step is built."""
        self.table.buffer.device.index_copy_(0, self._expected, tokens)


@dataclass(slots=True)
class PromptJob:
    """Prompt log-probabilities wanted of one row of a step."""

    row: int  # index into plan.rows
    hidden_start: int  # first row of the hidden states
    start: int  # prompt position of the first hidden row; it predicts position start + 1
    targets: np.ndarray  # [N] int64, the prompt tokens predicted


class Layout(NamedTuple):
    """Where the tokens of a step stand. A decode step, of rows that compute one token each and sample, has the
    simplest: a token for each row."""

    token_slots: np.ndarray  # [T] slot of each token's row
    positions: np.ndarray  # [T]
    query_start: np.ndarray  # [R + 1] first token of each row
    num_decode_rows: int  # as in AttnBatch, like the next
    max_query: int
    sample_rows: np.ndarray  # [R'] as in Step, like the next three
    last: np.ndarray  # [S] token from which each logits row comes
    logit_slots: np.ndarray  # [S]
    next_positions: np.ndarray  # [S]
    num_drafts: np.ndarray | None  # [R']
    places: np.ndarray | None = None  # [T] where in its row each token's keys stand; None: at its position
    tree: np.ndarray | None = None  # [T] int64, as in AttnBatch; with places


@dataclass(slots=True)
class Step:
    """One step on its way through the worker: set by InputBuilder.build, read by Worker.sample."""

    plan: StepPlan
    inputs: StepInputs
    slots: np.ndarray  # [R] slot of each row of the plan
    sample_rows: np.ndarray  # [R'] rows of the plan that sample, in order
    logit_slots: np.ndarray  # [S] slot of each logits row; a row with k drafts has k + 1, consecutive
    positions: np.ndarray  # [S] position of the token to be drawn
    num_drafts: np.ndarray | None  # [R'] drafts of each sampling row; None: no row has drafts
    layout: Layout
    prompt_jobs: list[PromptJob] = field(default_factory=list)
    kept: dict[int, list[int]] = field(default_factory=dict)  # row of the plan -> its accepted drafts of a tree


class InputBuilder:
    """Buffers are allocated once from StepLimits and filled again in each step.

    Rows of the batch are in plan order. `num_decode_rows` counts the leading rows that compute one token (or one and
    its drafts): a scheduler that puts decodes before prefill chunks, as lmkit's does, gives backends one decode batch
    and one prefill batch.
    """

    def __init__(
        self, rows: RowTable, limits: StepLimits, specs: Sequence[KVSpec], planners: Sequence[AttnPlanner],
        kv: Sequence[torch.Tensor], platform: Platform, graphs: Graphs, pairs: bool = False,
        state: Sequence[Mapping[str, torch.Tensor]] = (),
    ) -> None:  # fmt: skip
        """`pairs`: rows may hold two texts, which the model tells apart by token types.

        `specs`: those of attention layers, one per planner, then that of recurrent state `state` if there is any.
        """
        self.rows, self.limits, self.specs, self.planners, self.kv = rows, limits, specs, planners, kv
        self.state, self.graphs = state, graphs
        tokens, max_rows = limits.max_tokens, limits.max_rows

        def buffer(shape: tuple[int, ...], dtype: torch.dtype) -> ArrayBuffer:
            return ArrayBuffer(platform.buffer(shape, dtype))

        def steady(shape: tuple[int, ...], dtype: torch.dtype) -> ArrayBuffer:
            return ArrayBuffer(SteadyBuffer(platform.buffer(shape, dtype)))

        self.buffer = buffer
        self.drawn = DrawnTokens(tokens, max_rows, lambda n: platform.buffer((n,), torch.int64))
        self.positions = buffer((tokens,), torch.int64)
        self.logits_rows = steady((tokens,), torch.int64)
        self.adapters = buffer((tokens,), torch.int64)
        self.token_types = buffer((tokens,), torch.int64) if pairs else None
        self.tree = buffer((tokens,), torch.int64)
        self.query_start = steady((max_rows + 1,), torch.int32)
        self.seq_len = buffer((max_rows,), torch.int32)
        self.tables = [StepTable(rows, group, platform) for group in range(len(planners))]
        self.slots = [buffer((tokens,), torch.int64) for _ in planners]
        self.state_slots = buffer((max_rows,), torch.int64)
        self.arange = np.arange(max(tokens, max_rows) + 1)
        self.capturable = all(planner.capture != "none" for planner in planners)
        self.captures_drafts = all(planner.capture == "any" for planner in planners)
        self.batches = [
            AttnBatch(
                query_start=self.query_start.buffer, seq_len=self.seq_len.buffer, table=table,
                slots=slots.buffer, num_rows=0, num_tokens=0, max_query=0, max_seq=0, num_decode_rows=0,
            )
            for table, slots in zip(self.tables, self.slots, strict=True)
        ]  # fmt: skip

    def build(self, plan: StepPlan, adapters: AdapterBank | None = None) -> Step:
        """The step of `plan`, whose diff has been applied to the rows already. Plans attention for each KV group."""
        rows, slot_of = self.rows, self.rows.slot_of
        work = np.array(
            [(slot_of[w.id], w.epoch, w.start, w.num_tokens, w.sample, len(w.drafts)) for w in plan.rows], np.int64
        )
        slots, epochs, starts, lengths, samples, drafts = work.T
        num_drafts = drafts if drafts.any() else None
        self._check(plan, slots, epochs, starts, lengths, samples, drafts)
        if num_drafts is not None:
            for w in plan.rows:
                if w.drafts:
                    rows.put_drafts(slot_of[w.id], w.drafts)

        n, ends, num_tokens = len(slots), starts + lengths, int(lengths.sum())
        decode_only = num_tokens == n and bool(samples.all())
        if decode_only:
            each = self.arange[:n]
            layout = Layout(slots, starts, self.arange[: n + 1], n, 1, each, each, slots, ends, None)
        else:
            layout = self._layout(slots, starts, lengths, np.flatnonzero(samples), num_drafts)
            if any(parents := [work.parents for work in plan.rows]):
                places = layout.positions
                positions, tree = branches.branched(places, layout.query_start, parents)
                layout = layout._replace(
                    positions=positions, places=places, tree=tree, next_positions=positions[layout.last] + 1
                )
        held = None if adapters is None else adapters.of(slots)
        capture = self.capturable if decode_only else self.captures_drafts and len(layout.last) == num_tokens
        capture = capture and (held is None or adapters is None or adapters.tables.capturable)
        places = layout.positions if layout.places is None else layout.places
        self.drawn.ids[:num_tokens] = rows.tokens[layout.token_slots, places]
        captured = None if not capture else self.graphs.num_rows(n) if num_tokens == n else n
        inputs = self._inputs(slots, layout, ends, captured)
        if held is not None and adapters is not None:
            found = adapters.of_slot[layout.token_slots]
            padding = len(inputs.token_ids) - num_tokens
            inputs.adapters = self.push_adapters(np.append(found, [NONE] * padding) if padding else found)
        if self.token_types is not None and (second := rows.second[layout.token_slots]).any():
            self.token_types.array[:num_tokens] = (second > 0) & (layout.positions >= second)
            inputs.token_types = self.token_types.push(num_tokens)
        if num_drafts is None:
            self.drawn.expect(layout.logit_slots)
        return Step(
            plan, inputs, slots, layout.sample_rows, layout.logit_slots, layout.next_positions, layout.num_drafts,
            layout,
        )  # fmt: skip

    def spans(
        self, slots: np.ndarray, starts: np.ndarray, lengths: np.ndarray, positions: np.ndarray | None = None,
        tree: np.ndarray | None = None,
    ) -> tuple[StepInputs, Layout]:  # fmt: skip
        """`lengths` [R] tokens from `starts` on for each of `slots` [R], of which only the device knows: `token_ids`
        are the caller's to fill. The step before is over.

        With `positions` and `tree` [T] these are places, of nodes of a tree.
        """
        layout = self._layout(slots, starts, lengths, self.arange[:0], None)
        if positions is not None:
            layout = layout._replace(positions=positions, places=layout.positions, tree=tree)
        return self._inputs(slots, layout, starts + lengths, None), layout

    def nothing(self, num_rows: int, adapters: bool) -> StepInputs:
        """A decode step of rows that stand for nothing, as it may be captured; with `adapters`, which no row has. No
        step is under way."""
        none = self.arange[:0]
        layout = Layout(none, none, self.arange[:1], 0, 1, none, none, none, none, None)
        inputs = self._inputs(none, layout, none, num_rows)
        if adapters:
            inputs.adapters = self.push_adapters(np.full(num_rows, NONE))
        return inputs

    def _inputs(self, slots: np.ndarray, layout: Layout, ends: np.ndarray, captured: int | None) -> StepInputs:
        """What a model reads, of token ids that stand in their buffer. Plans attention for each KV group.

        `captured`: it may run as a graph of so many rows; those beyond its own, of one token each, stand for nothing.
        """
        n, num_tokens, max_seq = len(slots), len(layout.positions), int(ends.max(initial=1))
        padding = captured - n if captured is not None else 0
        self.positions.array[:num_tokens] = layout.positions
        self.query_start.array[: n + 1] = layout.query_start
        self.seq_len.array[:n] = ends
        if layout.tree is not None:
            self.tree.array[:num_tokens] = layout.tree
            self.tree.array[num_tokens : num_tokens + padding] = branches.ALL
        for group, batch in enumerate(self.batches):
            self._fill_group(group, self.specs[group].block_size, slots, layout)
            batch.num_rows, batch.num_decode_rows = n + padding, layout.num_decode_rows + padding
            batch.num_tokens, batch.max_query, batch.max_seq = num_tokens + padding, layout.max_query, max_seq
            batch.tree = self.tree.buffer if layout.tree is not None else None
        if padding:
            self._pad(n, n + padding)
            num_tokens += padding

        num_logits = len(layout.last)
        self.logits_rows.array[:num_logits] = layout.last
        return StepInputs(
            token_ids=self.drawn.push(num_tokens, layout.token_slots),
            positions=self.positions.push(num_tokens),
            attn=[planner.plan(batch) for planner, batch in zip(self.planners, self.batches, strict=True)],
            kv=self.kv,
            logits_rows=self.logits_rows.push(num_logits),
            only_logits=num_logits < num_tokens - padding,
            capture=captured is not None,
            state=self._state_batch(slots, layout, padding) if self.state else None,
        )

    def push_adapters(self, adapters: np.ndarray) -> torch.Tensor:
        """Numbers of adapters [N] on the device, as long as no others are pushed."""
        self.adapters.array[: len(adapters)] = adapters
        return self.adapters.push(len(adapters))

    def _layout(
        self, slots: np.ndarray, starts: np.ndarray, lengths: np.ndarray, sample_rows: np.ndarray,
        drafts: np.ndarray | None,
    ) -> Layout:  # fmt: skip
        """The layout of rows with any number of tokens; `drafts` [R] of each, None where none has any."""
        n, single = len(slots), (lengths if drafts is None else lengths - drafts) == 1
        decodes, max_query = n if single.all() else int(single.argmin()), int(lengths.max())
        query_start = np.zeros(n + 1, np.int64)
        np.cumsum(lengths, out=query_start[1:])
        row_of = np.repeat(self.arange[:n], lengths)
        positions = self.arange[: len(row_of)] + (starts - query_start[:-1])[row_of]
        last, next_positions = query_start[1:][sample_rows] - 1, (starts + lengths)[sample_rows]
        logit_slots, num_drafts = slots[sample_rows], None
        if drafts is not None:
            num_drafts = drafts[sample_rows]
            back = _countdown(num_drafts)  # k, k-1, .., 0 for each sampling row
            last = np.repeat(last, num_drafts + 1) - back
            next_positions = np.repeat(next_positions, num_drafts + 1) - back
            logit_slots = np.repeat(logit_slots, num_drafts + 1)
        return Layout(
            slots[row_of], positions, query_start, decodes, max_query, sample_rows, last, logit_slots, next_positions,
            num_drafts,
        )  # fmt: skip

    def _fill_group(self, group: int, size: int, slots: np.ndarray, layout: Layout) -> None:
        """Where the step's keys and values go, and the blocks that its rows read."""
        table = self.rows.table[group]
        blocks, offsets = np.divmod(layout.positions if layout.places is None else layout.places, size)
        self.slots[group].array[: len(blocks)] = table[layout.token_slots, blocks] * np.int64(size) + offsets
        self.tables[group].fill(slots)

    def _pad(self, n: int, end: int) -> None:
        """Rows [n, end) of a decode step, which stand for nothing: they have no length and write nowhere."""
        self.drawn.ids[n:end] = self.positions.array[n:end] = self.seq_len.array[n:end] = 0
        self.query_start.array[n : end + 1] = self.arange[n : end + 1]
        for table, slots in zip(self.tables, self.slots, strict=True):
            table.pad(n, end)
            slots.array[n:end] = -1

    def _state_batch(self, slots: np.ndarray, layout: Layout, padding: int) -> StateBatch:
        """Rows that stand for nothing have the state of the null block, which nobody reads."""
        held, n, decodes = self.rows.table[-1][slots, 0], len(slots) + padding, layout.num_decode_rows
        self.state_slots.array[: len(slots)] = held
        self.state_slots.array[len(slots) : n] = 0
        starts = layout.query_start[decodes:].tolist()
        return StateBatch(
            tensors=self.state,
            slots=self.state_slots.push(n),
            query_start=self.query_start.push(n + 1),
            num_decode_rows=decodes + padding,
            prompts=list(zip(held[decodes:].tolist(), starts[:-1], starts[1:], strict=True)),
        )

    def _check(
        self, plan: StepPlan, slots: np.ndarray, epochs: np.ndarray, starts: np.ndarray, lengths: np.ndarray,
        samples: np.ndarray, drafts: np.ndarray,
    ) -> None:  # fmt: skip
        """The plan agrees with the rows it is computed on; a wrong plan must not write another row's blocks."""
        rows, ends = self.rows, starts + lengths
        known = ends - drafts
        ok = (
            (rows.epoch[slots] == epochs) & (lengths >= 1) & (known >= 1)
            & np.where(samples == 1, known == rows.num_tokens[slots], (known <= rows.num_tokens[slots]) & (drafts == 0))
        )  # fmt: skip
        for group, spec in enumerate(self.specs):
            ok &= ends <= rows.num_blocks[group, slots] * spec.block_size
        if not ok.all():
            bad = plan.rows[int(ok.argmin())]
            slot = rows.slot_of[bad.id]
            raise EngineError(
                f"step {plan.step}: {bad} does not fit its row (epoch {rows.epoch[slot]}, "
                f"{rows.num_tokens[slot]} tokens, blocks per group {rows.num_blocks[:, slot].tolist()})"
            )


def _countdown(counts: np.ndarray) -> np.ndarray:
    """[2, 0] -> [2, 1, 0, 0]."""
    ends = np.cumsum(counts + 1)
    return np.repeat(ends, counts + 1) - 1 - np.arange(ends[-1] if len(ends) else 0)
