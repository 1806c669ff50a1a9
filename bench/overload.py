"""Ten times the load that a server can take: what it answers, how soon it refuses, what heavy keys cost a light one.

    python bench/overload.py [--seconds 8] [--rounds 1] [-- options of lmkit serve]

Starts `lmkit serve` with nine keys and `--scheduler fair`. Each round measures, one after the other: the peak (as many
clients as there are places), ten times that rate of eight keys in an open loop, the light key alone, and the light key
beside one heavy key at ten times the peak. The load comes from a process of its own, over plain sockets, on the same
machine, at the lowest priority where its own answers are not timed. As all of them share its processors, the time that
each took is told: of the server's processes, of the load, and of whatever else ran, which spoils a measurement.
Answers per second of the server's CPU say what that share hides. Exits with 1 where a figure misses its aim.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import subprocess
import sys
from dataclasses import asdict, dataclass, field
from statistics import median
from time import perf_counter, process_time
from urllib.parse import urlsplit

import uvloop
from lmkit_bench.result import machine
from lmkit_bench.server import ServerProcess, machine_busy
from lmkit_bench.stats import percentile
from lmkit_bench.workload import random_prompts

ROWS, WAITING, NUM_INPUT, NUM_OUTPUT = 16, 48, 32, 32
HEAVY, LIGHT = [f"heavy-{i}" for i in range(8)], "light"
FACTOR = 10  # times the peak
BEGUN = "begun"  # said by a load when it sends the first request
# of each figure: at least (-1) or at most (1) so much
AIMS = {"share of the peak": (-1, 0.95), "refusal p99, ms": (1, 50.0), "failed": (1, 0.0), "growth, MiB": (1, 64.0),
        "light key slower": (1, 2.0), "light key refused": (1, 0.0)}  # fmt: skip


@dataclass
class Tally:
    """What came of the requests of one phase, in seconds."""

    ends: list[float] = field(default_factory=list)  # of whole answers, since the phase began
    firsts: list[float] = field(default_factory=list)  # from a request to the first bytes of its answer's body
    refusals: list[float] = field(default_factory=list)  # from a request to the whole of a 429 or 503
    slowest: float = 0.0  # from a request to the end of its answer
    failed: list[str] = field(default_factory=list)
    late: float = 0.0  # at most so much later than planned a request was sent: above a few ms the client is the limit
    busy: float = 0.0  # the part of a processor that the client took
    began: float = 0.0  # when the first request was sent, by the clock that all processes of a machine share

    def rate(self, seconds: float) -> float:
        """Answers a second, without the first second, in which the queue fills, and those after the end."""
        return sum(1.0 <= end < seconds for end in self.ends) / (seconds - 1.0)


class Connection(asyncio.Protocol):
    """One connection, that asks for one answer at a time. A protocol, since streams would take the server's time."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport, self.gone = transport, False
        self.answer: asyncio.Future[tuple[bytes, float, float]] | None = None

    def ask(self, sent: bytes) -> asyncio.Future[tuple[bytes, float, float]]:
        """What comes: the answer, when its head came and when its end. Raises EOFError."""
        self._data, self._first = bytearray(), 0.0
        self.answer = asyncio.get_running_loop().create_future()
        self.transport.write(sent)  # type: ignore[attr-defined]
        return self.answer

    def data_received(self, data: bytes) -> None:
        self._first = self._first or perf_counter()
        self._data += data
        whole = self._data.endswith(b"\r\n0\r\n\r\n") or (self._data[9:10] in b"45" and self._is_whole())
        if whole and self.answer is not None and not self.answer.done():
            self.answer.set_result((bytes(self._data), self._first, perf_counter()))

    def _is_whole(self) -> bool:
        head, end, body = self._data.lower().partition(b"\r\n\r\n")
        return bool(end) and len(body) >= int(head.partition(b"content-length:")[2].split(None, 1)[0])

    def connection_lost(self, error: Exception | None) -> None:
        self.gone = True
        if self.answer is not None and not self.answer.done():
            self.answer.set_exception(EOFError(f"the server closed the connection: {error}"))


