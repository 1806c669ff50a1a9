"""The official JSON Schema test suite: no backend lets an invalid instance through; what is narrower is explained."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

from .suite import PAGE, SUITE, backend_of, page, run

pytestmark = pytest.mark.skipif(not SUITE.is_dir(), reason="needs the test suite of ../shared/data")


@pytest.mark.parametrize(("name", "taken"), [("llguidance", 295), ("xgrammar", 50)])
def test_invalid_instances_cannot_be_generated_and_valid_ones_can(name: str, taken: int) -> None:
    if find_spec(name) is None:
        pytest.skip(f"{name} is not installed here")
    files = list(run(backend_of(name)))
    assert [f"{f.name}: {w}" for f in files for w in f.wrong] == []
    assert [f"{f.name}: {u}" for f in files for u in f.unexplained] == []
    assert sum(f.num_schemas - len(f.refused) for f in files) >= taken
    assert all(reason for f in files for reason in f.refused.values())


def test_the_page_is_current() -> None:
    shown = page().split("## xgrammar")[0].split("Narrower than")[0].strip()  # what the default set has
    assert shown in PAGE.read_text(encoding="utf-8"), "run: python -m tests.structured.suite --write"
