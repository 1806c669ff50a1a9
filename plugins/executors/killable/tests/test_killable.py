"""A process that may be killed: by each of its limits, and by anybody; the next payload is answered."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from threading import Thread
from time import sleep

import pytest
from lmkit_killable import MAX_PAYLOAD, Killable, Limits, Unfinished

ENOUGH = Limits(5.0, 1 << 30, 60.0)


@pytest.fixture(scope="module")
def process() -> Iterator[Killable]:
    made = Killable("child_of_tests", {"PYTHONPATH": str(Path(__file__).parent)})
    yield made
    made.close()


@pytest.mark.parametrize(
    ("word", "limits", "reason", "lasting"),
    [
        ("spin", Limits(0.2, 0, 60.0), "0.2 s of CPU time", True),
        ("power", Limits(0.2, 0, 60.0), "0.2 s of CPU time", True),
        ("eat", Limits(5.0, 64 << 20, 60.0), "64 MiB of memory", True),
        ("sleep", Limits(0.0, 0, 0.3), "no answer within 0.3 s", False),
        ("die", ENOUGH, "ended with status 3", False),
    ],
)
def test_each_limit(process: Killable, word: str, limits: Limits, reason: str, lasting: bool) -> None:
    assert process.ask(b"abc", ENOUGH) == b"cba"
    with pytest.raises(Unfinished, match=reason) as caught:
        process.ask(word.encode().ljust(9), limits)
    assert (caught.value.lasting, caught.value.died) == (lasting, word == "die")
    assert not process.running
    assert process.ask(b"abc", ENOUGH) == b"cba"


def test_limits_are_those_of_one_payload(process: Killable) -> None:
    pid = process.ask(b"pid", ENOUGH)
    for _ in range(30):
        assert process.ask(b"abc", Limits(0.2, 64 << 20, 60.0)) == b"cba"
    assert process.ask(b"pid", ENOUGH) == pid


def test_large_payloads_and_noise(process: Killable, capfd: pytest.CaptureFixture[str]) -> None:
    data = os.urandom(1 << 20) * 5
    assert process.ask(data, ENOUGH) == data[::-1]
    assert process.ask(b"print    x", ENOUGH) == b"x    tnirp"
    assert capfd.readouterr() == ("", "")
    with pytest.raises(Unfinished, match="MiB"):
        process.ask(bytes(MAX_PAYLOAD + 1), ENOUGH)


def test_memory_that_is_kept_is_given_back(process: Killable) -> None:
    pid = process.ask(b"keep", ENOUGH)
    assert process.ask(b"pid", ENOUGH) != pid  # without an error in between


def test_a_stopped_process_holds_up_nobody_for_long(process: Killable) -> None:
    os.kill(int(process.ask(b"pid", ENOUGH)), signal.SIGSTOP)
    with pytest.raises(Unfinished, match="no answer"):
        process.ask(bytes(1 << 20), Limits(5.0, 0, 0.3))  # more than a pipe holds
    assert process.ask(b"abc", ENOUGH) == b"cba"


def test_closing_ends_it() -> None:
    def made() -> Killable:
        return Killable("child_of_tests", {"PYTHONPATH": str(Path(__file__).parent)})

    def gone(pid: int) -> bool:
        return not Path(f"/proc/{pid}").exists()

    closed = made()
    pid = int(closed.ask(b"pid", ENOUGH))
    reasons: list[Unfinished] = []

    def wait() -> None:
        try:
            closed.ask(b"sleep".ljust(9), ENOUGH)
        except Unfinished as e:
            reasons.append(e)

    waiting = Thread(target=wait)
    waiting.start()
    sleep(0.1)
    closed.close()
    closed.close()
    waiting.join(30)
    assert reasons
    assert gone(pid)
    with pytest.raises(Unfinished, match="closed"):
        closed.ask(b"abc", ENOUGH)
    dropped = made()
    pid = int(dropped.ask(b"pid", ENOUGH))
    del dropped
    gc.collect()
    assert gone(pid)
