"""The hash-model: an executor without torch whose text proves that paging is right.

Two layers, each with its paged store. Layer 0 stores token and position; layer 1 stores a checksum of what it *reads*
in layer 0, here and one position before; the next token is a checksum of all that may be read in layer 1. Any fault in
tables, slots, prefix reuse, preemption, draft roll-back, windows or the diff protocol therefore changes the text, which
`expected_tokens` predicts.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from zlib import crc32

from lmkit.api import (
    CheckpointError,
    Control,
    Failure,
    ForgetRows,
    GrammarMasks,
    KVConfig,
    KVSpec,
    Reply,
    ResetCache,
    RowLogprobs,
    RowWork,
    SamplingParams,
    SchedLimits,
    Sleep,
    StageWeights,
    StepPlan,
    StepResult,
    TokenLogprob,
    UseWeights,
    Wake,
    WorkerFacts,
)
from lmkit.checkpoint import stamp_of

EMPTY = -1  # content of a slot that was never written
NAN = -2  # content written by a faulty row: whoever reads it is faulty too
NUM_RANKS = 5  # ranks that made-up logprobs take
RECURRENT = 0  # among windows: a group of recurrent state
STATE_SIZE = 1 << 20  # tokens after which a state would be full


def hash_kv(
    num_blocks: int | Sequence[int] = 64, block_size: int = 4, windows: Sequence[int | None] = (None,)
) -> KVConfig:
    """A KVConfig of one group per entry of `windows`: None = full attention, RECURRENT = one state per row.

    `num_blocks` includes the null block.
    """
    counts = [num_blocks] * len(windows) if isinstance(num_blocks, int) else list(num_blocks)
    specs = tuple(
        KVSpec(
            kind="full" if window is None else "window" if window else "recurrent",
            layers=(i,),
            block_size=STATE_SIZE if window == RECURRENT else block_size,
            num_kv_heads=1,
            head_dim=1,
            dtype="float32",
            bytes_per_block=16 * block_size,
            window=window or None,
        )
        for i, window in enumerate(windows)
    )
    return KVConfig(specs, tuple(counts))


def _low(token: int, position: int, tint: int) -> int:
    """Entry of layer 0; `tint` stands for the adapter's weights."""
    return tint | token << 32 | position


def _tint(adapter: str | None, weights: int) -> int:
    return 0 if adapter is None and not weights else (1 + crc32((adapter or "").encode(), weights) % 0x3FFF) << 49


def _high(before: int, here: int) -> int:
    """Entry of layer 1, from those of layer 0; in a recurrent group the state, from that before and the entry."""
    return crc32(array("q", (before, here)).tobytes())


@dataclass(frozen=True)
class HashModel:
    """The function that is computed: from entries read to the next token."""

    vocab_size: int = 97
    windows: tuple[int | None, ...] = (None,)
    eos_token_ids: tuple[int, ...] = ()
    masks_stops: bool = True  # until min_tokens, as workers do; without it the scheduler has to ignore stops
    weights: int = 0  # stands for all of them

    def draw(self, seen: Sequence[Sequence[int]], params: SamplingParams, num_output: int) -> int:
        """The token after what was `seen` per group. Seeds matter when temperature > 0; min_tokens masks stops."""
        state = 0 if params.greedy else params.seed or 0
        for entries in seen:
            state = crc32(array("q", entries).tobytes(), state & 0xFFFFFFFF)
        token = state % self.vocab_size
        if self.masks_stops and num_output < params.min_tokens:
            banned = {*params.stop_token_ids, *(() if params.ignore_eos else self.eos_token_ids)}
            while token in banned and len(banned) < self.vocab_size:
                token = (token + 1) % self.vocab_size
        return token

    def logprob(self, token: int, position: int, num_top: int) -> TokenLogprob:
        """Deterministic numbers in the shape of a logprob: a function of token and position."""
        rank = 1 + (token + position) % NUM_RANKS
        top = [((token + i) % self.vocab_size, -0.5 * (i + 1)) for i in range(num_top)]
        return TokenLogprob(token, -float(rank), rank, top)


