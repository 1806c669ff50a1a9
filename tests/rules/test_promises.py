"""docs/security.md names a test for each promise, and everything that listens is known."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "security.md").read_text("utf-8")
ROWS = re.findall(r"^\| ([RS]\d+): .*$", PAGE, re.MULTILINE)
NAMED = re.findall(r"`([\w/.-]+\.py)::(\w+)`", PAGE)
PROMISES = [f"R{i}" for i in range(1, 13)] + [f"S{i}" for i in range(1, 12)]

# who accepts connections, and by which rules
LISTENERS = {
    "plugins/frontends/http/src/lmkit_http/listening.py": "serve and everything that is served by lmkit_http.bounded",
    "plugins/frontends/http/src/lmkit_http/run.py": "the same sockets, when they begin to listen",
    "plugins/frontends/http/src/lmkit_http/bounded.py": "the same sockets, when they begin to listen",
    "plugins/kv_connectors/stores/src/lmkit_stores/asked.py": "peers of KV connectors, where the user says",
    "plugins/executors/ray/src/lmkit_executor_ray/executor.py": "a port that ranks meet at, given up at once",
    "plugins/frontends/bench/src/lmkit_bench/server.py": "a free port is looked for, on loopback",
}
LISTENS = re.compile(
    r"uvicorn\.run\(|create_server\(|start_server\(|start_unix_server\(|\w*(sock|listener|server)\w*\.listen\("
)

# who asks other machines, at whose word: never at a request's
ASKERS = {
    "plugins/executors/ray/src/lmkit_executor_ray/cluster.py": "a Ray cluster that the user names",
    "plugins/frontends/bench/src/lmkit_bench/client.py": "the server that is measured",
    "plugins/frontends/bench/src/lmkit_bench/server.py": "the same",
    "plugins/frontends/cli/src/lmkit_cli/remote.py": "the server that the user names, from the command line",
    "plugins/frontends/http/src/lmkit_http/handing.py": "the first process, by a Unix socket",
    "plugins/frontends/split/src/lmkit_split/app.py": "the servers that the user names",
    "plugins/frontends/top/src/lmkit_top/server.py": "the server that the user names",
    "plugins/kv_connectors/stores/src/lmkit_stores/peers.py": "peers that the user names",
}
ASKS = re.compile(
    r"httpx\.(Async)?(Client|HTTPTransport)|httpx\.(get|post|stream)\(|urllib\.request|urlopen|^import requests|aiohttp"
    r"|http\.client|socket\.create_connection\(",
    re.MULTILINE,
)


def test_every_promise_has_a_line() -> None:
    assert ROWS == PROMISES


@pytest.mark.parametrize(("file", "test"), NAMED, ids=[f"{Path(file).stem}-{test}" for file, test in NAMED])
def test_the_tests_that_are_named_exist(file: str, test: str) -> None:
    path = ROOT / file
    assert path.is_file(), file
    assert re.search(rf"def {test}\(", path.read_text("utf-8")), f"{file} has no {test}"


def sources(what: re.Pattern[str]) -> set[str]:
    """Our modules in which it stands, tests left out."""
    found = set()
    for folder in ("core/src", "plugins"):
        for path in (ROOT / folder).rglob("*.py"):
            name = path.relative_to(ROOT).as_posix()
            if "/tests/" not in name and what.search(path.read_text("utf-8")):
                found.add(name)
    return found


def test_whatever_listens_is_known() -> None:
    """Another listener has the gate of all (lmkit_http.bounded), or its rules stand in docs/security.md and here."""
    assert sources(LISTENS) <= set(LISTENERS), sources(LISTENS) - set(LISTENERS)


def test_whoever_asks_other_machines_is_known() -> None:
    """What answers requests asks nobody: a client of HTTP that is new says here whose addresses it gets."""
    assert sources(ASKS) == set(ASKERS)


def test_security_is_where_people_look_for_it() -> None:
    text = (ROOT / "SECURITY.md").read_text("utf-8")
    assert "docs/security.md" in text
    assert "lmkit doctor --security" in text
