"""Work on what strangers wrote, in a process that may be killed.

`Killable` is the parent's end. The child is `python -m MODULE`, whose main calls `serve`: payloads come and go as
frames on its stdin and stdout, one at a time, and each is handled under the kernel's limits of CPU time and memory.
When one is exceeded the process dies, the caller learns why, and the next payload is handled by a fresh one.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import struct
import subprocess
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from threading import RLock
from time import monotonic
from typing import Any

MAX_PAYLOAD = 256 << 20  # bytes
_HEADER = struct.Struct(">QdQ")  # bytes of the payload, seconds of CPU time, bytes of memory; 0: no limit
OUT_OF_MEMORY = 77  # exit status
_KEPT = 256 << 20  # bytes by which a process may have grown when it takes the next payload


@dataclass(frozen=True, slots=True)
class Limits:
    """What one payload may take."""

    cpu_seconds: float
    nbytes: int  # of memory, beyond what the process has before it
    seconds: float  # of the clock, however busy the machine is; the only limit where the kernel has no other


class Unfinished(Exception):
    """There is no answer, and the process is gone. `lasting`: there would be none next time either.

    `died`: not of a limit.
    """

    def __init__(self, reason: str, *, lasting: bool, died: bool = False) -> None:
        super().__init__(reason)
        self.lasting, self.died = lasting, died


class Killable:
    """One process, started when it is needed. Thread-safe; one payload at a time."""

    def __init__(self, module: str, extra: Mapping[str, str] | None = None) -> None:
        """`extra`: variables of its environment."""
        self._module, self._extra = module, dict(extra or {})
        self._process: subprocess.Popen[bytes] | None = None
        self._end: Callable[[], Any] = lambda: None
        self._lock = RLock()  # of the process's pipes
        self._closed = False

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def start(self) -> None:
        """Also done by `ask`. Raises Unfinished."""
        with self._lock:
            if not self.running:
                self._end()
                self._spawn()

    def ask(self, payload: bytes, limits: Limits) -> bytes:
        """What `handle` returned in the process. Raises Unfinished."""
        with self._lock:
            self.start()
            try:
                return self._exchange(payload, limits)
            except _Retired:
                self.start()
                return self._exchange(payload, limits)

    def close(self) -> None:
        """Idempotent, and for good. An `ask` in another thread ends with Unfinished."""
        self._closed = True
        process = self._process
        if process is not None and process.returncode is None:
            process.kill()
        with self._lock:
            self._end()

    def _spawn(self) -> None:
        if self._closed:
            raise Unfinished("it was closed", lasting=False, died=True)
        try:
            self._process = spawn(self._module, self._extra, bufsize=0)
        except OSError as e:
            raise Unfinished(f"no process could be started: {e.strerror}", lasting=False, died=True) from e
        self._end = weakref.finalize(self, _end, self._process, os.getpid())
        assert self._process.stdin is not None
        os.set_blocking(self._process.stdin.fileno(), False)

    def _exchange(self, payload: bytes, limits: Limits) -> bytes:
        """Raises Unfinished."""
        process = self._process
        assert process is not None
        if len(payload) > MAX_PAYLOAD:
            raise Unfinished(f"it has more than {MAX_PAYLOAD >> 20} MiB", lasting=True)
        frame = _HEADER.pack(len(payload), limits.cpu_seconds, limits.nbytes) + payload
        try:
            return _talk(process, frame, monotonic() + limits.seconds)
        except TimeoutError:
            self._end()
            raise Unfinished(f"no answer within {limits.seconds:g} s", lasting=False) from None
        except (OSError, EOFError):
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(5)
            self._end()
            if process.returncode == 0:
                raise _Retired from None
            raise unfinished(process.returncode, limits) from None


def spawn(module: str, extra: Mapping[str, str], bufsize: int = -1) -> subprocess.Popen[bytes]:
    """`python -m MODULE` in a process group of its own, with pipes as stdin and stdout. `extra`: of its environment."""
    return subprocess.Popen(
        [sys.executable, "-P", "-m", module], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        env={**os.environ, **extra}, process_group=0, bufsize=bufsize,
    )  # fmt: skip


class _Retired(Unfinished):
    """The process ended of its own accord, before it took the payload."""

    def __init__(self) -> None:
        super().__init__("the process ended", lasting=False, died=True)


def _talk(process: subprocess.Popen[bytes], frame: bytes, end: float) -> bytes:
    """Writes the frame and reads the answer's payload. Raises TimeoutError, EOFError, OSError."""
    assert process.stdin is not None
    assert process.stdout is not None
    sink, source = process.stdin.fileno(), process.stdout.fileno()
    poll = select.poll()
    poll.register(source, select.POLLIN)
    poll.register(sink, select.POLLOUT)
    left: memoryview | None = memoryview(frame)
    answer, size = bytearray(), _HEADER.size
    while len(answer) < size:
        ready = poll.poll(max(0.0, end - monotonic()) * 1000)
        if not ready:
            raise TimeoutError
        for fd, _ in ready:
            if fd == sink and left is not None:
                left = left[os.write(sink, left) :]
                if not left:
                    poll.unregister(sink)
                    left = None
            elif fd == source:
                piece = os.read(source, 1 << 20)
                if not piece:
                    raise EOFError
                answer += piece
                if size == _HEADER.size <= len(answer):
                    size += min(_HEADER.unpack_from(answer)[0], MAX_PAYLOAD)
    return bytes(memoryview(answer)[_HEADER.size :])


