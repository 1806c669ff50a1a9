"""The process in which grammars are compiled: `python -m lmkit.engine.compile_process`, frames on stdin and stdout.

A grammar comes from a stranger and may take any time or memory, so each compilation runs under limits of the kernel.
When one is exceeded the process dies, and the parent (lmkit.engine.compiler) starts another.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from typing import Any, BinaryIO

import msgspec

from lmkit.api import Choice, Grammar, LmkitError, Vocabulary
from lmkit.plugins import load_target

HEADER = 4  # bytes of a frame's length, big-endian
OUT_OF_MEMORY = 77  # exit status


class Setup(msgspec.Struct):
    """First frame."""

    pieces: list[bytes]  # this and the next three: the Vocabulary
    special_ids: list[int]
    eos_token_ids: tuple[int, ...]
    size: int
    backends: list[Choice]
    seconds: int  # of CPU time for one grammar
    nbytes: int  # of memory beyond what the process has before it


class Job(msgspec.Struct):
    backend: str
    grammar: Grammar


class Result(msgspec.Struct):
    """What `compile` returned, or why it refused."""

    compiled: bytes = b""
    refused: str | None = None


def write(stream: BinaryIO, message: Any) -> None:
    payload = msgspec.msgpack.encode(message)
    stream.write(len(payload).to_bytes(HEADER, "big") + payload)
    stream.flush()


def read(stream: BinaryIO) -> bytes | None:
    """One payload; None at the end."""
    size = stream.read(HEADER)
    return stream.read(int.from_bytes(size, "big")) if len(size) == HEADER else None


@contextlib.contextmanager
def limits(seconds: int, nbytes: int) -> Any:
    """CPU time and address space from here on; the process dies of more."""
    try:
        import resource
    except ImportError:  # the parent's clock is then the only limit
        yield
        return
    hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
    resource.setrlimit(resource.RLIMIT_CPU, (int(time.process_time()) + seconds + 1, hard))
    before = resource.getrlimit(resource.RLIMIT_AS)
    with contextlib.suppress(OSError, ValueError):
        with open("/proc/self/statm") as file:
            size = int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
        resource.setrlimit(resource.RLIMIT_AS, (size + nbytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def main() -> int:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    source, sink = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a library prints must not land between the frames
    first = read(source)
    if first is None:
        return 0
    setup = msgspec.msgpack.decode(first, type=Setup)
    vocabulary = Vocabulary(setup.pieces, frozenset(setup.special_ids), setup.eos_token_ids, setup.size)
    choices = {choice.name: choice for choice in setup.backends}
    backends: dict[str, Any] = {}
    while (payload := read(source)) is not None:
        job = msgspec.msgpack.decode(payload, type=Job)
        choice = choices[job.backend]
        if job.backend not in backends:
            backends[job.backend] = load_target(choice)(vocabulary, **choice.options)
        try:
            with limits(setup.seconds, setup.nbytes):
                result = Result(backends[job.backend].compile(job.grammar))
        except MemoryError:
            return OUT_OF_MEMORY
        except LmkitError as error:
            result = Result(refused=error.message)
        write(sink, result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
