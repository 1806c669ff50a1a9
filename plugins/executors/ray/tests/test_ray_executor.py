"""The executor of Ray: what one process does, and what happens when a rank, or the cluster, is not as it should be."""

from __future__ import annotations

import gc
import os
import signal
import socket
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from time import sleep

import pytest

pytest.importorskip("ray", reason="Ray is not installed: pip install 'lmkit-executor-ray[ray]'")

import ray
from lmkit.api import (
    Checkpoint,
    CheckpointError,
    ConfigError,
    EngineDead,
    Failure,
    NewRow,
    ResolvedPlan,
    RowWork,
    SamplingParams,
    StepPlan,
)
from lmkit.config import EngineConfig, ParallelConfig
from lmkit_executor_ray import about
from lmkit_executor_ray.about import compare, digest
from lmkit_executor_ray.cluster import connect
from lmkit_executor_ray.executor import RayExecutor, groups, ranks_here
from lmkit_executor_ray.hooks import Options
from lmkit_testing import ExecutorConformance
from lmkit_worker.uniproc import UniprocExecutor

Tiny = tuple[EngineConfig, ResolvedPlan, Checkpoint]
CPUS = 4


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    connect("local", CPUS)
    yield
    with warnings.catch_warnings():  # Ray leaves its processes to the system
        warnings.simplefilter("ignore", ResourceWarning)
        ray.shutdown()
        gc.collect()


def split(tiny: Tiny, **sizes: int) -> Tiny:
    return replace(tiny[0], parallel=ParallelConfig(**sizes)), *tiny[1:]


