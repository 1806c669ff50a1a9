"""What a user types: `lmkit serve demo`, a question over HTTP, and the answer that the CPU gives."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

from machine import Machine
from report import Report

QUESTIONS = (("What is 17 + 25?", "17 + 25 = 42"), ("What is 8 + 5?", "8 + 5 = 13"))
COMMAND = "from lmkit_cli import main; main()"
LIMIT = 100.0  # seconds until it is ready


def measure(machine: Machine, report: Report, seconds: float) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-c", COMMAND, "serve", "demo", "--platform", machine.platform, "--port", str(port)]
    log, began = machine.scratch / "serve.txt", time.monotonic()
    with log.open("w") as out:
        server = subprocess.Popen(command, stdout=out, stderr=out, start_new_session=True)
    try:
        wait(server, f"http://127.0.0.1:{port}/ready", min(LIMIT, seconds - 10))
        report.add("demo ready", time.monotonic() - began, "s", row=True, said="lmkit serve demo, to /ready")
        for question, wanted in QUESTIONS:
            began = time.monotonic()
            said = answer(port, question)
            report.add(f"demo: {question}", said, row=True, said=f"{1e3 * (time.monotonic() - began):.0f} ms")
            if said != wanted:
                report.fail(f"demo: {question}", f"it said {said!r}, not {wanted!r}")
        server.send_signal(signal.SIGTERM)
        if status := server.wait(20):
            report.fail("demo ends", f"status {status}", log=tail(log))
    except (OSError, RuntimeError, subprocess.TimeoutExpired) as e:
        report.fail("serve", f"{type(e).__name__}: {e}", log=tail(log))
    finally:
        if server.poll() is None:
            os.killpg(server.pid, signal.SIGKILL)
            server.wait()


def wait(server: subprocess.Popen[Any], url: str, seconds: float) -> None:
    """Until that address answers. Raises RuntimeError where the server has ended, or the time."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if server.poll() is not None:
            raise RuntimeError(f"the server ended with status {server.returncode}")
        try:
            with urllib.request.urlopen(url, timeout=5):
                return
        except OSError:  # not yet
            time.sleep(0.05)
    raise RuntimeError(f"not ready after {seconds:.0f} s")


def answer(port: int, question: str) -> str:
    body = {"model": "demo", "messages": [{"role": "user", "content": question}], "temperature": 0}
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as reply:
        return str(json.load(reply)["choices"][0]["message"]["content"])


def tail(log: Path) -> str:
    return log.read_text()[-2000:]
