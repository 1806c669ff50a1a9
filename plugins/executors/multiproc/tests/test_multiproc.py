"""The executor of several processes: what one process does, and what happens when a rank dies."""

from __future__ import annotations

import json
import os
import random
import signal
from dataclasses import replace
from functools import partial
from pathlib import Path
from time import monotonic, sleep
from typing import Any

import pytest
from lmkit.api import (
    Checkpoint,
    ConfigError,
    EngineDead,
    EngineRequest,
    Executor,
    Failure,
    ForgetRows,
    Grammar,
    KVConfig,
    LmkitError,
    LoadAdapter,
    NewRow,
    ResetCache,
    ResolvedPlan,
    RowWork,
    SamplingParams,
    SchedLimits,
    Sleep,
    StageWeights,
    StepPlan,
    UseWeights,
    Wake,
    WorkAhead,
)
from lmkit.checkpoint import stamp_of
from lmkit.config import CacheConfig, EngineConfig, ModelConfig, ParallelConfig, SchedConfig
from lmkit.contracts.config import LoraConfig
from lmkit.engine.build import build_engine
from lmkit.plugins.resolve import resolve
from lmkit_multiproc import executor as ranks
from lmkit_multiproc.executor import MultiprocExecutor
from lmkit_testing import ExecutorConformance
from lmkit_testing.checkpoints import tiny_checkpoint
from lmkit_testing.executor import Tokens
from lmkit_testing.kills import Load
from lmkit_worker.uniproc import UniprocExecutor

Tiny = tuple[EngineConfig, ResolvedPlan, Checkpoint]
KILLS = int(os.environ.get("RANK_KILLS", "2"))


def demo(depth: int | None, wanted: dict[str, str], tp: int = 1, pp: int = 1) -> Any:
    """An engine of the demo with so few blocks that not all rows have room."""
    config = EngineConfig(
        model=ModelConfig(model="demo", max_length=256, dtype="float32"),
        cache=CacheConfig(num_blocks=17, block_size=16),
        sched=SchedConfig(max_tokens=64, max_rows=16),
        parallel=ParallelConfig(tp=tp, pp=pp, depth=depth, threads=1),
        wanted=wanted,
    )
    return build_engine(config, *resolve(config)[:2])


def play(engine: Any) -> dict[str, tuple[list[int], list[Any]]]:
    """Tokens and log-probabilities of requests, some of which begin alike, and one of which is aborted."""
    core, found = engine.core, {}
    asked: list[dict[str, Any]] = [
        {"temperature": 0},
        {"temperature": 1.0, "seed": 5, "top_p": 0.9},
        {"temperature": 0, "frequency_penalty": 0.7, "repetition_penalty": 1.2},
        {"temperature": 0, "logprobs": 2, "prompt_logprobs": 1},
        {"temperature": 1.0, "seed": 7, "grammar": Grammar("regex", "[0-9]{8,40}( [a-z]{3,9}){4}")},
    ]
    for i in range(10):
        prompt = [*range(40, 40 + 20 * (i % 3)), 3 + i, 5]
        params = SamplingParams(max_tokens=24 + i, ignore_eos="grammar" not in asked[i % 5], **asked[i % 5])
        core.add(EngineRequest(f"r{i}", prompt, params))
    steps = 0
    while core.has_work():
        for event in core.step():
            tokens, logprobs = found.setdefault(event.id, ([], []))
            tokens += event.tokens
            logprobs += [*event.logprobs, *event.prompt_logprobs]
        steps += 1
        if core.blocked:
            sleep(0.001)
        if steps == 9:
            core.abort(["r6"])
    found.pop("r6", None)
    return found


def save_adapter(base: Path, folder: Path) -> Path:
    """A random one of all matrices of a checkpoint's file."""
    import torch
    from safetensors.torch import load_file, save_file

    numbers, tensors, targets = torch.Generator().manual_seed(3), {}, set()
    for name, weight in load_file(base).items():
        if weight.dim() != 2:
            continue
        module, (outputs, inputs) = name.removesuffix(".weight"), weight.shape
        targets.add(module.rpartition(".")[2])
        sides = {"A.weight": (4, inputs), "B.weight": (outputs, 4)}
        if "embed_tokens" in module:
            sides = {"embedding_A": (4, outputs), "embedding_B": (inputs, 4)}
        for side, shape in sides.items():
            tensors[f"base_model.model.{module}.lora_{side}"] = 0.2 * torch.randn(shape, generator=numbers)
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": sorted(targets)}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