class Client:
    """Asks for streamed completions over connections that are used again as long as the server keeps them."""

    def __init__(self, url: str, keys: list[str]) -> None:
        place = urlsplit(url)
        self._host, self._port = str(place.hostname), int(place.port or 80)
        self._free: list[Connection] = []
        self._keys, self.began, self.tally = keys, 0.0, Tally()

    def request(self, number: int) -> bytes:
        """That of the next key, with a prompt of its own."""
        prompt = random_prompts(1, NUM_INPUT, NUM_OUTPUT, seed=random.randrange(1 << 40))[0].prompt
        body = json.dumps({"prompt": prompt, "max_tokens": NUM_OUTPUT, "ignore_eos": True, "stream": True})
        key = self._keys[number % len(self._keys)]
        head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {key}\r\n"
        return f"{head}Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode()

    async def ask(self, sent: bytes) -> None:
        tally, began = self.tally, perf_counter()
        try:
            while self._free and self._free[-1].gone:
                self._free.pop()
            if self._free:
                connection = self._free.pop()
            else:
                loop = asyncio.get_running_loop()
                _, connection = await loop.create_connection(Connection, self._host, self._port)
            answer, first, end = await connection.ask(sent)
        except (OSError, EOFError) as error:
            tally.failed.append(f"{type(error).__name__}: {error}")
            return
        if answer[9:12] == b"200" and b"[DONE]" in answer[-40:]:
            tally.firsts.append(first - began)
            tally.ends.append(end - self.began)
            tally.slowest = max(tally.slowest, end - began)
        elif answer[9:12] in (b"429", b"503") and b"retry-after:" in answer:
            tally.refusals.append(end - began)
        else:
            tally.failed.append(repr(answer[:300]))
        if b"connection: close" in answer[:300]:
            connection.transport.close()  # type: ignore[attr-defined]
        else:
            self._free.append(connection)


async def closed(url: str, keys: list[str], clients: int, seconds: float) -> Tally:
    """So many clients, each asks again as soon as it is answered."""
    client = Client(url, keys)
    client.began = client.tally.began = perf_counter()
    used = process_time()

    async def again(i: int) -> None:
        while perf_counter() < client.began + seconds:
            await client.ask(client.request(i))

    await asyncio.gather(*(again(i) for i in range(clients)))
    client.tally.busy = (process_time() - used) / (perf_counter() - client.began)
    return client.tally


async def opened(url: str, keys: list[str], rate: float, seconds: float) -> Tally:
    """Poisson arrivals. Requests are written before the first is sent."""
    client, at = Client(url, keys), 0.0
    requests = [client.request(i) for i in range(int(rate * seconds))]
    print(BEGUN, flush=True)
    client.began, used = perf_counter(), process_time()
    client.tally.began = client.began
    async with asyncio.TaskGroup() as group:
        for sent in requests:
            if (early := client.began + at - perf_counter()) > 0:
                await asyncio.sleep(early)
            else:
                client.tally.late = max(client.tally.late, -early)
            group.create_task(client.ask(sent))
            at += random.expovariate(rate)
    client.tally.busy = (process_time() - used) / (perf_counter() - client.began)
    return client.tally


def load(
    url: str, keys: list[str], seconds: float, *, clients: int = 0, rate: float = 0.0, nice: bool = False
) -> subprocess.Popen[str]:
    """A process that loads the server in a closed loop of `clients`, or an open one of `rate` a second."""
    told = json.dumps({"url": url, "keys": keys, "seconds": seconds, "clients": clients, "rate": rate})
    command = [*(("nice", "-n", "19") if nice else ()), sys.executable, __file__, "--load", told]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def told(process: subprocess.Popen[str]) -> Tally:
    return Tally(**json.loads(process.communicate()[0].removeprefix(BEGUN)))


def begun(process: subprocess.Popen[str]) -> None:
    """Returns when an open loop has written its requests, and sends them: that may take it longer than a phase."""
    assert process.stdout is not None
    if process.stdout.readline().strip() != BEGUN:
        raise RuntimeError("the load did not begin")


def run_load(text: str) -> None:
    given = json.loads(text)
    url, keys, clients, rate, seconds = (given[name] for name in ("url", "keys", "clients", "rate", "seconds"))
    work = closed(url, keys, clients, seconds) if clients else opened(url, keys, rate, seconds)
    print(json.dumps(asdict(uvloop.run(work))))


@dataclass
class Used:
    """Processors that were taken while a load ran: of API, engine, load, and everything else."""

    api: float
    engine: float
    load: float
    others: float


