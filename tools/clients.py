"""Writes docs/clients.md: python tools/clients.py [CLIENT...]

Each client of CLIENTS runs its tests against servers on real sockets; the page says which passed. Fails when one does
not.
"""

from __future__ import annotations

import re
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "clients.md"
# what is said -> the client's dist, the file of its tests, and which of them are its
CLIENTS: dict[str, tuple[str, str, str]] = {
    "OpenAI SDK, chat and completions": ("openai", "tests/wire/test_openai_sdk.py", ""),
    "OpenAI SDK, responses": (
        "openai", "plugins/dialects/responses/tests/test_responses_dialect.py", "the_client or many_prompts",
    ),
    "Anthropic SDK, messages": (
        "anthropic", "plugins/dialects/anthropic/tests/test_anthropic_dialect.py",
        "whole_and_streamed or call_and_its_result or why_it_ended or counted or test_models or errors or many_prompts",
    ),
}  # fmt: skip
_HEAD = """# Clients

Made by `nox -s clients`: each client's own library against a server on a socket, streamed and not. What the model says
is scripted here; the demo model speaks with them in `tests/e2e/test_demo.py`.

| client | version | passed | failed |
|---|---|---|---|
"""


class Outcomes:
    """A plugin of pytest that counts the cases of each test."""

    def __init__(self) -> None:
        self.passed: dict[str, int] = {}
        self.failed: dict[str, int] = {}

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed or (report.when == "call" and report.passed):
            found = self.failed if report.failed else self.passed
            name = re.sub(r"\[.*|^test_", "", report.nodeid.rpartition("::")[2]).replace("_", " ")
            found[name] = found.get(name, 0) + 1


def main(*names: str) -> int:
    """Runs the tests of the named clients, of all without names; only then is the page written."""
    rows, failed = [], False
    for client, (dist, file, which) in CLIENTS.items():
        if names and client not in names:
            continue
        outcomes = Outcomes()
        pytest.main(["-q", "-p", "no:cacheprovider", str(ROOT / file), *(["-k", which] if which else [])], [outcomes])
        failed |= bool(outcomes.failed) or not outcomes.passed
        rows.append(f"| {client} | `{dist}` {version(dist)} | {_said(outcomes.passed)} | {_said(outcomes.failed)} |\n")
    if not names:
        PAGE.write_text(_HEAD + "".join(rows), encoding="utf-8")
    return int(failed)


def _said(found: dict[str, int]) -> str:
    return "; ".join(f"{name} ({num})" if num > 1 else name for name, num in found.items()) or "-"


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
