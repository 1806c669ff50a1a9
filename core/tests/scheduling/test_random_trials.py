"""The trial suite in small; `python -m lmkit_testing.trials 5000` is the large one, a session of its own."""

from __future__ import annotations

import logging

import pytest
from lmkit.scheduling.scheduler import Scheduler
from lmkit_testing.mutants import MUTANTS
from lmkit_testing.stepper import ArrivalOrder
from lmkit_testing.trials import Trial, hunt, main, run_trials

SUBTLE = {"first_is_the_victim", "fault_stays_cached"}  # hundreds of trials find them


@pytest.fixture(autouse=True)
def _silent(caplog: pytest.LogCaptureFixture) -> None:
    """Steps fail here on purpose, and to write a thousand tracebacks takes as long as the trials."""
    caplog.set_level(logging.CRITICAL, "lmkit.engine")


def test_trials_find_nothing_and_cover_everything():
    summary = run_trials(range(200))
    counts = summary.counts
    assert summary.trials == 200
    names = ("preemptions", "cached prompt tokens", "aborted", "failed requests", "with drafts", "with windows")
    for name in (*names, "of rows apart"):
        assert counts[name] > 10, f"trials hardly cover: {name}"


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.full] * (n in SUBTLE)) for n in MUTANTS])
def test_trials_find_the_mutant(name):
    assert hunt(name, range(1500)) is not None


def test_a_whole_scheduler_can_be_tried():
    for seed in range(20):
        Trial(seed, scheduler=lambda limits, kv: Scheduler(limits, kv, ArrivalOrder())).run()


def test_one_trial_from_the_command_line(capsys):
    assert main(["--seed", "3"]) == 0
    assert "trial 3" in capsys.readouterr().out