def _end(process: subprocess.Popen[bytes], owner: int) -> None:
    if os.getpid() != owner:  # a fork of this process does not own it
        return
    process.kill()
    process.wait()
    for stream in (process.stdin, process.stdout):
        if stream is not None:
            stream.close()


def unfinished(status: int | None, limits: Limits) -> Unfinished:
    """From the exit status of the process."""
    if status == -signal.SIGPROF:
        return Unfinished(f"it takes more than {limits.cpu_seconds:.3g} s of CPU time", lasting=True)
    if status in (OUT_OF_MEMORY, -signal.SIGABRT, -signal.SIGSEGV):
        return Unfinished(f"it takes more than {limits.nbytes >> 20} MiB of memory", lasting=True)
    return Unfinished(f"the process ended with status {status}", lasting=False, died=True)


# ------------------------------------------------------------------------------------------------- in the child


def serve(handle: Callable[[bytes], bytes], *, quiet: bool = False) -> int:
    """Answers payloads until there are no more. Its value is the exit status of the process.

    `quiet`: what libraries print is dropped: whoever sends payloads must not be able to fill a log.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    source, sink = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    if quiet:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    os.dup2(2, 1)  # what a library prints must not land between the frames
    first = 0  # bytes in memory after the first answer
    while len(header := source.read(_HEADER.size)) == _HEADER.size:
        size, cpu_seconds, nbytes = _HEADER.unpack(header)
        payload = source.read(size)
        try:
            with limited(cpu_seconds, nbytes):
                answer = handle(payload)
        except MemoryError:
            return OUT_OF_MEMORY
        del payload
        if len(answer) > MAX_PAYLOAD:
            return OUT_OF_MEMORY
        sink.write(_HEADER.pack(len(answer), 0, 0))
        sink.write(answer)
        sink.flush()
        del answer
        now = _memory(1)
        first = first or now
        if now > first + _KEPT:
            return 0  # the parent starts another
    return 0


@contextlib.contextmanager
def limited(cpu_seconds: float, nbytes: int) -> Iterator[None]:
    """CPU time and address space from here on; the process dies of more, a MemoryError apart. 0: no limit."""
    try:
        import resource
    except ImportError:  # the parent's clock is then the only limit
        yield
        return
    before = resource.getrlimit(resource.RLIMIT_AS)
    if cpu_seconds:  # by a timer and not by RLIMIT_CPU, which knows whole seconds only
        signal.signal(signal.SIGPROF, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_PROF, cpu_seconds)
    if nbytes and (size := _memory(0)):
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_AS, (size + nbytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
        signal.setitimer(signal.ITIMER_PROF, 0)


def _memory(field: int) -> int:
    """Bytes of this process: 0 its address space, 1 what is resident. 0 where the system does not say."""
    try:
        with open("/proc/self/statm", "rb", buffering=0) as file:
            return int(file.read(200).split()[field]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


__all__ = [
    "MAX_PAYLOAD",
    "OUT_OF_MEMORY",
    "Killable",
    "Limits",
    "Unfinished",
    "limited",
    "serve",
    "spawn",
    "unfinished",
]
