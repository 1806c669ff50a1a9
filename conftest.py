"""What all tests share: signals, garbage, and where the time of a run went."""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections import defaultdict
from collections.abc import Generator, Iterator
from importlib.util import find_spec
from pathlib import PurePosixPath
from typing import Any
from unittest.mock import patch

import pytest

pytest_plugins = ["lmkit_testing.quick"]
BEGAN: pytest.StashKey[float] = pytest.StashKey()  # CPU seconds of this process when an item's turn came


def pytest_configure() -> None:
    """A shell's background jobs ignore SIGINT, and so would the programs that tests start and interrupt.

    Kernels of Triton are interpreted here: it decides so when it is imported. Who compiles them does it in a process
    of its own.
    """
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ["TRITON_INTERPRET"] = "1"


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """What is collected stays until the end: to look for garbage in it takes a third of the time, and a second each
    time later."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.fixture(scope="session", autouse=True)
def _nothing_is_left_to_others() -> Iterator[None]:
    """Engines of this process may take what is free, without the gigabytes that the platform leaves to the rest of the
    host: they take megabytes, and a machine that does other work must not fail for that."""
    if "torch" not in sys.modules or find_spec("lmkit_platform_cpu") is None:
        yield
        return
    from lmkit_platform_cpu import platform

    with patch.object(platform, "reserve", lambda total: 0):
        yield


@pytest.fixture(scope="module", autouse=True)
def _process_stays_as_it_is() -> Iterator[None]:
    """An engine of this process changes it: its environment, and that subnormal numbers are rounded to zero."""
    environment = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(environment)
    if torch := sys.modules.get("torch"):
        torch.set_flush_denormal(False)


def cpu_seconds() -> float:
    """Of this process and of those it started that have ended."""
    return sum(os.times()[:4])


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    item.stash[BEGAN] = cpu_seconds()
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[Any]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """The report of the last phase carries the CPU seconds of all, to the process that prints."""
    report = yield
    if call.when == "teardown":
        report.cpu = cpu_seconds() - item.stash[BEGAN]  # type: ignore[attr-defined]
    return report


def folder_of(nodeid: str) -> str:
    """core/tests/text, tests/e2e, plugins/models: the row of a test in the table."""
    parts = PurePosixPath(nodeid.partition("::")[0]).parts[:-1]
    return "/".join(parts[:2] if parts[0] in ("plugins", "tests") else parts[:3])


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Time by folder, and what was skipped because the test material is not there."""
    reports = [r for found in terminalreporter.stats.values() for r in found if isinstance(r, pytest.TestReport)]
    rows: dict[str, list[float]] = defaultdict(lambda: [0, 0.0, 0.0])
    for report in reports:
        row = rows[folder_of(report.nodeid)]
        row[0] += report.when == "teardown"
        row[1] += report.duration
        row[2] += getattr(report, "cpu", 0.0)
    if len(rows) > 1:
        terminalreporter.section("durations by folder")
        terminalreporter.write_line(f"{'tests':>7} {'seconds':>8} {'of CPU':>8}")
        for name, (count, seconds, cpu) in sorted(rows.items(), key=lambda row: -row[1][1]):
            terminalreporter.write_line(f"{count:7d} {seconds:8.1f} {cpu:8.1f}  {name}")
    reasons = [str(r.longrepr[2]) for r in reports if r.skipped and isinstance(r.longrepr, tuple)]
    if missing := sum("shared/data" in reason for reason in reasons):
        terminalreporter.write_line(f"{missing} tests were skipped: ../shared/data, their material, is not there")
