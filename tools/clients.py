"""Writes docs/clients.md: python tools/clients.py [CLIENT...]

Each client of SCRIPTED runs its tests against servers on real sockets in this environment, each of
tests/clients/clients.toml its checks in an environment of its own against `lmkit serve demo`; the page says what
passed. Fails when something does not; the SDKs' own tests (tools/sdk_suites.py) are reported only. Environments are
kept in CLIENT_ENVIRONMENTS, .nox/client-environments without.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

ROOT = Path(__file__).parents[1]
CHECKS = ROOT / "tests" / "clients"
PAGE = ROOT / "docs" / "clients.md"
ENVIRONMENTS = Path(os.environ.get("CLIENT_ENVIRONMENTS", ROOT / ".nox" / "client-environments")).resolve()
# what is said -> the client's dist, the file of its tests, and which of them are its
SCRIPTED: dict[str, tuple[str, str, str]] = {
    "OpenAI SDK, chat and completions": ("openai", "tests/wire/test_openai_sdk.py", ""),
    "OpenAI SDK, responses": (
        "openai", "plugins/dialects/responses/tests/test_responses_dialect.py", "the_client or many_prompts",
    ),
    "Anthropic SDK, messages": (
        "anthropic", "plugins/dialects/anthropic/tests/test_anthropic_dialect.py",
        "whole_and_streamed or call_and_its_result or why_it_ended or counted or test_models or errors or many_prompts",
    ),
}  # fmt: skip
_HEAD = f"""# Clients

Made by `nox -s clients`: each client's own library against a server on a socket, streamed and not. A number in
parentheses says how many cases there were. Results of {date.today():%d %B %Y}.

"""
_TABLE = "| client | version | passed | failed |\n|---|---|---|---|\n"
_OWN = """## Against `lmkit serve demo`

Each in an environment of its own, pinned by `tests/clients/clients.toml`; the checks stand beside it. *Not understood*:
the request is served and the answer well formed, but the demo model, which has three million parameters, is not right.

"""
_HERE = """
## Against scripted models

What the model says is given by the tests, so that each event of a stream is known.