@pytest.mark.one_in(5)
class TestMultiproc(ExecutorConformance):
    plugin = "executor:multiproc"

    @pytest.fixture(scope="class")
    @classmethod
    def two(cls, tiny: Tiny) -> Tiny:
        return replace(tiny[0], parallel=ParallelConfig(tp=2, threads=1)), *tiny[1:]

    @pytest.mark.one_in(1)
    def test_two_ranks_say_what_one_says(self, tiny: Tiny, two: Tiny) -> None:
        one, both = UniprocExecutor(replace(tiny[0], wanted={}), *tiny[1:]), MultiprocExecutor(*two)
        try:
            whole, _ = self.ready(one, tiny[0]), self.ready(both, two[0])
            expected, found = self.play(one), self.play(both)
        finally:
            one.close()
            both.close()
        assert [r.tokens for r in found] == [r.tokens for r in expected]
        assert whole.specs[0].num_kv_heads == 2

    @pytest.mark.one_in(2)
    @pytest.mark.parametrize("tp", [1, 2])
    def test_stages_say_what_one_rank_says(self, tiny: Tiny, tp: int) -> None:
        """Layers go to two ranks each; the last ones draw, and the others are told."""
        config = replace(tiny[0], parallel=ParallelConfig(pp=2, tp=tp, threads=1))
        one, both = UniprocExecutor(replace(tiny[0], wanted={}), *tiny[1:]), MultiprocExecutor(config, *tiny[1:])
        try:
            whole, split = self.ready(one, tiny[0]), self.ready(both, config)
            assert self.told(both, ForgetRows()) == ""
            expected, found = self.play(one), self.play(both)
        finally:
            one.close()
            both.close()
        assert [r.tokens for r in found] == [r.tokens for r in expected]
        assert split.specs[0].layers == whole.specs[0].layers
        assert split.nbytes * 2 * tp == whole.nbytes

    @pytest.fixture(scope="class")
    @classmethod
    def mixture(cls, tmp_path_factory: pytest.TempPathFactory) -> Tiny:
        """Two layers of eight experts, on two ranks each of which has four of them."""
        pytest.importorskip("transformers")
        folder = tiny_checkpoint("MixtralForCausalLM", tmp_path_factory.mktemp("mixture") / "model")
        config = EngineConfig(
            model=ModelConfig(model=str(folder), max_length=64), cache=CacheConfig(num_blocks=40, block_size=4),
            parallel=ParallelConfig(tp=2, ep=2, threads=1), wanted={"executor": "multiproc"},
        )  # fmt: skip
        return config, *resolve(config)[:2]

    @pytest.mark.one_in(1)
    def test_experts_that_are_dealt_out_say_what_they_say_on_one_rank(self, mixture: Tiny) -> None:
        alone = replace(mixture[0], parallel=ParallelConfig(threads=1), wanted={})
        one, both = UniprocExecutor(alone, *mixture[1:]), MultiprocExecutor(*mixture)
        try:
            self.ready(one, alone), self.ready(both, mixture[0])
            expected, found = self.play(one), self.play(both)
        finally:
            one.close()
            both.close()
        assert [r.tokens for r in found] == [r.tokens for r in expected]

    @pytest.mark.parametrize(
        ("sizes", "needed", "fix"),
        [
            ({"ep": 2}, r"--ep 2 must divide the ranks \(--tp 1\) and .* \(\{8\}\)", "--tp 2 --ep 2"),
            ({"tp": 3, "ep": 3}, r"--ep 3 must divide .* \(\{8\}\)", "--ep 1"),
            ({"tp": 2, "ep": 4}, r"--ep 4 must divide the ranks \(--tp 2\)", "--tp 4 --ep 4"),
        ],
    )
    def test_experts_that_cannot_be_dealt_out(
        self, mixture: Tiny, sizes: dict[str, int], needed: str, fix: str
    ) -> None:
        with pytest.raises(ConfigError, match=needed) as refused:
            resolve(replace(mixture[0], parallel=ParallelConfig(**sizes)))
        assert refused.value.fix == fix

    def test_a_model_without_experts_deals_none_out(self, two: Tiny) -> None:
        with pytest.raises(ConfigError, match=r"the experts of a layer \(\{none\}\)"):
            resolve(replace(two[0], parallel=ParallelConfig(tp=2, ep=2)))

    @pytest.mark.one_in(2)
    def test_stages_work_on_several_steps(self, tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
        """They are of different rows, with another order between them; a step that fails is no failure of a rank."""
        config = replace(tiny[0], parallel=ParallelConfig(pp=2, threads=1, depth=3))
        one, both = UniprocExecutor(replace(tiny[0], wanted={}), *tiny[1:]), MultiprocExecutor(config, *tiny[1:])
        failures: list[Failure] = []
        both.on_failure(failures.append)
        try:
            self.ready(one, tiny[0])
            self.ready(both, config)
            expected = self.adapted(one, adapter=None)
            for large in (ranks.LARGE, 0):  # then each order waits until steps have their answers
                monkeypatch.setattr(ranks, "LARGE", large)
                assert self.many(both) == expected
                for row in ("x", "y", "z"):
                    new = NewRow(row, 0, [5], 1, [[1]], 0, SamplingParams(temperature=0))
                    plan = StepPlan(ord(row), new=[new], rows=[RowWork(row, int(row == "y"), 0, 1, [], True)])
                    both.forward(plan)
                    lost = both.sample(plan.step, None)
                    if row == "y":
                        failed = lost
                with pytest.raises(LmkitError, match="does not fit its row"):
                    failed.result()
                assert not self.told(both, ForgetRows())
        finally:
            one.close()
            both.close()
        assert not failures

    @classmethod
    def many(cls, executor: Executor) -> Tokens:
        """The rows of `adapted`, each in steps of its own; orders and answers cross."""
        greedy = SamplingParams(temperature=0)
        rows = {"a": [5, 6, 7], "b": [5]}
        blocks = {"a": [[1, 2]], "b": [[3]]}
        found: Tokens = []
        for i in range(3):
            futures = []
            for number, (row, prompt) in enumerate(rows.items()):
                new = [] if i else [NewRow(row, 0, prompt, len(prompt), blocks[row], 0, greedy)]
                start = 0 if not i else len(prompt) + i - 1
                work = RowWork(row, 0, start, 1 if i else len(prompt), [], True)
                plan = StepPlan(2 * i + number, new=new, rows=[work])
                executor.forward(plan)
                futures.append(executor.sample(plan.step, None))
            executor.control(WorkAhead())
            found.append([tokens for future in futures for tokens in future.result().tokens])
        assert not cls.told(executor, ForgetRows())
        return found

    @pytest.mark.full
    @pytest.mark.parametrize(
        ("sizes", "depth", "wanted"),
        [({"pp": 2}, 2, {}), ({"pp": 2}, 3, {}), ({"pp": 2}, 2, {"proposer": "ngram"}), ({"tp": 2}, 2, {})],
    )
    def test_engines_with_steps_in_flight_say_what_one_rank_says(
        self, sizes: dict[str, int], depth: int, wanted: dict[str, str]
    ) -> None:
        """Whatever rows ask for, with too few blocks for all, and when one is aborted; then a rank dies."""
        one, both = demo(None, wanted), demo(depth, wanted, **sizes)
        try:
            expected, found = play(one), play(both)
            if "tp" in sizes:  # sums in another order
                expected, found = ({name: said[0] for name, said in each.items()} for each in (expected, found))
            assert found == expected
            assert one.core.stats().num_preempted
            assert both.core.stats().num_preempted
            os.kill(both.core.executor._processes[depth - 2].process.pid, signal.SIGKILL)
            with pytest.raises(EngineDead, match=f"rank {depth - 2}.*signal 9"):
                play(both)
        finally:
            one.close()
            both.close()

    @pytest.mark.full
    @pytest.mark.parametrize("sizes", [{"tp": 2}, {"pp": 2}])
    def test_adapters_say_what_they_say_on_one_rank(self, tiny: Tiny, sizes: dict[str, int], tmp_path: Path) -> None:
        """Of all linears, the embedding and the head; also after a sleep that dropped the weights."""
        path = save_adapter(tiny[2].files[0], tmp_path)
        config = replace(tiny[0], lora=LoraConfig(enabled=True))
        one = UniprocExecutor(replace(config, wanted={}), *tiny[1:])
        both = MultiprocExecutor(replace(config, parallel=ParallelConfig(**sizes, threads=1)), *tiny[1:])
        try:
            for executor in (one, both):
                self.ready(executor, config)
                assert not self.told(executor, LoadAdapter("x", str(path)))
            expected, plain = self.adapted(one), self.say(one)
            assert self.adapted(both) == expected
            assert not self.told(both, Sleep(2), Wake())
            assert self.say(both) == plain
            assert self.adapted(both) == expected
            assert "no adapter" in self.told(both, LoadAdapter("y", str(tmp_path / "nothing")))
        finally:
            one.close()
            both.close()

    @classmethod
    def adapted(cls, executor: Executor, adapter: str | None = "x") -> Tokens:
        """A row with the adapter beside one without."""
        greedy = SamplingParams(temperature=0)
        rows = [NewRow("a", 0, [5, 6, 7], 3, [[1, 2]], 0, greedy, adapter), NewRow("b", 0, [5], 1, [[3]], 0, greedy)]
        work = [RowWork("a", 0, 0, 3, [], True), RowWork("b", 0, 0, 1, [], True)]
        found = [cls.step(executor, StepPlan(0, new=rows, rows=work)).tokens]
        for i in range(2):
            work = [RowWork("a", 0, 3 + i, 1, [], True), RowWork("b", 0, 1 + i, 1, [], True)]
            found.append(cls.step(executor, StepPlan(1 + i, rows=work)).tokens)
        assert not cls.told(executor, ResetCache())
        return found

    @pytest.mark.full
    def test_two_ranks_sleep_and_change_together(
        self, two: Tiny, other: Path, said: tuple[Tokens, Tokens], tmp_path: Path
    ) -> None:
        """Each takes its share of the new weights; what one refuses, the other does not do either."""
        from safetensors.torch import load_file, save_file

        executor = MultiprocExecutor(*two)
        try:
            self.ready(executor, two[0])
            assert not self.told(executor, Sleep(2), Wake(), StageWeights(str(other), stamp_of(other)))
            assert self.say(executor) == said[0]
            assert not self.told(executor, UseWeights(), Sleep(1), Wake())
            assert self.say(executor) == said[1]
            new, part = load_file(two[2].files[0]), tmp_path / "part.safetensors"
            save_file({"model.norm.weight": new["model.norm.weight"]}, part)
            staged = StageWeights(str(part), stamp_of(part), partial=True)
            assert "missing" in self.told(executor, StageWeights(str(part), stamp_of(part)))
            assert not self.told(executor, staged, UseWeights())
            assert self.say(executor) != said[1]
            assert not self.told(executor, StageWeights(str(other), stamp_of(other)), UseWeights(), Sleep(2), Wake())
            assert self.say(executor) == said[1]
        finally:
            executor.close()

    @pytest.mark.one_in(2)
    @pytest.mark.parametrize("rank", [0, 1])
    def test_a_rank_that_dies_is_one_failure(self, two: Tiny, rank: int) -> None:
        executor = MultiprocExecutor(*two)
        failures: list[Failure] = []
        executor.on_failure(failures.append)
        try:
            self.ready(executor, two[0])
            pids = [process.process.pid for process in executor._processes]
            os.kill(pids[rank], signal.SIGKILL)
            began = monotonic()
            row = NewRow("a", 0, [5], 1, [[1]], 0, SamplingParams(temperature=0))
            with pytest.raises(EngineDead, match=f"rank {rank}.*signal 9"):
                self.many_steps(executor, row)
            for process in executor._processes:
                process.process.wait(30)
            assert len(failures) == 1
            assert failures[0].rank == rank
            assert monotonic() - began < 30
        finally:
            executor.close()
        executor.close()

    @pytest.mark.slow
    def test_ranks_that_are_killed_under_load_are_one_failure_each(self, tmp_path: Path) -> None:
        """With no token that one rank would not say; the next engine runs."""
        load, numbers = Load(tmp_path / "model", "multiproc"), random.Random(17)
        for i in range(KILLS):
            sizes = {"tp": 2} if i % 2 else {"pp": 2}
            executor = MultiprocExecutor(
                replace(load.tiny[0], parallel=ParallelConfig(**sizes, threads=1)), *load.tiny[1:]
            )
            rank = i // 2 % 2
            try:
                failure = load.killed(executor, partial(self.kill, executor, rank), numbers.uniform(0.05, 0.5))
                assert failure.rank == rank
                for process in executor._processes:
                    process.process.wait(2)
            finally:
                executor.close()

    @staticmethod
    def kill(executor: MultiprocExecutor, rank: int) -> None:
        os.kill(executor._processes[rank].process.pid, signal.SIGKILL)

    @classmethod
    def many_steps(cls, executor: MultiprocExecutor, row: NewRow) -> None:
        for step in range(100):
            cls.step(executor, StepPlan(step, new=[row], rows=[RowWork("a", 0, 0, 1, [], True)]))

    @pytest.mark.full
    def test_ranks_end_with_their_parent(self, two: Tiny) -> None:
        executor = MultiprocExecutor(*two)
        executor.start()
        processes = [process.process for process in executor._processes]
        if Path("/proc/self/maps").exists():  # what ranks share has no name that could be left
            assert all("/dev/shm" not in Path(f"/proc/{process.pid}/maps").read_text() for process in processes)
        executor.close()
        assert all(process.returncode is not None for process in processes)

    def test_what_all_ranks_refuse_is_said_once(self, two: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
        executor = MultiprocExecutor(*two)
        try:
            facts = executor.start()
            for _ in range(2):
                with pytest.raises(LmkitError):
                    executor.configure_kv(KVConfig(facts.kv_specs, ()), SchedLimits(0, 0, 0))
            executor.configure_kv(KVConfig(facts.kv_specs, (8,) * len(facts.kv_specs)), SchedLimits(64, 4, 64))
        finally:
            executor.close()

    def test_what_cannot_be_split(self, two: Tiny) -> None:
        staged = replace(two[0], parallel=ParallelConfig(pp=2), model=replace(two[0].model, packed_cache="folder"))
        with pytest.raises(ConfigError, match="packed weights"):
            MultiprocExecutor(staged, *two[1:])
        with pytest.raises(ConfigError, match="in flight"):
            MultiprocExecutor(replace(two[0], parallel=ParallelConfig(tp=2, depth=3)), *two[1:])
        with pytest.raises(ConfigError, match="3 here, and not 4"):
            MultiprocExecutor(replace(two[0], parallel=ParallelConfig(pp=2, depth=4)), *two[1:])

    @pytest.mark.parametrize(
        ("sizes", "depth"), [({"tp": 2}, None), ({"pp": 2}, 2), ({"pp": 4}, 4), ({"pp": 2, "depth": 1}, 1), ({}, None)]
    )
    def test_a_step_in_flight_for_each_stage(self, sizes: dict[str, int], depth: int | None) -> None:
        config = EngineConfig(model=ModelConfig(model="demo"), parallel=ParallelConfig(**sizes))
        assert resolve(config)[0].value("depth") == depth

    def test_more_steps_in_flight_than_there_may_be_are_refused_at_once(self) -> None:
        for sizes, most in (({"pp": 2, "depth": 4}, 3), ({"tp": 2, "depth": 3}, 2)):
            config = EngineConfig(model=ModelConfig(model="demo"), parallel=ParallelConfig(**sizes))
            with pytest.raises(ConfigError, match=f"requires {most}: ranks have at most one step more in flight"):
                resolve(config)
