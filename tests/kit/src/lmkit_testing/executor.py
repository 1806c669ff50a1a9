"""Conformance of executors: the same plans give the same tokens as in one process; a failed step fails alone."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from lmkit import memory
from lmkit.api import (
    Checkpoint,
    CheckpointError,
    Control,
    EngineError,
    Executor,
    Failure,
    ForgetRows,
    KVConfig,
    NewRow,
    ResetCache,
    ResolvedPlan,
    RowWork,
    SamplingParams,
    SchedLimits,
    StepPlan,
    StepResult,
    WorkAhead,
)
from lmkit.config import CacheConfig, EngineConfig, ModelConfig
from lmkit.plugins import load_target
from lmkit.plugins.resolve import resolve

from lmkit_testing.checkpoints import tiny_checkpoint
from lmkit_testing.specs import PluginConformance

TIMEOUT = 60.0  # seconds a step may take


class _Unheard(Control):
    """A command that no worker knows."""


class ExecutorConformance(PluginConformance):
    """Runs a tiny model. An executor with several ranks runs it on one."""

    @pytest.fixture(scope="class")
    @classmethod
    def tiny(cls, tmp_path_factory: pytest.TempPathFactory) -> tuple[EngineConfig, ResolvedPlan, Checkpoint]:
        pytest.importorskip("transformers")
        name = cls.plugin.partition(":")[2]
        directory = tiny_checkpoint("llama", Path(tmp_path_factory.mktemp("tiny")) / "model")
        config = EngineConfig(
            model=ModelConfig(model=str(directory), max_length=64),
            cache=CacheConfig(num_blocks=40, block_size=4),
            wanted={"executor": name},
        )
        resolved, checkpoint, _ = resolve(config)
        return config, resolved, checkpoint

    @pytest.fixture
    def executor(self, target: Any, tiny: tuple[EngineConfig, ResolvedPlan, Checkpoint]) -> Iterator[Executor]:
        made = target(*tiny)
        yield made
        made.close()

    @staticmethod
    def ready(executor: Executor, config: EngineConfig) -> KVConfig:
        kv = memory.plan_kv(executor.start(), config)
        sched = config.sched
        limits = SchedLimits(memory.step_tokens(config), sched.rows, config.model.max_length or kv.num_tokens)
        executor.configure_kv(kv, limits)
        return kv

    @staticmethod
    def step(executor: Executor, plan: StepPlan) -> StepResult:
        executor.forward(plan)
        return executor.sample(plan.step, None).result(TIMEOUT)

    @classmethod
    def play(cls, executor: Executor) -> list[StepResult]:
        """Two rows, one of them in chunks, then decoding; one row leaves and comes back as a new one."""
        greedy = SamplingParams(temperature=0, logprobs=1)
        random = SamplingParams(seed=7, temperature=2.0)
        a = NewRow("a", 0, [5, 6, 7, 8, 9], 5, [[1, 2, 3]], 0, greedy)
        b = NewRow("b", 0, [4, 3], 2, [[4, 5]], 0, random)
        results = [cls.step(executor, StepPlan(0, new=[a], rows=[RowWork("a", 0, 0, 3, [], False)]))]
        rows = [RowWork("a", 0, 3, 2, [], True), RowWork("b", 0, 0, 2, [], True)]
        results.append(cls.step(executor, StepPlan(1, new=[b], rows=rows)))
        for i in range(3):
            rows = [RowWork("b", 0, 2 + i, 1, [], True), RowWork("a", 0, 5 + i, 1, [], True)]
            results.append(cls.step(executor, StepPlan(2 + i, rows=rows)))
        known = a.tokens + [token for result in results[1:2] for token in result.tokens[0]]
        known += [token for result in results[2:] for token in result.tokens[1]]
        again = NewRow("a", 1, known, 5, [[6, 7, 8]], 0, greedy)
        plan = StepPlan(5, gone=["a"], new=[again], rows=[RowWork("a", 1, 0, len(known), [], True)])
        return [*results, cls.step(executor, plan)]

    def test_facts(self, executor: Executor, tiny: tuple[EngineConfig, ResolvedPlan, Checkpoint]) -> None:
        facts = executor.start()
        assert facts.weight_bytes > 0
        assert facts.activation_bytes > 0
        assert facts.free_kv_bytes > 0
        assert [spec.block_size for spec in facts.kv_specs] == [4]
        assert executor.depth >= 1

    def test_tokens_are_those_of_one_process(
        self, executor: Executor, tiny: tuple[EngineConfig, ResolvedPlan, Checkpoint]
    ) -> None:
        """W5."""
        from lmkit_worker.uniproc import UniprocExecutor

        reference = UniprocExecutor(replace(tiny[0], wanted={}), *tiny[1:])
        for each in (reference, executor):
            self.ready(each, tiny[0])
        expected, found = self.play(reference), self.play(executor)
        reference.close()
        assert [r.tokens for r in found] == [r.tokens for r in expected]
        assert found[0].tokens == [[]]
        assert [[e.row for e in r.logprobs] for r in found] == [[e.row for e in r.logprobs] for r in expected]

    def test_an_empty_plan_is_legal(
        self, executor: Executor, tiny: tuple[EngineConfig, ResolvedPlan, Checkpoint]
    ) -> None:
        self.ready(executor, tiny[0])
        assert self.step(executor, StepPlan(0)) == StepResult(0, [])

    def test_a_failed_step_fails_alone(
        self, executor: Executor, tiny: tuple[EngineConfig, ResolvedPlan, Checkpoint]
    ) -> None:
        """Its future raises; no rank has died; after ForgetRows or ResetCache everything works as if new."""
        failures: list[Failure] = []
        executor.on_failure(failures.append)
        self.ready(executor, tiny[0])
        expected = self.play(executor)
        row = NewRow("c", 0, [5], 1, [[10]], 0, SamplingParams(temperature=0, frequency_penalty=1.0))
        for command in (ForgetRows(), ResetCache()):
            executor.forward(StepPlan(6, new=[row], rows=[RowWork("c", 3, 0, 1, [], True)]))  # that epoch was not sent
            with pytest.raises(EngineError):
                executor.sample(6, None).result(TIMEOUT)
            if all(reply.ok for reply in executor.control(command)) or isinstance(command, ResetCache):
                assert self.play(executor) == expected
        assert not failures

    def test_work_ahead_comes_to_an_end(
        self, executor: Executor, tiny: tuple[EngineConfig, ResolvedPlan, Checkpoint]
    ) -> None:
        """It is refused when nothing is left, by an executor that knows of none at once, and changes no answer."""
        self.ready(executor, tiny[0])
        expected = self.play(executor)
        replies = (executor.control(WorkAhead()) for _ in range(1000))
        assert any(not all(reply.ok for reply in each) for each in replies)
        executor.control(ResetCache())
        assert self.play(executor) == expected

    def test_unknown_commands_are_refused_by_name(
        self, executor: Executor, tiny: tuple[EngineConfig, ResolvedPlan, Checkpoint]
    ) -> None:
        self.ready(executor, tiny[0])
        for reply in executor.control(_Unheard()):
            assert not reply.ok
            assert "_Unheard" in reply.message

    def test_what_is_no_adapter_is_refused_before_it_is_loaded(
        self, executor: Executor, tiny: tuple[EngineConfig, ResolvedPlan, Checkpoint], tmp_path: Path
    ) -> None:
        self.ready(executor, tiny[0])
        with pytest.raises(CheckpointError):
            executor.inspect_adapter(str(tmp_path))

    def test_close_is_idempotent(self, target: Any, tiny: tuple[EngineConfig, ResolvedPlan, Checkpoint]) -> None:
        for started in (False, True):
            executor = target(*tiny)
            if started:
                self.ready(executor, tiny[0])
            executor.close()
            executor.close()

    def test_chosen_by_the_resolver(self, target: Any, tiny: tuple[EngineConfig, ResolvedPlan, Checkpoint]) -> None:
        choice = tiny[1].choice("executor")
        assert choice is not None
        assert choice.name == self.plugin.partition(":")[2]
        assert load_target(choice) is target