def expected_tokens(
    model: HashModel, prompt: Sequence[int], params: SamplingParams, adapter: str | None = None
) -> list[int]:
    """What the model says after `prompt`: computed without blocks, batches or caches."""
    tokens, tint = list(prompt), _tint(adapter, model.weights)
    entries: list[list[int]] = [[] for _ in model.windows]
    while True:
        for mine, window in zip(entries, model.windows, strict=True):
            for position in range(len(mine), len(tokens)):
                before = _low(tokens[position - 1], position - 1, tint) if position and window != 1 else EMPTY
                if window == RECURRENT:
                    before = mine[-1] if mine else EMPTY
                mine.append(_high(before, _low(tokens[position], position, tint)))
        reach = [1 if window == RECURRENT else window or 0 for window in model.windows]
        seen = [mine[-n:] for mine, n in zip(entries, reach, strict=True)]
        num_output = len(tokens) - len(prompt)
        token = model.draw(seen, params, num_output)
        tokens.append(token)
        stops = params.stop_token_ids if params.ignore_eos else (*params.stop_token_ids, *model.eos_token_ids)
        if num_output + 1 >= (params.max_tokens or 1) or (token in stops and num_output >= params.min_tokens):
            return tokens[len(prompt) :]


@dataclass(slots=True)
class _Row:
    """What the worker knows of a request: only what diffs told it, and what it sampled itself."""

    epoch: int
    tokens: list[int]
    num_prompt_tokens: int
    params: SamplingParams
    blocks: list[list[int]]
    tint: int


