"""Runs the test suites of other servers against lmkit: python tests/suites/run.py FOLDER [SUITE...]

FOLDER has a checkout of each suite, under the name of its repository: llama.cpp. One that is not there is
skipped, and said. A test passes, or stands in left_out.toml with the reason why it cannot; anything else is a failure.
What is left out and passes all the same is named, so that the list gets shorter.
"""

from __future__ import annotations

import fnmatch
import os
import subprocess
import sys
import tempfile
import tomllib
import xml.etree.ElementTree as ET  # what pytest has written, here
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

HERE = Path(__file__).resolve().parent


def llama_cpp(checkout: Path, work: Path, left_out: Mapping[str, str]) -> tuple[Path, list[str], dict[str, str]]:
    """Folder, arguments of pytest, and environment: the suite starts what LLAMA_SERVER_BIN_PATH names."""
    tests = next(iter(sorted(checkout.rglob("server/tests/unit")))).parent
    program = work / "llama-server"
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{HERE / "llama_server.py"}" "$@"\n')
    program.chmod(0o755)
    environment = {"LLAMA_SERVER_BIN_PATH": str(program), "PYTHONPATH": str(HERE)}
    environment |= {"GITHUB_ACTION": "1", "PORT": "18890"}  # the former: half a minute for a server to start
    return tests, ["unit", "-m", "not slow", "-p", "llama_paths", *_ignored(left_out, tests)], environment


SUITES = {"llama.cpp": llama_cpp}


def _ignored(left_out: Mapping[str, str], folder: Path) -> list[str]:
    """Files that are left out as a whole are not even imported."""
    return [f"--ignore={path}" for name in left_out if "::" not in name for path in sorted(folder.glob(name))]


def outcomes(report: Path) -> dict[str, str]:
    """What became of each test: passed, failed or skipped."""
    found = {}
    for case in ET.parse(report).getroot().iter("testcase"):
        name = f"{case.get('classname', '').replace('.', '/')}.py::{case.get('name')}"
        ends = {child.tag for child in case}
        found[name] = "failed" if ends & {"failure", "error"} else "skipped" if "skipped" in ends else "passed"
    return found


def run(name: str, checkout: Path, left_out: Mapping[str, str]) -> bool:
    """Whether every test passed that is not left out."""
    with tempfile.TemporaryDirectory(prefix="lmkit-suite-") as folder:
        work = Path(folder)
        where, arguments, environment = SUITES[name](checkout, work, left_out)
        report = work / "report.xml"
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}", *arguments]
        log = work / "log"
        with log.open("wb") as file:
            subprocess.run(
                command, cwd=where, env={**os.environ, **environment}, stdout=file, stderr=file, timeout=5400
            )
        if not report.exists():
            print(log.read_text(errors="replace")[-4000:])
            return False
        ends = outcomes(report)
    reasons = {test: next((p for p in left_out if fnmatch.fnmatchcase(test, p)), None) for test in ends}
    counted = [test for test, pattern in reasons.items() if pattern is None]
    wrong = sorted(test for test in counted if ends[test] == "failed")
    counts = Counter(ends[test] for test in counted)
    print(
        f"{name}: {counts['passed']} passed, {counts['failed']} failed, {counts['skipped']} skipped of {len(counted)};"
    )
    print(f"  {len(ends) - len(counted)} left out, and {sum('::' not in p for p in left_out)} files")
    for test in wrong:
        print(f"  failed: {test}")
    for test in sorted(test for test, pattern in reasons.items() if pattern is not None and ends[test] == "passed"):
        print(f"  left out, but passes: {test}")
    return not wrong and bool(counted)


def main(folder: str, *names: str) -> int:
    """Exit status 0: all suites that are there pass."""
    left_out = tomllib.loads((HERE / "left_out.toml").read_text())
    good = True
    for name in names or SUITES:
        checkout = Path(folder) / name
        if not checkout.is_dir():
            print(f"{name}: skipped, there is no checkout of it at {checkout}")
            continue
        good &= run(name, checkout, left_out.get(name, {}))
    return 0 if good else 1


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    sys.exit(main(*sys.argv[1:]))
