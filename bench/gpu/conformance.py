"""The conformance kits, on the device: pytest in this process, each outcome written down."""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path

import pytest
from lmkit_testing import PluginConformance
from machine import Machine
from report import Report

HERE = Path(__file__).parent
KIND = "GPU_BENCH_KIND"
SCRATCH = "GPU_BENCH_SCRATCH"
PROCESSES = 14  # that compile kernels, where xdist is there
# What a plugin is asked wherever it runs is not asked again.
ELSEWHERE = {name: None for name in dir(PluginConformance) if name.startswith("test_")}


def tested() -> Machine:
    """The machine, in the process of the tests."""
    return Machine(os.environ[KIND], True, Path(os.environ[SCRATCH]))


class Watch:
    """Counts outcomes, and hands failures over."""

    def __init__(self, report: Report) -> None:
        self.report = report
        self.counts = {"passed": 0, "failed": 0, "skipped": 0}
        self.reasons: set[str] = set()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when != "call" and report.passed:
            return
        self.counts[report.outcome] += 1
        if report.failed:
            text = report.longreprtext
            crash = getattr(report.longrepr, "reprcrash", None)
            self.report.fail(report.nodeid, (crash.message if crash else text)[:300], where=text[-2000:])
        elif report.skipped and isinstance(report.longrepr, tuple):
            self.reasons.add(report.longrepr[2].removeprefix("Skipped: "))

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.report.fail(report.nodeid, str(report.longrepr).strip().splitlines()[-1][:300])


def conform(file: str, machine: Machine, report: Report) -> None:
    """Runs the tests of a file beside this one. Nothing of the checkout's own configuration counts: it has kernels of
    Triton interpreted."""
    os.environ[KIND], os.environ[SCRATCH] = machine.kind, str(machine.scratch)
    os.environ.pop("TRITON_INTERPRET", None)
    watch = Watch(report)
    options = ["--noconftest", "-c", os.devnull, "--rootdir", str(HERE), "--import-mode=importlib", "-q"]
    options += ["-p", "no:cacheprovider", "-p", "no:randomly"]
    if machine.kind != "cpu" and find_spec("xdist"):
        os.environ["OMP_NUM_THREADS"] = "1"
        options += ["-n", str(min(PROCESSES, os.cpu_count() or 1))]
    else:
        options += ["-p", "no:xdist"]
    pytest.main([*options, str(HERE / file)], plugins=[watch])
    counts, name = watch.counts, file.removesuffix(".py").removeprefix("on_")
    if not counts["passed"]:
        report.fail(f"conformance: {name}", "no test passed")
    said = f"{counts['failed']} failed, {counts['skipped']} skipped"
    report.add(
        f"conformance: {name}", counts["passed"], "tests passed", row=True, said=said, reasons=sorted(watch.reasons)
    )
