"""The engine process: `python -m lmkit.engine.process FD`. I/O threads around one engine thread (the main one).

FD is its end of a socket. It ends when told to, when the engine fails, and when the parent's end of the socket closes,
however that came about.
"""

from __future__ import annotations

import faulthandler
import gc
import logging
import os
import signal
import socket
import sys
from collections import deque
from contextlib import suppress
from importlib import import_module
from queue import SimpleQueue
from threading import Condition, Event, Thread
from time import perf_counter, sleep

import msgspec

from lmkit.api import LmkitError, blame
from lmkit.config import from_dict
from lmkit.config.environment import adopt_environment, debug
from lmkit.engine.loop import EngineLoop
from lmkit.engine.messages import (
    Command,
    Failed,
    Phase,
    Ready,
    Report,
    Splitter,
    Start,
    Stop,
    decode_command,
    encode,
    info_of,
)
from lmkit.logs import written_logs
from lmkit.plugins import load_ref, load_target

log = logging.getLogger("lmkit.engine")

CHUNK = 1 << 18  # bytes per read
GRACE = 5.0  # seconds the engine thread gets to end after the parent is gone
AHEAD = (  # what engines, and torch, need besides torch: imported while the parent still finds out what to build
    "lmkit.engine.core", "lmkit_structured_output_masks.output", "lmkit.engine.intake", "lmkit.plugins.host",
    "lmkit.scheduling.scheduler", "asyncio", "multiprocessing.connection", "torchgen.model", "unittest.mock",
)  # fmt: skip


class Sender:
    """Frames to the parent. Sends at once when the socket takes it; what it does not take waits for a thread.

    So a parent that does not read costs memory here, never time of the engine thread.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._backlog: deque[bytes] = deque()
        self._changed = Condition()
        self._closed = False
        self._thread = Thread(target=self._drain, name="lmkit-send", daemon=True)
        self._thread.start()

    def send(self, report: Report) -> None:
        frame = encode(report)
        with self._changed:
            if not self._backlog:
                frame = frame[self._try(frame) :]
            if frame:
                self._backlog.append(frame)
                self._changed.notify()

    def _try(self, frame: bytes) -> int:
        """Bytes the socket took without waiting."""
        try:
            return self._sock.send(frame, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
        except (BlockingIOError, InterruptedError):
            return 0
        except OSError:  # the parent is gone; the reader thread deals with that
            return len(frame)

    def _drain(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._backlog or self._closed)
                if not self._backlog:
                    return
                frame = self._backlog[0]
            try:
                self._sock.sendall(frame)
            except OSError:
                return
            with self._changed:
                self._backlog.popleft()

    def close(self) -> None:
        """Waits until everything was taken, or the parent is gone."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join(GRACE)


class Commands:
    """Commands of the parent. When the parent is gone, the last one is Stop, and the process ends soon after."""

    def __init__(self, sock: socket.socket) -> None:
        self.inbox: SimpleQueue[Command] = SimpleQueue()
        self._sock = sock
        self._splitter = Splitter()
        self._parent_left = Event()

    def first(self) -> Start:
        """The Start command. Raises EOFError when the parent is gone."""
        while data := self._sock.recv(CHUNK):
            for payload in self._splitter.feed(data):
                start = decode_command(payload)
                assert isinstance(start, Start), start
                return start
        raise EOFError("the parent closed the connection")

    def follow(self) -> None:
        """From now on a thread reads what comes, also while the engine is still being assembled."""
        Thread(target=self._follow, name="lmkit-receive", daemon=True).start()

    def _follow(self) -> None:
        try:
            while data := self._sock.recv(CHUNK):
                for payload in self._splitter.feed(data):
                    self.inbox.put(decode_command(payload))
        except OSError:
            pass
        self.inbox.put(Stop())
        self._parent_left.set()
        sleep(GRACE)
        os._exit(1)  # the engine thread hangs in native code, or is still loading

    def read_to_the_end(self) -> None:
        """Waits until the parent, which was told of a failure, is gone.

        A socket that is closed while commands lie in it resets the connection, and what was told last is lost.
        """
        with suppress(OSError):
            self._sock.shutdown(socket.SHUT_WR)
        self._parent_left.wait(GRACE)


def serve(sock: socket.socket) -> int:
    """Runs one engine for the parent at the other end of `sock`. Returns the exit status."""
    commands, sender = Commands(sock), Sender(sock)
    try:
        start = commands.first()
    except (EOFError, OSError):
        return 0
    commands.follow()
    adopt_environment(start.environment)
    began = perf_counter()
    try:
        make = load_ref(start.factory, "engine factory")
        if (executor := start.resolved.choice("executor")) is not None:
            load_target(executor)  # imports what runs models
        imported = perf_counter() - began
        engine = make(
            from_dict(start.config),
            start.resolved,
            start.checkpoint,
            lambda phase, done, total, unit="B": sender.send(Phase(phase, done, total, unit)),
        )
    except BaseException as error:  # a plugin may raise SystemExit, too
        error = blame(error, start.resolved.all_choices(), in_full=True)
        if debug() or not isinstance(error, LmkitError):
            log.error("the engine cannot start", exc_info=error)
        sender.send(Failed(info_of(error)))
        sender.close()
        commands.read_to_the_end()
        return 1
    gc.enable()
    gc.freeze()  # what lives now lives as long as the process: collections need not look at it, now or later
    phases = (("import", imported), *engine.facts.phases)
    sender.send(Ready(msgspec.structs.replace(engine.facts, phases=phases)))
    try:
        ended = EngineLoop(engine, sender.send, commands.inbox).run()
    finally:
        engine.close()
    sender.close()
    if not ended:
        commands.read_to_the_end()
    return 0 if ended else 1


def main(fd: int) -> int:
    gc.disable()  # until the engine is built: what is imported stays, and looking at it again and again takes 0.15 s
    faulthandler.enable()  # a crash in native code, and SIGABRT from the parent, print the stacks of all threads
    for number in (signal.SIGINT, signal.SIGTERM):  # the parent decides: it drains first
        signal.signal(number, signal.SIG_IGN)
    for name in AHEAD:
        with suppress(ImportError):  # whoever needs it says so
            import_module(name)
    pattern = "%(asctime)s engine %(levelname)s %(message)s"
    with written_logs(pattern, logging.INFO, "engine"), socket.socket(fileno=fd) as sock:
        sock.set_inheritable(False)
        return serve(sock)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
