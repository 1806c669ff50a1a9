"""Random trials of the scheduler with connectors that promise little; `nox -s kv` runs many more."""

from __future__ import annotations

import logging

import pytest
from lmkit_testing.kv_trials import MUTANTS, KVTrial, hunt
from lmkit_testing.trials import run_trials


@pytest.fixture(autouse=True)
def _quiet(caplog: pytest.LogCaptureFixture) -> None:
    """Steps fail here on purpose."""
    caplog.set_level(logging.CRITICAL, "lmkit.engine")


def test_no_token_changes() -> None:
    given = 0

    def trial(seed: int) -> KVTrial:
        nonlocal given
        done = KVTrial(seed)
        done.run()
        given += done.connector.num_given  # type: ignore[attr-defined]
        return done

    assert run_trials(range(60), trial).trials == 60
    assert given > 20, "the connectors were of use"


def test_a_fault_that_was_not_read_leaves_nothing() -> None:
    """A row wrote rubbish in a step whose result is lost with that of the next one, which failed."""
    assert KVTrial(1995).run()


@pytest.mark.parametrize("name", MUTANTS)
def test_injected_faults_are_found(name: str) -> None:
    assert hunt(name, range(35, 62)) is not None