class TestRay(ExecutorConformance):
    plugin = "executor:ray"

    @pytest.mark.parametrize("sizes", [{"tp": 2}, {"pp": 2}, {"pp": 2, "tp": 2}])
    def test_several_ranks_say_what_one_says(self, tiny: Tiny, sizes: dict[str, int]) -> None:
        many = split(tiny, **sizes)
        self.says_what_one_says(RayExecutor(*many), tiny, many[0])

    def test_gloo_says_what_one_says(self, tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
        """What ranks on several hosts meet in."""
        many = split(tiny, tp=2)
        both = RayExecutor(*many)
        monkeypatch.setattr(both, "_meet", lambda group, ranks: both._actors[0].port.remote(ranks[0].address))
        self.says_what_one_says(both, tiny, many[0])

    def says_what_one_says(self, executor: RayExecutor, tiny: Tiny, config: EngineConfig) -> None:
        one = UniprocExecutor(replace(tiny[0], wanted={}), *tiny[1:])
        try:
            self.ready(one, tiny[0])
            self.ready(executor, config)
            expected, found = self.play(one), self.play(executor)
        finally:
            one.close()
            executor.close()
        assert [r.tokens for r in found] == [r.tokens for r in expected]

    @pytest.mark.parametrize("rank", [0, 1])
    def test_an_actor_that_dies_is_one_failure(self, tiny: Tiny, rank: int) -> None:
        two = split(tiny, tp=2)
        executor = RayExecutor(*two)
        failures: list[Failure] = []
        executor.on_failure(failures.append)
        try:
            self.ready(executor, two[0])
            os.kill(executor._processes[rank].pid, signal.SIGKILL)
            row = NewRow("a", 0, [5], 1, [[1]], 0, SamplingParams(temperature=0))
            with pytest.raises(EngineDead, match=f"rank {rank}: its actor on .* died"):
                self.many_steps(executor, row)
            for _ in range(100):  # a thread tells it, when all ranks were told to end
                if failures:
                    break
                sleep(0.1)
            assert [failure.rank for failure in failures] == [rank]
        finally:
            executor.close()
        executor.close()

    @classmethod
    def many_steps(cls, executor: RayExecutor, row: NewRow) -> None:
        for step in range(100):
            cls.step(executor, StepPlan(step, new=[row], rows=[RowWork("a", 0, 0, 1, [], True)]))

    def test_ranks_end_with_the_executor(self, tiny: Tiny) -> None:
        executor = RayExecutor(*split(tiny, tp=2))
        executor.start()
        pids = [rank.pid for rank in executor._processes]
        assert len(set(pids)) == 2
        executor.close()
        for _ in range(100):
            if not any(Path(f"/proc/{pid}").exists() for pid in pids):
                break
            sleep(0.1)
        assert not any(Path(f"/proc/{pid}").exists() for pid in pids)

    def test_too_few_cpus(self, tiny: Tiny) -> None:
        executor = RayExecutor(*split(tiny, tp=2, threads=CPUS))
        with pytest.raises(ConfigError, match=f"2 ranks with {CPUS} CPUs each need {2 * CPUS} CPUs.*has {CPUS}"):
            executor.start()
        executor.close()

    def test_no_room(self, tiny: Tiny) -> None:
        """Two nodes are asked for, and there is one."""
        executor = RayExecutor(*split(tiny, tp=2), strategy="STRICT_SPREAD", seconds=1)
        with pytest.raises(ConfigError, match=r"found no room \(STRICT_SPREAD\).*of 1 nodes"):
            executor.start()
        executor.close()

    def test_a_rank_with_other_versions_is_refused(self, tiny: Tiny) -> None:
        here = about.about("a", "10.0.0.1", tiny[1], tiny[2])
        assert {"Python", "ray", "torch", "lmkit-core", "lmkit-executor-ray"} <= here.versions.keys()
        compare(here, [here, here])
        other = about.About(1, "b", "10.0.0.2", here.versions | {"torch": "1.0"}, here.weights)
        with pytest.raises(ConfigError, match=r"rank 1, on 10.0.0.2, has torch 1.0; here it is"):
            compare(here, [here, other])

    def test_a_rank_with_another_checkpoint_is_refused(self, tiny: Tiny, tmp_path: Path) -> None:
        files = tuple(tmp_path / path.name for path in tiny[2].files)
        for path, copy in zip(tiny[2].files, files, strict=True):
            copy.write_bytes(path.read_bytes())
        copied = replace(tiny[2], path=tmp_path, files=files)
        assert digest(copied) == digest(tiny[2])
        content = bytearray(files[0].read_bytes())
        content[-1] ^= 1
        files[0].write_bytes(content)
        here, other = (about.about("a", "10.0.0.1", tiny[1], checkpoint) for checkpoint in (tiny[2], copied))
        with pytest.raises(CheckpointError, match=r"rank 0, on 10.0.0.1, has another checkpoint at that path"):
            compare(here, [other])
        files[0].unlink()
        with pytest.raises(CheckpointError, match=f"rank 0, .*cannot read {files[0]}"):
            compare(here, [about.about("a", "10.0.0.1", tiny[1], copied)])


def test_an_address_where_nobody_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    with socket.create_server(("127.0.0.1", 0)) as server:
        free = server.getsockname()[1]
    with pytest.raises(ConfigError, match=f"no Ray cluster at 127.0.0.1:{free}: .*refused"):
        connect(f"127.0.0.1:{free}", 1)
    with pytest.raises(ConfigError, match="is not HOST:PORT"):
        connect("somewhere", 1)


def test_options() -> None:
    with pytest.raises(ValueError, match="Ray client"):
        Options(address="ray://10.0.0.1:10001")
    with pytest.raises(ValueError, match="STRICT_PACK"):
        Options(strategy="pack")


def test_ranks_of_one_node() -> None:
    """They share its memory."""
    found = [about.About(i, node, "10.0.0.1", {}, "") for i, node in enumerate("aba")]
    assert ranks_here(found) == [2, 1, 2]


def test_who_meets() -> None:
    config = EngineConfig(parallel=ParallelConfig(tp=2, pp=3))
    assert [list(group) for group in groups(config)] == [[0, 1], [2, 3], [4, 5], [0, 2, 4], [1, 3, 5]]
