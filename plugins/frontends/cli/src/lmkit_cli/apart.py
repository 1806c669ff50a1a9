"""What plugins do when they are imported, asked and probed, found out in processes of their own.

The doctor runs this file in a fresh interpreter, which forks once for each module: each starts with lmkit.api imported
and nothing else. A module that does not come to an end, or ends its process, is named with what it was doing. What it
started is ended with it, and so is everything when whoever asked, who holds the other end of standard input, is gone.
"""

from __future__ import annotations

import ctypes
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from importlib import import_module
from typing import Any

import msgspec
from lmkit.api import DeviceInfo, DialectSpec, DoctorCheck, PlatformSpec, Unavailable
from lmkit.kinds import KINDS
from lmkit.plugins.refs import load_ref

HEAVY = ("torch", "numpy", "triton", "transformers", "tokenizers", "pydantic", "fastapi")  # not in a hooks module
MAX_ITEMS = 10_000
PR_SET_PDEATHSIG = 1  # linux/prctl.h
CHECKS = "lmkit_doctor_checks"
IMPORTING = "importing it"


class Report(msgspec.Struct, frozen=True):
    """One thing that a module did. Several of one module come in the order in which they were done."""

    module: str
    doing: str  # IMPORTING, "lmkit_platforms", "the probe of cuda"
    seconds: float = 0.0
    heavy: list[str] = []  # modules that importing it imported
    trace: str = ""  # of what it raised
    ended: str = ""  # how its process ended, where it did not go on: "has not ended after 30 s"
    problem: str = ""  # what a check of its own found
    level: str = "error"  # of the problem
    routes: list[str] = []  # "POST /path" of a dialect
    mark: str | None = None  # the header by which requests are that dialect's


def examine_apart(modules: Sequence[str], limit: float, *, dialects: bool = False) -> list[Report]:
    """Findings about the imports of `modules`, of which each step may take `limit` seconds. No module is imported here.

    With `dialects` these are imported, to learn their routes.
    """
    if not modules:
        return []
    environment = os.environ | {"PYTHONPATH": ":".join(p for p in sys.path if p)}
    with subprocess.Popen(
        [sys.executable, "-m", "lmkit_cli.apart", str(limit), str(int(dialects)), *modules],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        return [msgspec.json.decode(line, type=Report) for line in process.stdout]


def main(limit: float, dialects: bool, modules: Sequence[str]) -> None:
    out = os.dup(1)
    os.dup2(2, 1)  # what plugins print is no report
    before = set(sys.modules)
    for module in modules:
        reader, writer = os.pipe()
        pid = os.fork()
        if not pid:
            os.setsid()  # a group: what the module starts ends with it
            if sys.platform == "linux":  # and so does all where even this process is killed
                ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            os.close(reader)
            try:
                _examine(module, before, writer, dialects)
            finally:
                os._exit(0)
        os.close(writer)
        try:
            with os.fdopen(reader, "rb") as steps:
                ended, doing = _watch(pid, steps, limit, out)
        finally:
            _end(pid)
        if ended:
            os.write(out, msgspec.json.encode(Report(module, doing, ended=ended)) + b"\n")


def _watch(pid: int, steps: Any, limit: float, out: int) -> tuple[str, str]:
    """Passes reports on until the process has said that it is done; else how it ended, and what it was doing."""
    doing, deadline, buffered = IMPORTING, time.monotonic() + limit, b""
    while True:
        ready = select.select([0, steps], [], [], max(deadline - time.monotonic(), 0))[0]
        if 0 in ready:  # whoever asked is gone
            _end(pid)
            sys.exit(1)
        if not ready:
            return f"has not ended after {limit:g} s", doing
        read = os.read(steps.fileno(), 1 << 16)
        *lines, buffered = (buffered + read).split(b"\n")
        for line in lines:
            report: dict[str, Any] = json.loads(line)
            if "next" not in report:
                os.write(out, line + b"\n")
            elif report["next"] is None:
                return "", ""
            else:
                doing, deadline = report["next"], time.monotonic() + limit
        if not read:
            status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            how = f"exit status {status}" if status >= 0 else signal.Signals(-status).name
            return f"ended the process ({how})", doing


def _end(pid: int) -> None:
    """Ends a child with all that it started, and waits for it."""
    try:
        os.killpg(pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        pass
    try:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    except (ProcessLookupError, ChildProcessError):
        pass


def _examine(module: str, before: set[str], writer: int, dialects: bool) -> None:
    """In the child: one report for each step, with what comes next said ahead of it."""

    def say(report: Any) -> None:
        os.write(writer, msgspec.json.encode(report) + b"\n")

    def step(doing: str, function: Callable[[], Any], **more: Any) -> Any:
        say({"next": doing})
        start = time.perf_counter()
        try:
            found = function()
        except BaseException:
            say(Report(module, doing, trace=traceback.format_exc(), **more))
            return None
        seconds = time.perf_counter() - start
        say(Report(module, doing, seconds, [m for m in HEAVY if m in sys.modules and m not in before]))
        return found

    imported = step(IMPORTING, lambda: import_module(module))
    for thread in threading.enumerate():
        if thread is not threading.main_thread() and not thread.daemon:
            thread.join(1.0)
            if thread.is_alive():  # whoever imports it would not come to an end either
                say(Report(module, IMPORTING, ended=f"left a thread that has not ended: {thread.name}"))
    for hook in [*(kind.hook for kind in KINDS), CHECKS] if imported else ():
        if not hasattr(imported, hook):
            continue
        found = step(hook, lambda hook=hook: _listed(getattr(imported, hook)()))  # type: ignore[misc]
        for item in found or ():
            if isinstance(item, PlatformSpec):
                step(f"the probe of {item.name}", lambda item=item: _probed(item))  # type: ignore[misc]
            elif isinstance(item, DoctorCheck):
                say({"next": f"the check {item.name}"})
                _check(module, item, say)
            elif isinstance(item, DialectSpec) and dialects:
                doing = f"the routes of {item.name}"
                target = step(doing, lambda item=item: load_ref(item.target, item.name))  # type: ignore[misc]
                if target is not None:
                    step(doing, lambda doing=doing, target=target: say(_routes(module, doing, target)))  # type: ignore[misc]
            elif hook == CHECKS:
                say(Report(module, hook, problem=f"{hook} gave {item!r:.80}, no DoctorCheck"))
    say({"next": None})


def _listed(items: Iterable[Any]) -> list[Any]:
    found = []
    for item in items:
        found.append(item)
        if len(found) > MAX_ITEMS:
            raise ValueError(f"it yields more than {MAX_ITEMS} items")
    return found


def _probed(spec: PlatformSpec) -> None:
    found = load_ref(spec.probe, spec.name)()
    if not isinstance(found, Unavailable) and not (found and all(isinstance(d, DeviceInfo) for d in found)):
        raise TypeError(f"{spec.probe} gave {found!r:.80}, neither devices nor Unavailable")


def _routes(module: str, doing: str, target: Any) -> Report:
    return Report(module, doing, routes=[*target.routes, *target.light_routes], mark=target.mark)


def _check(module: str, check: DoctorCheck, say: Callable[[Any], object]) -> None:
    try:
        problem = load_ref(check.target, module)()
        if problem:
            say(Report(module, f"the check {check.name}", problem=str(problem), level=check.level))
    except BaseException:
        say(Report(module, f"the check {check.name}", trace=traceback.format_exc()))


if __name__ == "__main__":
    main(float(sys.argv[1]), bool(int(sys.argv[2])), sys.argv[3:])
