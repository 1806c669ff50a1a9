"""A server as a process of ours: started, awaited, asked for its start-up phases and memory, stopped."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter, sleep
from urllib.request import urlopen

from lmkit.api import EngineError
from lmkit.config.environment import child_environment
from lmkit.config.schema import leaves
from lmkit_cli.settings import Sourced

POLL = 0.005  # seconds between looks at a server that starts
STOP_SECONDS = 20.0
LOG_LINES = 12  # shown when a server does not start


def free_port() -> int:
    """A port that nobody listens on now."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


class ServerProcess:
    """Runs `command` with "--port N" at its end; use it in a `with`. The process group is its own."""

    def __init__(
        self, command: Sequence[str], *, ready: str = "/ready", environment: Mapping[str, str] | None = None
    ) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._ready_path = ready
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115  closed by stop()
        self.began = perf_counter()
        self.process = subprocess.Popen(
            [*command, "--port", str(self.port)], stdin=subprocess.DEVNULL, stdout=self._log, stderr=self._log,
            env=child_environment(environment or {}), process_group=0,
        )  # fmt: skip

    def wait_ready(self, timeout: float = 600.0) -> float:
        """Seconds from the start of the process until it is ready. Raises EngineError when it ends before."""
        deadline = self.began + timeout
        while perf_counter() < deadline:
            if self.process.poll() is not None:
                raise EngineError(f"the server ended with status {self.process.returncode}:\n{self.log()}")
            try:
                self._get(self._ready_path)
                return perf_counter() - self.began
            except OSError:  # nobody listens yet, or not ready yet
                sleep(POLL)
        raise EngineError(f"the server was not ready within {timeout:.0f} s:\n{self.log()}")

    def phases(self) -> list[tuple[str, float]]:
        """What the server says of its start-up: phase, seconds."""
        return [(str(name), float(seconds)) for name, seconds in json.loads(self._get("/debug/startup"))["phases"]]

    def _get(self, path: str) -> bytes:
        """Raises OSError for a status other than 200, too."""
        with urlopen(self.url + path, timeout=10) as answer:
            return bytes(answer.read())

    def memory(self) -> int:
        """Bytes resident, of the process and all below it; a page that several share counts once."""
        return sum(resident(pid) for pid in tree(self.process.pid))

    def processor(self) -> list[float]:
        """Seconds of CPU so far, of the process and each below it."""
        return [processor(pid) for pid in tree(self.process.pid)]

    def log(self) -> str:
        """The last lines of its output."""
        self._log.seek(0)
        return "".join(self._log.readlines()[-LOG_LINES:])

    def stop(self) -> None:
        """SIGTERM, then SIGKILL. Idempotent."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        self._log.close()

    def __enter__(self) -> ServerProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


def lmkit_serve(settings: Sourced) -> ServerProcess:
    """`lmkit serve` with this interpreter and the same engine options, without an API key."""
    environment = {"LMKIT_API_KEY": ""}
    if settings.disable:
        environment["LMKIT_PLUGINS_DISABLE"] = " ".join(settings.disable)
    if settings.only:
        environment["LMKIT_PLUGINS_ONLY"] = " ".join(settings.only)
    command = [sys.executable, "-m", "lmkit", "serve", *serve_arguments(settings)]
    return ServerProcess(command, environment=environment)


def serve_arguments(settings: Sourced) -> list[str]:
    """The command-line options that say what `settings` says."""
    arguments = ["--no-plugins"] if settings.official_only else []
    for setting in settings.settings():
        leaf = leaves().get(setting.key)
        if setting.source == "default" or setting.value is None:
            continue
        if leaf is None:  # an option of a plugin
            arguments += [f"--{setting.key.removeprefix('plugins.')}", str(setting.value)]
        elif leaf.type is bool:
            arguments.append(leaf.flag if setting.value else f"--no-{leaf.flag.removeprefix('--')}")
        else:
            arguments += [leaf.flag, str(setting.value)]
    return arguments


def tree(pid: int) -> Iterator[int]:
    """A process and its descendants."""
    yield pid
    for children in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in _text(children).split():
            yield from tree(int(child))


def resident(pid: int) -> int:
    """Proportional set size in bytes; 0 where the system does not tell."""
    for line in _text(Path(f"/proc/{pid}/smaps_rollup")).splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) * 1024
    return 0


def processor(pid: int) -> float:
    """Seconds of CPU that a process and its threads took; 0 where the system does not tell."""
    fields = _text(Path(f"/proc/{pid}/stat")).rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK") if fields else 0.0


def machine_busy() -> float:
    """Seconds of CPU that everything on this machine took since it started; 0 where the system does not tell."""
    fields = _text(Path("/proc/stat")).partition("\n")[0].split()[1:]
    return sum(int(fields[i]) for i in (0, 1, 2, 5, 6)) / os.sysconf("SC_CLK_TCK") if fields else 0.0


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:  # it ended meanwhile
        return ""


@dataclass(frozen=True, slots=True)
class Startup:
    """One start of a server, up to its first token."""

    seconds: float  # from the start of the process to the first token
    phases: list[tuple[str, float]]  # the server's own, and the first token
    resident: int  # bytes after the first token


def startup(server: ServerProcess, first_token: Callable[[str], object]) -> Startup:
    """Waits for a server that has just been started, asks it for one token, stops it.

    `first_token(url)` returns when the token is there. What the phases do not explain is the time until this process
    saw that the server is ready.
    """
    with server:
        ready = server.wait_ready()
        asked = perf_counter()
        first_token(server.url)
        seconds = perf_counter() - asked
        return Startup(ready + seconds, [*server.phases(), ("first token", seconds)], server.memory())
