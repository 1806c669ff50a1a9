"""A pytest plugin that records which tests each model architecture has passed, and can run a share of the tests.

pytest -p lmkit_testing.report --model-report models.json --shard 1/4 plugins/models tests/parity
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

from lmkit_testing.specs import find_plugin

CHECKS = {  # test -> its column; several tests may stand for one
    "test_float32": "logits",
    "test_bfloat16_logits": "bfloat16",
    "test_chunks_equal_the_whole": "chunks",
    "test_neighbours_do_not_matter": "batch",
    "test_two_ranks_equal_one": "ranks",
    "test_loading_is_strict": "loading",
    "test_greedy_tokens": "greedy",
}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--model-report", type=Path, help="write what each architecture has passed to this JSON file")
    parser.addoption("--shard", default="1/1", help="run only part I of N: I/N")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    part, parts = map(int, config.getoption("shard").split("/"))
    mine: list[pytest.Item] = []
    others: list[pytest.Item] = []
    for item in items:
        architecture = _architecture(item) or item.nodeid.partition("::")[0]
        (mine if zlib.crc32(architecture.encode()) % parts == part % parts else others).append(item)
    items[:] = mine
    config.hook.pytest_deselected(items=others)


def pytest_configure(config: pytest.Config) -> None:
    config.stash[FOUND] = {}


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[Any]) -> Generator[None, Any, None]:
    report = (yield).get_result()
    architecture, check = _architecture(item), CHECKS.get(getattr(item, "originalname", item.name))
    if architecture is None or check is None or (call.when != "call" and report.passed):
        return
    _, checks = item.config.stash[FOUND].setdefault(architecture, (_of(item, "plugin"), {}))
    checks.setdefault(check, set()).add(report.outcome)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Adds to what the file says already: shards may be run one after another."""
    path = session.config.getoption("model_report")
    if path is None:
        return
    rows = json.loads(path.read_text()) if path.exists() else {}
    for name, (plugin, found) in session.config.stash[FOUND].items():
        row = _row(plugin, found)
        row["checks"] = {**rows.get(name, {}).get("checks", {}), **row["checks"]}
        rows[name] = row
    path.write_text(json.dumps(dict(sorted(rows.items())), indent=1) + "\n")


# architecture -> its plugin, and the outcomes of each check
FOUND: pytest.StashKey[dict[str, tuple[str, dict[str, set[str]]]]] = pytest.StashKey()


def _of(item: pytest.Item, what: str) -> str:
    """The "architecture" or "plugin" that a test is parametrized with, or its class names; or ""."""
    parameters = getattr(getattr(item, "callspec", None), "params", {})
    return str(parameters.get(what) or getattr(getattr(item, "cls", None), what, ""))


def _architecture(item: pytest.Item) -> str | None:
    """The architecture that a test is about."""
    kind, _, name = _of(item, "plugin").partition(":")
    return _of(item, "architecture") or (name if kind == "model" else None)


def _row(plugin: str, found: dict[str, set[str]]) -> dict[str, Any]:
    """One row of the report: a check is passed when no test of it failed and one passed, "no" when all were skipped."""
    _, entry, spec = find_plugin(plugin)
    checks = {
        check: next((word for word in ("failed", "passed") if word in outcomes), "no")
        for check, outcomes in sorted(found.items())
    }
    features = sorted(getattr(spec, "features", ()))
    return {"dist": entry.dist, "features": features, "checks": checks}
