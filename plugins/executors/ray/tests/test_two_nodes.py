"""A rank on each of two nodes of a Ray cluster, and what happens when one of the nodes is gone."""

from __future__ import annotations

import gc
import os
import random
import warnings
from collections.abc import Iterator
from dataclasses import replace

import pytest

pytest.importorskip("ray", reason="Ray is not installed: pip install 'lmkit-executor-ray[ray]'")

import ray
from lmkit.config import ParallelConfig
from lmkit_executor_ray.executor import RayExecutor
from lmkit_testing import ExecutorConformance
from lmkit_testing.kills import Load
from ray.cluster_utils import Cluster

pytestmark = pytest.mark.slow

KILLS = int(os.environ.get("RAY_KILLS", "1"))


@pytest.fixture(scope="module")
def load(tmp_path_factory: pytest.TempPathFactory) -> Load:
    return Load(tmp_path_factory.mktemp("tiny") / "model", "ray")


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """This process is part of the first node, which is not killed."""
    ray.shutdown()
    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    made.add_node(num_cpus=1)
    yield made
    with warnings.catch_warnings():  # Ray leaves its processes to the system
        warnings.simplefilter("ignore", ResourceWarning)
        ray.shutdown()
        made.shutdown()
        gc.collect()


def spread(load: Load, cluster: Cluster) -> RayExecutor:
    """A rank on each node."""
    config = replace(load.tiny[0], parallel=ParallelConfig(tp=2))
    return RayExecutor(config, *load.tiny[1:], address=cluster.address, strategy="STRICT_SPREAD")


def test_ranks_on_two_nodes_say_what_one_says(load: Load, cluster: Cluster) -> None:
    executor = spread(load, cluster)
    try:
        ExecutorConformance.ready(executor, load.tiny[0])
        assert len(ray.nodes()) == 2
        assert list(load.row(executor, 0)) == load.expected
    finally:
        executor.close()


def test_a_node_that_is_killed_under_load_is_one_failure(load: Load, cluster: Cluster) -> None:
    """Within seconds; another node takes its place, and the next engine runs."""
    numbers = random.Random(17)
    for _ in range(KILLS):
        executor = spread(load, cluster)
        node = next(iter(cluster.worker_nodes))
        try:
            failure = load.killed(executor, node.kill_raylet, numbers.uniform(0.1, 1.0))
        finally:
            executor.close()
        assert "actor on" in failure.message
        cluster.remove_node(node, allow_graceful=False)
        cluster.add_node(num_cpus=1)
