"""Logs are bounded, tell clients nothing of the machine, and hold up nobody."""

from __future__ import annotations

import json
import logging
import os
import select
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from lmkit.api import EngineDead, ErrorInfo
from lmkit.logs import MAX_RECORD, MAX_WAITING, LogWriter, write_json, written_logs
from lmkit_python.front.run import Generation
from lmkit_testing.serving import scripted

log = logging.getLogger("lmkit.test-logs")


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    """(read, write) ends of a pipe that nobody reads yet."""
    ends = os.pipe()
    yield ends
    for end in ends:
        os.close(end)


def fill(write: int) -> int:
    """Fills the pipe, so that who writes to it waits from the first byte; returns the number of bytes."""
    os.set_blocking(write, False)
    num = 0
    try:
        while True:
            num += os.write(write, b"x")
    except BlockingIOError:
        return num
    finally:
        os.set_blocking(write, True)


def attach(writer: LogWriter) -> logging.Logger:
    logger = logging.Logger("lmkit.test-logs")
    logger.addHandler(writer)
    return logger


def test_nobody_waits_for_a_reader(pipe: tuple[int, int]) -> None:
    read, write = pipe
    filler = fill(write)
    writer = LogWriter(write)
    logger = attach(writer)

    def much() -> None:
        for i in range(3 * MAX_WAITING):
            logger.warning("%d %s", i, "x" * 1000)

    thread = threading.Thread(target=much, daemon=True)
    thread.start()
    thread.join(30)
    assert not thread.is_alive()
    assert writer.num_dropped >= MAX_WAITING

    while filler:
        filler -= len(os.read(read, filler))
    text = b""
    while b"lines of the log were dropped" not in text:
        text += os.read(read, 1 << 16)
    assert text.startswith(b"WARNING lmkit.test-logs: 0 xxx")
    writer._lines.put(None)
    while writer._thread.is_alive():
        os.read(read, 1 << 16) if select.select([read], [], [], 0.01)[0] else None
    writer.close()


def test_many_lines_are_written_together(pipe: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """In order, and a warning at once: whoever wrote it may be about to end."""
    read, write = pipe
    monkeypatch.setattr("lmkit.logs._PAUSE", 60.0)
    writer = LogWriter(write)
    logger = attach(writer)
    logger.info("0")
    assert os.read(read, 1 << 16) == b"INFO lmkit.test-logs: 0\n"
    for i in range(1, 200):
        logger.info("%d", i)
    assert not select.select([read], [], [], 0.1)[0]
    logger.warning("200")
    text = b""
    while not text.endswith(b"200\n"):
        text += os.read(read, 1 << 16)
    assert [int(line.split()[-1]) for line in text.splitlines()] == list(range(1, 201))
    logger.info("last")
    writer.close()
    assert os.read(read, 1 << 16) == b"INFO lmkit.test-logs: last\n"


def test_a_record_is_bounded(pipe: tuple[int, int]) -> None:
    read, write = pipe
    writer = LogWriter(write)
    logger = attach(writer)

    def deep(n: int) -> None:
        if n:
            deep(n - 1)
        raise ValueError("y" * 100_000)

    try:
        deep(300)
    except ValueError as e:
        logger.error("a request failed", exc_info=e)
    logger.warning("z" * 1_000_000)
    logger.warning("surrogate \ud800")
    writer.close()
    text = os.read(read, 1 << 20).decode()
    assert len(text) < 2 * MAX_RECORD + 100
    assert text.startswith("ERROR lmkit.test-logs: a request failed\nTraceback")
    assert "surrogate \\ud800" in text


def test_lines_may_be_json(pipe: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """One object a line, whatever a record has in it: its time, level and process, and what was told by name."""
    read, write = pipe
    writer = LogWriter(write, part="engine")
    monkeypatch.setattr(logging.getLogger(), "handlers", [writer, logging.NullHandler()])
    write_json()
    logger = attach(writer)
    logger.info("%(client)s %(path)s %(status)d", {"client": "::1", "path": "/v1", "status": 200, "level": "mine"})
    try:
        raise ValueError("two\nlines " + "y" * 100_000)
    except ValueError as e:
        logger.error("a request\nfailed", exc_info=e)
    logger.warning("surrogate \ud800 %s", object())
    writer.close()
    first, second, third = map(json.loads, os.read(read, 1 << 20).splitlines())
    del first["time"]
    assert first == {"level": "info", "process": "engine", "logger": "lmkit.test-logs", "message": "::1 /v1 200",
                     "client": "::1", "path": "/v1", "status": 200}  # fmt: skip
    assert (second["level"], second["message"]) == ("error", "a request\nfailed")
    assert second["error"].endswith("yyy")
    assert len(second["error"]) <= MAX_RECORD
    assert third["message"].startswith("surrogate \ud800")


def test_own_handlers_are_left_alone() -> None:
    root = logging.getLogger()
    before = list(root.handlers)
    assert before  # those of the test runner
    with written_logs():
        assert root.handlers == before


async def test_the_text_of_an_engine_error_stays_here(connect: Any, caplog: pytest.LogCaptureFixture) -> None:
    """Signals, paths and types of errors are for whoever runs the server."""
    secret = "the engine process was killed by signal SIGKILL at /srv/x.py"
    llm = scripted("abc", delay=0.01)
    client = connect(llm)
    events = Generation.events

    def failing(self: Any) -> Any:
        import asyncio

        asyncio.get_running_loop().call_later(0.02, llm.client.fail_next, error)  # type: ignore[attr-defined]
        return events(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Generation, "events", failing)
        for error in (
            EngineDead(secret, fix="see the kernel log").info(),
            ErrorInfo("engine", f"IndexError: {secret}", "set LMKIT_DEBUG=1"),
        ):
            response = await client.post("/v1/completions", json={"prompt": "a"})
            assert (response.status_code, response.json()["error"]["code"]) == (error.status, error.code)
            for part in ("SIGKILL", "srv", "kernel", "DEBUG", "IndexError"):
                assert part not in response.text
    assert "IndexError" in caplog.text
    assert "kernel log" not in caplog.text  # the supervisor says it, once

    llm.client._die(EngineDead(secret).info())  # type: ignore[attr-defined]
    for path in ("/v1/completions", "/health", "/ready"):
        response = await client.request("POST" if "v1" in path else "GET", path, json={"prompt": "a"})
        assert response.status_code == 503
        assert "SIGKILL" not in response.text
    body = {"prompt": "a", "stream": True}
    assert "SIGKILL" not in (await client.post("/v1/completions", json=body)).text


async def test_a_clients_mistake_leaves_no_trace(connect: Any, caplog: pytest.LogCaptureFixture) -> None:
    client = connect(scripted("a"))
    deep = "[" * 5000
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": deep}}
    messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
    for body in (deep, "{", json.dumps({"messages": messages}), '{"prompt": "\\ud800"}'):
        for path in ("/v1/chat/completions", "/v1/completions", "/tokenize"):
            assert (await client.post(path, content=body)).status_code == 400
    assert not [r for r in caplog.records if r.name.startswith("lmkit")]