class HashExecutor:
    """Implements Executor. Applies diffs in order and asserts what a real worker relies on.

    propose(tokens, k) -> drafts    a proposer, for plans with drafts
    accept(drawn, drafts) -> tokens what becomes of the tokens drawn after each draft, and before the first
    fault(row) -> reason | None     fails single rows; what they wrote then makes its readers fail too
    fail(plan) -> None              may raise, as a device would
    """

    def __init__(
        self,
        kv: KVConfig | None = None,
        *,
        depth: int = 1,
        vocab_size: int = 97,
        eos_token_ids: Collection[int] = (),
        masks_stops: bool = True,
        num_drafts: int = 0,
        propose: Callable[[list[int], int], list[int]] | None = None,
        accept: Callable[[Sequence[int], Sequence[int]], list[int]] | None = None,
        fault: Callable[[RowWork], str | None] | None = None,
        fail: Callable[[StepPlan], None] | None = None,
        delay: float = 0.0,
    ) -> None:
        """`delay`: seconds each step takes."""
        self.depth = depth
        self.vocab_size = vocab_size
        self.eos_token_ids = tuple(eos_token_ids)
        self.masks_stops = masks_stops
        self.num_drafts = num_drafts
        self.propose = propose
        self.accept = accept or right_ones
        self.fault = fault
        self.fail = fail
        self.delay = delay
        self.rows: dict[str, _Row] = {}
        self.num_steps = 0
        self.max_rows_seen = 0
        self.closed = self.asleep = False
        self._staged: int | None = None
        self._plans: dict[int, StepPlan] = {}  # between forward and sample
        self._saved: dict[int, list[bytes]] = {}  # the same: content of plan.saves
        self._callbacks: list[Callable[[Failure], None]] = []
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="hash-model") if delay else None
        if kv is not None:
            self.configure_kv(kv)

    # ------------------------------------------------------------------------------------------- Executor protocol

    def start(self) -> WorkerFacts:
        specs = hash_kv(block_size=16).specs
        return WorkerFacts(free_kv_bytes=1 << 20, weight_bytes=0, activation_bytes=0, kv_specs=specs)

    def configure_kv(self, kv: KVConfig, limits: SchedLimits | None = None) -> None:
        self.kv = kv
        self.block_size = min(spec.block_size for spec in kv.specs)
        windows = tuple(RECURRENT if spec.recurrent else spec.window for spec in kv.specs)
        self.model = HashModel(self.vocab_size, windows, self.eos_token_ids, self.masks_stops)
        self._clear()

    def forward(self, plan: StepPlan) -> None:
        assert not self.closed, "forward after close"
        assert not self.asleep, "forward while asleep"
        if self.fail is not None:
            self.fail(plan)
        self._apply(plan)
        self._write(plan)
        self._plans[plan.step] = plan
        self.num_steps += 1

    def sample(self, step: int, masks: GrammarMasks | None) -> Future[StepResult]:
        result = self._read(self._plans.pop(step), _allowed(masks))
        if self._thread is not None:
            return self._thread.submit(self._later, result)
        future: Future[StepResult] = Future()
        future.set_result(result)
        return future

    def control(self, command: Control) -> list[Reply]:
        if isinstance(command, ResetCache):
            self._clear()
            return [Reply(True)]
        if isinstance(command, ForgetRows):
            self.rows.clear()
            self._plans.clear()
            return [Reply(True)]
        match command:
            case StageWeights(path, stamp):
                self._staged = None if stamp != stamp_of(Path(path)) else crc32(Path(path).read_bytes())
                return [Reply(self._staged is not None, f"{path} has changed")]
            case UseWeights(True):
                assert self._staged is not None, "no weights were staged"
                self.model, self._staged = replace(self.model, weights=self._staged), None
            case UseWeights(False):
                self._staged = None
                return [Reply(True)]
            case Sleep():
                assert not self.asleep
                self.asleep = True
            case Wake():
                assert self.asleep
                self.asleep = False
        if isinstance(command, UseWeights | Sleep | Wake):
            assert not self._plans, "a step is in flight"
            self._clear()
            return [Reply(True)]
        return [Reply(False, f"the hash-model does not know {type(command).__name__}")]

    def inspect_adapter(self, path: str) -> str:
        raise CheckpointError("the hash-model has no adapters")

    def on_failure(self, callback: Callable[[Failure], None]) -> None:
        self._callbacks.append(callback)

    def close(self) -> None:
        self.closed = True
        if self._thread is not None:
            self._thread.shutdown(wait=False)

    def die(self, message: str = "killed") -> None:
        """Report the failure of rank 0, as a monitor would."""
        for callback in self._callbacks:
            callback(Failure(0, message))

    # ---------------------------------------------------------------------------------------------------- the worker

    def _clear(self) -> None:
        self.rows.clear()
        self._plans.clear()
        counts = [n * self._entries(group) for group, n in enumerate(self.kv.num_blocks)]
        self.low = [[EMPTY] * n for n in counts]
        self.high = [[EMPTY] * n for n in counts]

    def _entries(self, group: int) -> int:
        """The entries of one block: a state is one entry."""
        return 1 if self.model.windows[group] == RECURRENT else self.block_size

    def _later(self, result: StepResult) -> StepResult:
        time.sleep(self.delay)
        return result

    def _apply(self, plan: StepPlan) -> None:
        """saves, gone, new, grown, loads, copies, zero: in this order."""
        self._saved[plan.step] = [self._content(group, block) for group, block in plan.saves]
        for rid in plan.gone:
            assert rid in self.rows, f"forget {rid}: not here"
            del self.rows[rid]
        for new in plan.new:
            assert new.id not in self.rows, f"new row {new.id}: still here"
            self.rows[new.id] = _Row(
                new.epoch,
                list(new.tokens),
                new.num_prompt_tokens,
                new.params,
                [list(b) for b in new.blocks],
                _tint(new.adapter, self.model.weights),
            )
        for rid, blocks in plan.grown:
            for mine, more in zip(self.rows[rid].blocks, blocks, strict=True):
                mine.extend(more)
        for group, block, content in plan.loads:
            assert len(content) == self.kv.specs[group].bytes_per_block, "content of another length"
            size = self._entries(group)
            entries = array("q", content)
            self.low[group][block * size : (block + 1) * size] = list(entries[:size])
            self.high[group][block * size : (block + 1) * size] = list(entries[size:])
        for group, source, target in plan.copies:
            size = self._entries(group)
            for side in (self.low[group], self.high[group]):
                side[target * size : (target + 1) * size] = side[source * size : (source + 1) * size]
        for group, block in plan.zero:
            size = self._entries(group)
            self.high[group][block * size : (block + 1) * size] = [EMPTY] * size
        self.max_rows_seen = max(self.max_rows_seen, len(self.rows))

    def _content(self, group: int, block: int) -> bytes:
        """A block as a connector gets it: its entries of both layers."""
        part = slice(block * self._entries(group), (block + 1) * self._entries(group))
        return array("q", self.low[group][part] + self.high[group][part]).tobytes()

    def _slot(self, row: _Row, group: int, position: int) -> int:
        block = row.blocks[group][position // self.kv.specs[group].block_size]
        assert block != 0, f"group {group}, position {position}: null block"
        size = self._entries(group)
        return block * size + position % size

    def _positions(self, group: int, work: RowWork) -> range:
        """Those whose slots are written: in a recurrent group all are in one."""
        last = work.start + work.num_tokens
        return range(last - 1 if self.model.windows[group] == RECURRENT else work.start, last)

    def _write(self, plan: StepPlan) -> None:
        """Both layers, each for all rows before the next: what makes hits within a step legal."""
        written: list[set[int]] = [set() for _ in self.low]
        for work in plan.rows:
            row = self.rows[work.id]
            assert work.epoch == row.epoch, f"row {work.id} has epoch {row.epoch}, work has {work.epoch}"
            tokens = row.tokens + work.drafts if work.drafts else row.tokens
            assert work.num_tokens >= 1, "a row without work"
            assert work.start + work.num_tokens <= len(tokens), f"row {work.id}: positions without tokens"
            for g, low in enumerate(self.low):
                for position in self._positions(g, work):
                    slot = self._slot(row, g, position)
                    assert slot not in written[g], f"slot {slot} of group {g} is written twice"
                    written[g].add(slot)
                    low[slot] = _low(tokens[position], position, row.tint)
        for work in plan.rows:
            row = self.rows[work.id]
            for g, (low, high, window) in enumerate(zip(self.low, self.high, self.model.windows, strict=True)):
                if window == RECURRENT:
                    slot = self._slot(row, g, work.start)
                    for position in range(work.start, work.start + work.num_tokens):
                        high[slot] = _high(high[slot], _low(row.tokens[position], position, row.tint))
                    continue
                before = low[self._slot(row, g, work.start - 1)] if work.start and window != 1 else EMPTY
                for position in range(work.start, work.start + work.num_tokens):
                    slot = self._slot(row, g, position)
                    high[slot] = _high(before, low[slot])
                    before = low[slot] if window != 1 else EMPTY

    def _seen(self, row: _Row, length: int) -> list[list[int]]:
        """Per group, the entries that the last of `length` positions reads."""
        size = self.block_size
        found = []
        for blocks, high, window in zip(row.blocks, self.high, self.model.windows, strict=True):
            if window == RECURRENT:
                found.append([high[blocks[0]]])
                continue
            first = max(0, length - window) if window else 0
            entries: list[int] = []
            for i in range(first // size, -(-length // size)):
                assert blocks[i] != 0, "reads the null block"
                entries += high[blocks[i] * size : (blocks[i] + 1) * size]
            offset = first - first // size * size
            found.append(entries[offset : offset + length - first])
        return found

    def _read(self, plan: StepPlan, allowed: Mapping[int, list[int]]) -> StepResult:
        result = StepResult(plan.step, [], saved=self._saved.pop(plan.step))
        for i, work in enumerate(plan.rows):
            row = self.rows[work.id]
            reason = self._fault_of(row, work) if self.fault is not None else None
            if reason is not None:
                result.faults.append((i, reason))
                self._poison(row, work)
            tokens = self._draw(row, work, allowed.get(i, ())) if work.sample else []
            result.tokens.append(tokens)
            if row.params.logprobs is not None or row.params.prompt_logprobs is not None:
                result.logprobs.append(self._logprobs(i, row, work, tokens))
            row.tokens += tokens
            if self.propose is not None:
                drafts = self.propose(row.tokens, self.num_drafts) if work.sample else []
                result.drafts.append(drafts)
        return result

    def _fault_of(self, row: _Row, work: RowWork) -> str | None:
        reason = self.fault(work) if self.fault is not None else None
        if reason is None and any(NAN in entries for entries in self._seen(row, work.start + work.num_tokens)):
            return "it read what a faulty row wrote"
        return reason

    def _poison(self, row: _Row, work: RowWork) -> None:
        for g, high in enumerate(self.high):
            for position in range(work.start, work.start + work.num_tokens):
                high[self._slot(row, g, position)] = NAN

    def _draw(self, row: _Row, work: RowWork, allowed: Sequence[int]) -> list[int]:
        """What is accepted of a token after each draft and before the first: the one drawn or the next allowed."""
        first = work.start + work.num_tokens - len(work.drafts)
        drawn: list[int] = []
        for j in range(len(work.drafts) + 1):
            num_output = len(row.tokens) - row.num_prompt_tokens + j
            token = self.model.draw(self._seen(row, first + j), row.params, num_output)
            while allowed and not allowed[j] >> token & 1:
                token = (token + 1) % self.vocab_size
            drawn.append(token)
        return self.accept(drawn, work.drafts)

    def _logprobs(self, i: int, row: _Row, work: RowWork, tokens: list[int]) -> RowLogprobs:
        """Log-probabilities of the sampled tokens, and of prompt tokens that follow the positions of the step."""
        found = RowLogprobs(i)
        if row.params.logprobs is not None:
            for j, token in enumerate(tokens):
                found.tokens.append(self.model.logprob(token, len(row.tokens) + j, row.params.logprobs))
        if row.params.prompt_logprobs is not None:
            found.prompt_start = work.start + 1
            for position in range(work.start + 1, min(work.start + work.num_tokens + 1, row.num_prompt_tokens)):
                found.prompt.append(self.model.logprob(row.tokens[position], position, row.params.prompt_logprobs))
        return found


def right_ones(drawn: Sequence[int], drafts: Sequence[int]) -> list[int]:
    """Drafts that are right, as far as all before them are, and the token that follows them."""
    wrong = next((i for i, draft in enumerate(drafts) if drawn[i] != draft), len(drafts))
    return list(drawn[: wrong + 1])


def _allowed(masks: GrammarMasks | None) -> dict[int, list[int]]:
    """Masks by row, as integers; one more than the row has drafts."""
    found: dict[int, list[int]] = {}
    if masks is not None:
        width = len(masks.bits) // len(masks.rows)
        for i, row in enumerate(masks.rows):
            bits = int.from_bytes(masks.bits[i * width : (i + 1) * width], "little")
            assert bits, "a mask that allows nothing"
            found.setdefault(row, []).append(bits)
    return found


def echo_proposer(model_next: Callable[[list[int]], int]) -> Callable[[list[int], int], list[int]]:
    """A proposer that asks `model_next` again and again."""

    def propose(tokens: list[int], k: int) -> list[int]:
        guess = list(tokens)
        for _ in range(k):
            guess.append(model_next(guess))
        return guess[len(tokens) :]

    return propose