def watched(server: ServerProcess, process: subprocess.Popen[str]) -> tuple[Tally, Used]:
    """What comes of a load, and what it took."""
    own, everything, began = server.processor(), machine_busy(), perf_counter()
    tally = told(process)
    seconds = perf_counter() - began
    now = server.processor()
    api = (now[0] - own[0]) / seconds
    engine = (sum(now) - sum(own)) / seconds - api
    # that of the load is of its time of sending alone: before that it writes requests, and nothing else runs
    others = (machine_busy() - everything) / seconds - api - engine - tally.busy
    share = seconds / max(1e-9, began + seconds - tally.began)
    return tally, Used(api * share, engine * share, tally.busy, others)


def measure(server: ServerProcess, seconds: float) -> dict[str, float]:
    url = server.url
    told(load(url, HEAVY, 1.0, clients=ROWS))
    best, used_then = watched(server, load(url, HEAVY, seconds, clients=ROWS + WAITING // 2))
    peak = best.rate(seconds)
    before = server.memory()
    over, used = watched(server, load(url, HEAVY, seconds, rate=FACTOR * peak))
    grown = server.memory() - before
    alone = uvloop.run(closed(url, [LIGHT], 1, seconds))
    crowd = load(url, HEAVY[:1], 2 * seconds, rate=FACTOR * peak, nice=True)
    begun(crowd)
    uvloop.run(asyncio.sleep(1.0))  # until the room is full
    beside = uvloop.run(closed(url, [LIGHT], 1, 2 * seconds - 2.0))
    heavy = told(crowd)
    first, second = (percentile(tally.firsts, 99) for tally in (alone, beside))
    failed = [*over.failed, *alone.failed, *beside.failed]
    if failed:
        print(f"{len(failed)} failed, such as {failed[0]}", file=sys.stderr)
    return {
        "peak, req/s": peak, "at 10x, req/s": over.rate(seconds), "share of the peak": over.rate(seconds) / peak,
        "refused, req/s": len(over.refusals) / seconds, "refusal p50, ms": 1e3 * median(over.refusals),
        "refusal p99, ms": 1e3 * percentile(over.refusals, 99), "client late, ms": 1e3 * over.late,
        **{f"processors of {name}, peak": getattr(used_then, name) for name in ("api", "engine", "load", "others")},
        **{f"processors of {name}, 10x": getattr(used, name) for name in ("api", "engine", "load", "others")},
        "answers per CPU s of the engine, 10x/peak":
            (over.rate(seconds) / used.engine) / (peak / used_then.engine),
        "answers per CPU s of the server, 10x/peak":
            (over.rate(seconds) / (used.api + used.engine)) / (peak / (used_then.api + used_then.engine)),
        "failed": len(failed),
        "slowest accepted, s": over.slowest, "growth, MiB": grown / 2**20,
        "light key alone, p50 TTFT ms": 1e3 * median(alone.firsts), "light key alone, p99 TTFT ms": 1e3 * first,
        "beside a heavy one, p50 TTFT ms": 1e3 * median(beside.firsts), "beside a heavy one, p99 TTFT ms": 1e3 * second,
        "heavy key meanwhile, req/s": (len(heavy.ends) + len(heavy.refusals)) / seconds / 2,
        "light key slower": second / first, "light key refused": len(beside.refusals),
    }  # fmt: skip


def main() -> int:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--seconds", type=float, default=8.0, help="of each phase; twice that of the last")
    arguments.add_argument("--rounds", type=int, default=1)
    arguments.add_argument("--load", help=argparse.SUPPRESS)  # what a process of load is told
    arguments.add_argument("serve", nargs="*", help="options of lmkit serve")
    given = arguments.parse_args()
    if given.load:
        run_load(given.load)
        return 0
    command = [sys.executable, "-m", "lmkit", "serve", "--scheduler", "fair", "--max-rows", str(ROWS)]
    command += ["--max-waiting", str(WAITING), *(f"--api-key={key}" for key in (*HEAVY, LIGHT)), *given.serve]
    with ServerProcess(command) as server:
        server.wait_ready()
        rounds = [measure(server, given.seconds) for _ in range(given.rounds)]
    host = machine()
    print(f"{host.processor}, {host.cores} cores; {given.rounds} rounds of {given.seconds:g} s a phase")
    missed = 0
    for name in rounds[0]:
        values = [found[name] for found in rounds]
        sign, bound = AIMS.get(name, (0, 0.0))
        bad = sign * (median(values) - bound) > 0
        missed += bad
        aim = f"{'at least' if sign < 0 else 'at most'} {bound:g}{': MISSED' if bad else ''}" if sign else ""
        print(f"| {name} | {median(values):.2f} | {min(values):.2f} to {max(values):.2f} | {aim} |")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