"""
Found = tuple[Counter[str], Counter[str], Counter[str]]  # cases of each test: passed, failed, not understood


class Outcomes:
    """A plugin of pytest that counts the cases of each test."""

    def __init__(self) -> None:
        self.passed, self.failed = Counter[str](), Counter[str]()

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed or (report.when == "call" and report.passed):
            found = self.failed if report.failed else self.passed
            found[_name(report.nodeid.rpartition("::")[2])] += 1


def main(*names: str) -> int:
    """Runs the checks of the named clients, of all without names; only then is the page written."""
    own = tomllib.loads((CHECKS / "clients.toml").read_text(encoding="utf-8"))
    if wrong := set(names) - own.keys() - SCRIPTED.keys():
        raise SystemExit(f"no client {', '.join(sorted(wrong))}; there are {', '.join([*own, *SCRIPTED])}")
    rows: list[str] = []
    failed = False
    with tempfile.TemporaryDirectory() as folder, serving(Path(folder)) as env:
        for client, about in own.items():
            if not names or client in names:
                found = checked(about["packages"], about["checks"], env)
                failed |= bool(found[1]) or not found[0]
                rows.append(_row(client, about["packages"][0], found))
    page = _HEAD + _OWN + _TABLE + "".join(rows) + _HERE + _TABLE
    for client, (dist, file, which) in SCRIPTED.items():
        if not names or client in names:
            outcomes = Outcomes()
            pytest.main(
                ["-q", "-p", "no:cacheprovider", str(ROOT / file), *(["-k", which] if which else [])], [outcomes]
            )
            failed |= bool(outcomes.failed) or not outcomes.passed
            page += _row(client, f"{dist}=={version(dist)}", (outcomes.passed, outcomes.failed, Counter()))
    if not names:
        import sdk_suites  # here: what it imports must not be there before pytest

        page += "\n" + sdk_suites.section()
        PAGE.write_text(page, encoding="utf-8")
    return int(failed)


@contextmanager
def serving(folder: Path) -> Iterator[dict[str, str]]:
    """The environment of checks: where the demo chats, and where it embeds."""
    env, processes = dict(os.environ), []
    try:
        mcp = folder / "mcp.json"
        program = {"command": sys.executable, "args": [str(CHECKS / "mcp_weather.py")]}
        mcp.write_text(json.dumps({"mcpServers": {"weather": program}}))
        dialects = ("--dialect.batches.dir", str(folder / "batches"), "--dialect.responses.mcp", str(mcp))
        for name, more in (("LMKIT_URL", dialects), ("LMKIT_EMBED_URL", ("--task", "embed"))):
            output = folder / name
            command = [sys.executable, "-m", "lmkit", "serve", "demo", "--port", "0", *more]
            with output.open("w") as file:
                processes.append(subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT))
            while not (found := re.search(r"curl (http://\S+)/v1", output.read_text())):
                if processes[-1].poll() is not None:
                    raise SystemExit(output.read_text())
                time.sleep(0.1)
            env[name] = found[1]
        yield env
    finally:
        for process in processes:
            process.terminate()
            process.wait()


def checked(packages: list[str], checks: str, env: dict[str, str]) -> Found:
    """Runs the checks of a client in its environment, which is made where it is not there."""
    folder = ENVIRONMENTS / Path(checks).stem
    report = folder / "report.xml"
    if checks.endswith(".mjs"):
        _installed(folder, packages, ["npm", "install", "--silent", "--prefix", str(folder), *packages])
        shutil.copy(CHECKS / checks, folder)  # modules are looked for beside it
        command = [str(folder / "node_modules/.bin/node"), "--test", "--test-reporter=junit",
                   f"--test-reporter-destination={report}", str(folder / checks)]  # fmt: skip
    else:
        python = str(folder / "bin" / "python")
        if not Path(python).exists():
            subprocess.run(["uv", "venv", "-q", "--seed", str(folder)], check=True)
        packages = ["pytest", "pytest-timeout", *packages]
        _installed(folder, packages, ["uv", "pip", "install", "-q", "--python", python, *packages])
        arguments = ["-c", str(CHECKS / "pytest.ini"), "--rootdir", str(CHECKS), "--confcutdir", str(CHECKS)]
        command = [python, "-m", "pytest", *arguments, f"--junitxml={report}", str(CHECKS / checks)]
    report.unlink(missing_ok=True)
    ended = subprocess.run(command, env=env, check=False, cwd=folder).returncode
    if not report.exists():
        raise SystemExit(f"{checks} ended with {ended} and left no report")
    return _read(report)


def _installed(folder: Path, packages: list[str], command: list[str]) -> None:
    """Installs what is not installed yet."""
    folder.mkdir(parents=True, exist_ok=True)
    record, wanted = folder / "installed", "\n".join(packages)
    if not record.exists() or record.read_text() != wanted:
        subprocess.run(command, check=True)
        record.write_text(wanted)


def _read(report: Path) -> Found:
    """What a report in JUnit's format says."""
    found = Counter[str](), Counter[str](), Counter[str]()
    for case in ElementTree.parse(report).iter("testcase"):
        skipped = case.find("skipped")
        name = _name(case.get("name") or "")
        if case.find("failure") is not None or case.find("error") is not None:
            found[1][name] += 1
        elif skipped is None:
            found[0][name] += 1
        elif skipped.get("type") == "pytest.xfail":
            found[2][name] += 1
    return found


def _name(test: str) -> str:
    return re.sub(r"\[.*|^test_", "", test).replace("_", " ")


def _row(client: str, package: str, found: Found) -> str:
    name, number = re.fullmatch(r"(.+?)(?:\[.*\])?(?:==|@)([\d.]+)", package).groups()  # type: ignore[union-attr]
    passed, failed, small = found
    wrong = _said(failed) + (f"; not understood: {_said(small)}" if small else "")
    return f"| {client} | `{name}` {number} | {_said(passed)} | {wrong.removeprefix('-; ')} |\n"


def _said(found: Counter[str]) -> str:
    return "; ".join(f"{name} ({num})" if num > 1 else name for name, num in found.items()) or "-"


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
