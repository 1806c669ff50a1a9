"""Conformance kit of schedulers: of policies (two key functions) and of whole schedulers."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from lmkit.api import EngineRequest, OrderPolicy, SchedulerSpec
from lmkit.scheduling.request import Request

from lmkit_testing.specs import PluginConformance
from lmkit_testing.strategies import engine_requests
from lmkit_testing.trials import Trial

NUM_TRIALS = 100
AS_KIT = [HealthCheck.function_scoped_fixture, HealthCheck.differing_executors]  # several classes inherit a test
SCHEDULER = ("add", "abort", "schedule", "update", "fail_running", "has_work", "stats", "check")  # the protocol


class SchedulerConformance(PluginConformance):
    """class TestMine(SchedulerConformance): plugin = "scheduler:mine"

    Random trials on the hash-model: every request ends, budgets and blocks are never exceeded, freed blocks return, the
    text is right whatever happens, and the same story gives the same plans.
    """

    torch_free_target = True

    def trial(self, spec: SchedulerSpec, target: Any, seed: int) -> Trial:
        if not hasattr(target, "schedule"):
            return Trial(seed, policy=target()).run()
        return Trial(seed, scheduler=target).run()

    @pytest.fixture
    def policy(self, spec: SchedulerSpec, target: Any) -> OrderPolicy:
        if hasattr(target, "schedule"):
            pytest.skip("a whole scheduler orders requests as it likes")
        return target()

    @pytest.mark.parametrize("start", range(0, NUM_TRIALS, 50))
    def test_random_trials(self, spec: SchedulerSpec, target: Any, start: int) -> None:
        """No starvation, no leak, no wrong token: `python -m lmkit_testing.trials` tells what a trial is."""
        for seed in range(start, start + 50):
            try:
                self.trial(spec, target, seed)
            except Exception as e:
                e.add_note(f"in trial {seed}")
                raise

    def test_same_story_same_plans(self, spec: SchedulerSpec, target: Any) -> None:
        for seed in range(20):
            plans = {self.trial(spec, target, seed).executor.digest.hexdigest() for _ in range(2)}
            assert len(plans) == 1, f"trial {seed} gives different plans"

    @settings(max_examples=50, deadline=None, suppress_health_check=AS_KIT)
    @given(a=engine_requests("a"), b=engine_requests("b"))
    def test_keys_are_stable_and_comparable(self, policy: OrderPolicy, a: EngineRequest, b: EngineRequest) -> None:
        first, second = _as_request(a, 1), _as_request(b, 2)
        for key in (policy.admit_key, policy.victim_key):
            assert isinstance(key(first), tuple)
            assert key(first) == key(first)
            assert sorted([key(first), key(second)]) == sorted([key(second), key(first)])

    def test_the_core_runs_it(self, spec: SchedulerSpec, target: Any) -> None:
        """What it declares is what it is."""
        wanted = ("admit_key", "victim_key") if not hasattr(target, "schedule") else SCHEDULER
        missing = [name for name in wanted if not callable(getattr(target, name, None))]
        assert not missing, f"{spec.target} lacks {missing}"


def _as_request(request: EngineRequest, order: int) -> Request:
    r = Request(request.id, request.params, len(request.token_ids), list(request.token_ids))
    r.priority, r.arrival, r.order = request.priority, request.arrival, order
    return r
