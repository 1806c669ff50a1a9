"""The trials of drafts in small; `nox -s drafts` runs 100,000."""

from __future__ import annotations

import logging

import pytest
from lmkit_testing.draft_trials import FAULTS, MUTANTS, TREE_FAULTS, DraftTrial, hunt, trials


@pytest.fixture(autouse=True)
def _silent(caplog: pytest.LogCaptureFixture) -> None:
    """Steps fail here on purpose."""
    caplog.set_level(logging.CRITICAL, "lmkit.engine")


def test_trials_find_nothing_and_cover_everything() -> None:
    counts = trials(range(120)).counts
    assert counts["with drafts"] == 120
    assert counts["drafts"] > 2 * counts["accepted drafts"] > 2000
    for name in ("preemptions", "cached prompt tokens", "aborted", "failed requests", "with windows"):
        assert counts[name] > 10, f"trials hardly cover: {name}"
    assert sum(DraftTrial(seed).sort == "tree" for seed in range(120)) > 20


@pytest.mark.parametrize("name", [*FAULTS, *TREE_FAULTS, *MUTANTS])
def test_trials_find_the_fault(name: str) -> None:
    assert hunt(name, range(200)) is not None
