"""Conformance of executors: the same plans give the same tokens as in one process; a failed step fails alone."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
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
    Sleep,
    StageWeights,
    StepPlan,
    StepResult,
    UseWeights,
    Wake,
    WorkAhead,
)
from lmkit.checkpoint import stamp_of
from lmkit.config import CacheConfig, EngineConfig, ModelConfig
from lmkit.plugins import load_target
from lmkit.plugins.resolve import resolve

from lmkit_testing.checkpoints import tiny_checkpoint
from lmkit_testing.specs import PluginConformance

Tokens = list[list[list[int]]]  # by step and row
TIMEOUT = 60.0  # seconds a step may take


class _Unheard(Control):
    """A command that no worker knows."""


def _together(names: Iterable[str]) -> list[list[str]]:
    """Names of tensors by what a family like Llama merges: q, k and v; gate and up."""
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault(re.sub(r"[qkv]_proj|(gate|up)_proj", "merged", name), []).append(name)
    return list(groups.values())


def tiny_model(directory: Path, executor: str) -> tuple[EngineConfig, ResolvedPlan, Checkpoint]:
    """A random checkpoint, written to `directory`, for the executor of that name."""
    config = EngineConfig(
        model=ModelConfig(model=str(tiny_checkpoint("llama", directory)), max_length=64),
        cache=CacheConfig(num_blocks=40, block_size=4),
        wanted={"executor": executor},
    )
    resolved, checkpoint, _ = resolve(config)
    return config, resolved, checkpoint


class ExecutorConformance(PluginConformance):
    """Runs a tiny model. An executor with several ranks runs it on one."""

    @pytest.fixture(scope="class")
    @classmethod
    def tiny(cls, tmp_path_factory: pytest.TempPathFactory) -> tuple[EngineConfig, ResolvedPlan, Checkpoint]:
        pytest.importorskip("transformers")
        return tiny_model(Path(tmp_path_factory.mktemp("tiny")) / "model", cls.plugin.partition(":")[2])

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

    @pytest.fixture(scope="class")
    @classmethod
    def other(
        cls, tiny: tuple[EngineConfig, ResolvedPlan, Checkpoint], tmp_path_factory: pytest.TempPathFactory
    ) -> Path:
        """A file with other weights of the tiny model, under the names that its checkpoint has."""
        import torch
        from safetensors.torch import load_file, save_file

        path = Path(tmp_path_factory.mktemp("other")) / "new.safetensors"
        numbers = torch.Generator().manual_seed(5)
        old = load_file(tiny[2].files[0])
        save_file({name: w + 0.2 * torch.randn(w.shape, generator=numbers).to(w) for name, w in old.items()}, path)
        return path

    @pytest.fixture(scope="class")
    @classmethod
    def said(cls, tiny: tuple[EngineConfig, ResolvedPlan, Checkpoint], other: Path) -> tuple[Tokens, Tokens]:
        """What one process says that has loaded the weights of the checkpoint, and the other ones."""
        from lmkit_worker.uniproc import UniprocExecutor

        found = []
        for checkpoint in (tiny[2], replace(tiny[2], path=other, files=(other,))):
            executor = UniprocExecutor(replace(tiny[0], wanted={}), tiny[1], checkpoint)
            cls.ready(executor, tiny[0])
            found.append(cls.say(executor))
            executor.close()
        assert found[0] != found[1], "weights that differ and say the same prove nothing"
        return found[0], found[1]

    @classmethod
    def say(cls, executor: Executor) -> Tokens:
        """What `play` draws, as often as one likes."""
        found = [result.tokens for result in cls.play(executor)]
        assert not cls.told(executor, ResetCache())
        return found

    @staticmethod
    def told(executor: Executor, *commands: Control) -> str:
        """What stopped the last of them, "" if nothing did; nothing stopped the others, and all workers agree."""
        for i, command in enumerate(commands, 1):
            replies = executor.control(command)
            assert len({reply.ok for reply in replies}) == 1, replies
            if not replies[0].ok:
                assert i == len(commands), replies
                return replies[0].message
        return ""

    def test_it_sleeps_and_wakes(
        self, executor: Executor, tiny: tuple[EngineConfig, ResolvedPlan, Checkpoint],
        said: tuple[Tokens, Tokens],
    ) -> None:  # fmt: skip
        self.ready(executor, tiny[0])
        for level in (1, 2, 2):
            assert not self.told(executor, Sleep(level))
            assert not self.told(executor, Wake())
            assert self.say(executor) == said[0], f"after level {level}"
        assert "level 3" in self.told(executor, Sleep(3))

    def test_weights_are_replaced(
        self, executor: Executor, tiny: tuple[EngineConfig, ResolvedPlan, Checkpoint], other: Path,
        said: tuple[Tokens, Tokens], tmp_path: Path,
    ) -> None:  # fmt: skip
        """All at once; and slept over."""
        self.ready(executor, tiny[0])
        assert self.say(executor) == said[0]
        passing = tmp_path / "passing.safetensors"
        passing.write_bytes(other.read_bytes())
        staged = StageWeights(str(passing), stamp_of(passing))
        assert not self.told(executor, staged, UseWeights(commit=False), staged)
        assert self.say(executor) == said[0], "they were not used yet"
        assert not self.told(executor, UseWeights(), Sleep(2), Wake(), Sleep(1), Wake())
        assert self.say(executor) == said[1]
        passing.write_bytes(bytes(passing.stat().st_size))
        assert self.say(executor) == said[1], "they are the worker's own"
        assert not self.told(executor, Sleep(2))
        assert "has changed" in self.told(executor, Wake())
        passing.write_bytes(other.read_bytes())
        assert "has changed" in self.told(executor, Wake()), "nobody knows what is in it now"

    @pytest.mark.one_in(2)
    def test_some_weights_are_replaced(
        self, executor: Executor, tiny: tuple[EngineConfig, ResolvedPlan, Checkpoint], other: Path,
        said: tuple[Tokens, Tokens], tmp_path: Path,
    ) -> None:  # fmt: skip
        """One part after the other, in the end all: what is merged comes together, the rest stays as it was."""
        from safetensors.torch import load_file, save_file

        self.ready(executor, tiny[0])
        new = load_file(other)
        for i, names in enumerate(_together(new)):
            part = tmp_path / f"{i}.safetensors"
            save_file({name: new[name] for name in names}, part)
            assert not self.told(executor, StageWeights(str(part), stamp_of(part), partial=True), UseWeights())
            part.unlink()
        assert self.say(executor) == said[1]
        assert "no file has them all" in self.told(executor, Sleep(2))
        assert not self.told(executor, Sleep(1), Wake())
        assert self.say(executor) == said[1]

    @pytest.mark.one_in(2)
    def test_weights_that_do_not_fit_change_nothing(
        self, executor: Executor, tiny: tuple[EngineConfig, ResolvedPlan, Checkpoint], other: Path,
        said: tuple[Tokens, Tokens], tmp_path: Path,
    ) -> None:  # fmt: skip
        """Each is refused in words."""
        import torch
        from safetensors.torch import load_file, save_file

        self.ready(executor, tiny[0])
        new, path = load_file(other), tmp_path / "new.safetensors"
        q, k, norm = (f"model.layers.0.{n}.weight" for n in ("self_attn.q_proj", "self_attn.k_proj", "input_layernorm"))
        wrong: list[tuple[str, bool, dict[str, Any]]] = [
            ("has shape", False, {**new, q: new[q][:-1].contiguous()}),
            ("has dtype", False, {**new, q: new[q].to(torch.int8)}),
            ("extra", False, {**new, "model.layers.99.x.weight": new[norm].clone()}),
            ("missing", False, {name: w for name, w in new.items() if name != norm}),
            (f"missing.*{k}", True, {q: new[q]}),
            ("has shape", True, {norm: new[norm][1:].clone()}),
        ]
        for why, partial, tensors in wrong:
            save_file(tensors, path)
            found = self.told(executor, StageWeights(str(path), stamp_of(path), partial))
            assert re.search(why, found), found
        assert "has changed" in self.told(executor, StageWeights(str(other), stamp_of(other) + "0"))
        path.write_bytes(other.read_bytes()[:-9])
        assert "damaged" in self.told(executor, StageWeights(str(path), stamp_of(path)))
        assert "cannot be read" in self.told(executor, StageWeights(str(tmp_path / "none.safetensors"), ""))
        assert self.say(executor) == said[0]

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
