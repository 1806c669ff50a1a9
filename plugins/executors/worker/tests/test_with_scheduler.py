"""Scheduler and runner together, with random requests and hardly enough blocks: W1 to W4, and every token."""

from __future__ import annotations

import random
from collections.abc import Callable
from concurrent.futures import Future

import pytest
import torch
from lmkit.api import (
    Control,
    EngineRequest,
    Failure,
    GrammarMasks,
    KVConfig,
    Reply,
    SamplingParams,
    SchedLimits,
    StepLimits,
    StepPlan,
    StepResult,
    WorkerFacts,
)
from lmkit.engine.core import EngineCore
from lmkit.engine.intake import Intake
from lmkit.scheduling.scheduler import Scheduler
from lmkit_testing.stepper import ArrivalOrder
from lmkit_testing.toy import RECURRENT, TOY_VOCAB, ToyAttention, ToyPlatform, toy_model, toy_tokens
from lmkit_worker.future import StepFuture
from lmkit_worker.runner import Runner

MAX_LENGTH = 40
Windows = tuple[int | None, ...]


class LateEvent:
    """Has not passed before somebody waits for it."""

    def __init__(self) -> None:
        self.passed = True

    def record(self) -> None:
        self.passed = False

    def query(self) -> bool:
        return self.passed

    def wait(self) -> None:
        self.passed = True


class LatePlatform(ToyPlatform):
    """A device that is never done by itself: tokens are read one step late, and the next step begins without them."""

    def event(self) -> LateEvent:
        return LateEvent()


class RunnerExecutor:
    """A runner of the toy model as an executor. Fresh blocks hold NaN, so reading what nobody wrote is a fault."""

    def __init__(self, kv: KVConfig, limits: SchedLimits, windows: Windows, break_at: int, late: bool) -> None:
        self.depth, self.break_at = limits.depth, break_at
        self.lookahead = limits.lookahead
        block_size = min(spec.block_size for spec in kv.specs)
        length = limits.max_length + limits.lookahead
        sizes = StepLimits(limits.max_rows, limits.max_tokens, -(-length // block_size) + 1, limits.max_length)
        backends = [ToyAttention() for spec in kv.specs if not spec.recurrent]
        self.runner = Runner(
            toy_model(block_size, windows), kv, sizes, backends, LatePlatform() if late else ToyPlatform(),
            torch.device("cpu"), eos_token_ids=limits.eos_token_ids, max_drafts=limits.lookahead, debug_kv=True,
        )  # fmt: skip
        self.propose: Callable[[list[int]], list[int]] = lambda tokens: []
        self.preempted = 0

    def start(self) -> WorkerFacts:
        raise AssertionError("not used")

    def configure_kv(self, kv: KVConfig, limits: SchedLimits) -> None:
        raise AssertionError("not used")

    def forward(self, plan: StepPlan) -> None:
        self.runner.forward(plan)
        if plan.step == self.break_at:
            raise RuntimeError("injected")
        self.plan = plan
        self.preempted += sum(row.epoch > 0 for row in plan.new)

    def sample(self, step: int, masks: GrammarMasks | None) -> Future[StepResult]:
        plan, unread = self.plan, self.runner.sample(step, masks)
        if self.lookahead:
            result = unread.read()
            rows = self.runner.rows
            result.drafts = [
                self.propose(rows.row_tokens(rows.slot_of[w.id]).tolist())[: self.lookahead] if w.sample else []
                for w in plan.rows
            ]
        return StepFuture(unread.read)

    def control(self, command: Control) -> list[Reply]:
        self.runner.reset()
        return [Reply(True)]

    def inspect_adapter(self, path: str) -> str:
        raise AssertionError("not used")

    def on_failure(self, callback: Callable[[Failure], None]) -> None:
        """Never fails."""

    def close(self) -> None:
        """Nothing to close."""


def check_mirror(engine: EngineCore, runner: Runner) -> None:
    """W1: rows of the runner are the scheduler's, apart from those about to be forgotten."""
    runner.check()
    scheduler = engine.scheduler
    for r in scheduler.running:
        slot = runner.rows.slot_of[r.id]
        if runner.rows.epoch[slot] != r.epoch:
            continue
        for group, held in enumerate(r.held.blocks):
            blocks = runner.rows.row_blocks(group, slot).tolist()
            assert len(blocks) <= len(held)
            kept = [pair for pair in zip(blocks, held, strict=False) if pair[1]]  # 0: dropped behind a window
            assert all(mine == theirs for mine, theirs in kept)
        known = runner.rows.row_tokens(slot)[: len(r.tokens)].tolist()
        assert known == r.tokens


@pytest.mark.one_in(2)
@pytest.mark.parametrize("seed", range(60))
def test_every_token_is_right(seed: int) -> None:
    rng = random.Random(seed)
    block_size, depth = rng.choice([1, 3, 4]), rng.choice([1, 2])
    layers: Windows = rng.choice(
        [(None, None), (None, 5), (7,), (3, None, 9), (RECURRENT,), (RECURRENT, None, RECURRENT)]
    )
    recurrent = RECURRENT in layers
    limits = SchedLimits(
        max_tokens=rng.choice([3, 8, 40]), max_rows=rng.choice([1, 3, 8]), max_length=MAX_LENGTH, eos_token_ids=(0,),
        prefix_cache=rng.random() < 0.7, depth=depth,
        lookahead=rng.choice([0, 3]) if depth == 1 and not recurrent else 0,
    )  # fmt: skip
    specs = tuple(toy_model(block_size, layers).info.kv_specs(block_size, "float32"))
    windows = tuple(spec.window for spec in specs)
    alone = -(-(MAX_LENGTH + limits.lookahead) // block_size)
    states = rng.choice([2, 3, 9])
    kv = KVConfig(specs, tuple(states if s.recurrent else 2 + int(alone * rng.choice([1.0, 1.5, 4.0])) for s in specs))

    def propose(tokens: list[int]) -> list[int]:
        right = toy_tokens(tokens, 3, windows)
        return rng.choice([[], right, [1, 2], [right[0], 5]])

    executor = RunnerExecutor(kv, limits, layers, break_at=rng.choice([-1, -1, 5]), late=rng.random() < 0.5)
    executor.propose = propose
    engine = EngineCore(Scheduler(limits, kv, ArrivalOrder()), executor, Intake(TOY_VOCAB, MAX_LENGTH))
    stems = [[1, 2, 3, 4, 5, 6, 7, 8], [9, 9, 9]]
    requests = {}
    for i in range(rng.randint(1, 6)):
        prompt = rng.choice(stems) + [rng.randrange(10) for _ in range(rng.randint(0, 6))]
        params = SamplingParams(temperature=0, max_tokens=rng.randint(1, 16), ignore_eos=True)
        requests[str(i)] = EngineRequest(str(i), prompt, params, arrival=float(i))
    waiting, tokens, ended = list(requests.values()), {id: [] for id in requests}, {}
    for _ in range(800):
        if waiting and rng.random() < 0.5:
            engine.add(waiting.pop(0))
        if not waiting and not engine.has_work():
            break
        for event in engine.step():
            tokens[event.id] += event.tokens
            if event.finish:
                ended[event.id] = event.finish
        check_mirror(engine, executor.runner)
    assert ended.keys() == requests.keys()
    for id, request in requests.items():
        expected = toy_tokens(request.token_ids, request.params.max_tokens, windows)
        if ended[id] == "error":
            assert executor.break_at >= 0
            assert tokens[id] == expected[: len(tokens[id])]
        else:
            assert tokens[id] == expected
