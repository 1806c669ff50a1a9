"""What several ranks cost on one host: the executor multiproc against uniproc, orders to many ranks, and sums.

    python bench/ranks.py [--rounds 5] [--tokens 200] [--shape qwen2-0.5b | --shape none] [--mixture qwen3-moe-0.7b]

`step`: a decode step of the demo checkpoint with one row, in this process and in one of its own, by turns.
`broadcast`: an order for 256 decoding rows to 8 ranks that only read it.
`all_reduce`: 64 KiB summed by two ranks, against one copy of as many bytes.
`tp`: decoding of a random checkpoint of that shape, 2 ranks with a thread each against 1 rank with 2 threads, by turns.
`ep`: alone, with `--mixture`: decoding of a random mixture of that shape, 1 row and 16 rows, 2 ranks with a thread each
that have half of the experts against 2 that have half of each expert, by turns.
"""

from __future__ import annotations

import argparse
import multiprocessing
import socket
import tempfile
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from time import perf_counter

import torch
from lmkit.api import EngineRequest, RowWork, SamplingParams, StepPlan
from lmkit.config import EngineConfig, ModelConfig, ParallelConfig
from lmkit.engine.build import build_engine
from lmkit.engine.core import EngineCore
from lmkit.plugins.resolve import resolve
from lmkit_bench.shapes import shaped_checkpoint
from lmkit_multiproc.messages import Forward, encode
from lmkit_platform_cpu.native import load
from lmkit_platform_cpu.ranks import open_collectives

TARGETS = {"step": "< 60 us more", "broadcast": "< 150 us", "all_reduce": "<= 3x a copy", "tp": ">= 0.9x"}


def engine(model: str, executor: str, ranks: int, threads: int, ep: int = 1) -> EngineCore:
    config = EngineConfig(
        model=ModelConfig(model=model, max_length=1024),
        parallel=ParallelConfig(tp=ranks, threads=threads, ep=ep),
        wanted={"executor": executor},
    )
    return build_engine(config, *resolve(config)[:2]).core


def seconds_per_step(core: EngineCore, tokens: int, name: str, rows: int = 1) -> float:
    """Median over the steps of so many requests that decode."""
    params = SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True)
    for row in range(rows):
        core.add(EngineRequest(f"{name}, {row}", [5, 6, 7, 8 + row], params))
    steps = []
    while core.has_work():
        began = perf_counter()
        core.step()
        steps.append(perf_counter() - began)
    return median(steps[2:])


def by_turns(engines: Mapping[str, EngineCore], rounds: int, tokens: int, rows: int = 1) -> dict[str, float]:
    """Name -> median seconds per step."""
    found: dict[str, list[float]] = {name: [] for name in engines}
    for number in range(rounds):
        for name, core in engines.items():
            found[name].append(seconds_per_step(core, tokens, f"{name} {number}", rows))
    return {name: median(values) for name, values in found.items()}


def reader(end: socket.socket) -> None:
    connection = Connection(end.detach())
    while connection.recv_bytes():
        pass


def broadcast(ranks: int = 8, rows: int = 256, rounds: int = 500) -> float:
    """Median seconds until the order is with all of them."""
    connections = []
    for _ in range(ranks):
        mine, theirs = socket.socketpair()
        multiprocessing.get_context("spawn").Process(target=reader, args=(theirs,), daemon=True).start()
        theirs.close()
        connections.append(Connection(mine.detach()))
    order = Forward(StepPlan(7, rows=[RowWork(f"request-{i}", 3, 1000 + i, 1, [], True) for i in range(rows)]))
    times = []
    for _ in range(rounds):
        began = perf_counter()
        frame = encode(order)
        for connection in connections:
            connection.send_bytes(frame)
        times.append(perf_counter() - began)
    for connection in connections:
        connection.send_bytes(b"")
    return median(times)


def reducing(rank: int, path: str, rounds: int, told: Connection) -> None:
    native = load()
    assert native is not None
    native.start(1)
    group = open_collectives(native, rank, 2, f"file://{path}")
    x = torch.ones(16384)
    with native.capture() as tape:
        group.all_reduce(x)
    times = []
    for _ in range(rounds):
        began = perf_counter()
        tape.run()
        times.append(perf_counter() - began)
    told.send_bytes(str(median(times)).encode())


def all_reduce(rounds: int = 5000) -> tuple[float, float]:
    """Median seconds of a sum of 64 KiB by two ranks, and of one copy of them."""
    context = multiprocessing.get_context("spawn")
    with tempfile.NamedTemporaryFile() as file:
        ends = [context.Pipe() for _ in range(2)]
        for rank, (_, theirs) in enumerate(ends):
            context.Process(target=reducing, args=(rank, file.name, rounds, theirs), daemon=True).start()
            theirs.close()  # so that a rank that is gone is noticed
        summed = max(float(mine.recv_bytes()) for mine, _ in ends)
    source, target = bytearray(65536), bytearray(65536)
    return summed, median(timed(lambda: target.__setitem__(slice(None), source)) for _ in range(rounds))


def timed(work: Callable[[], object]) -> float:
    began = perf_counter()
    work()
    return perf_counter() - began


def show(name: str, text: str) -> None:
    target = f"   (target {TARGETS[name]})" if name in TARGETS else ""
    print(f"{name:12} {text}{target}", flush=True)


def dealt_out(shape: str, rounds: int, tokens: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        model = str(shaped_checkpoint(shape, Path(folder)))
        pair = {"split": engine(model, "multiproc", 2, 1), "dealt": engine(model, "multiproc", 2, 1, ep=2)}
        for rows in (1, 16):
            found = by_turns(pair, rounds, tokens, rows)
            dealt, split = (found[name] * 1e3 for name in ("dealt", "split"))
            show("ep", f"{rows} rows: split {split:.1f} ms, dealt out {dealt:.1f} ms: {split / dealt:.2f}x")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--shape", default="qwen2-0.5b", help="of the last figure; none: leave it out")
    parser.add_argument("--mixture", help="a shape with experts: only what it costs to deal them out")
    args = parser.parse_args()
    if args.mixture:
        dealt_out(args.mixture, args.rounds, args.tokens // 5)
        return
    show("broadcast", f"{broadcast() * 1e6:.0f} us")
    summed, copied = all_reduce()
    show("all_reduce", f"{summed * 1e6:.1f} us, a copy {copied * 1e6:.1f} us: {summed / copied:.1f}x")
    pair = {"uniproc": engine("demo", "uniproc", 1, 1), "multiproc": engine("demo", "multiproc", 1, 1)}
    found = by_turns(pair, args.rounds, args.tokens)
    more = (found["multiproc"] - found["uniproc"]) * 1e6
    show("step", f"{found['uniproc'] * 1e6:.0f} us, in a process of its own {more:+.0f} us")
    if args.shape != "none":
        with tempfile.TemporaryDirectory() as folder:
            model = str(shaped_checkpoint(args.shape, Path(folder)))
            pair = {"one": engine(model, "uniproc", 1, 2), "two": engine(model, "multiproc", 2, 1)}
            found = by_turns(pair, args.rounds, args.tokens // 5)
        speed = found["one"] / found["two"]
        show("tp", f"{found['one'] * 1e3:.1f} ms, two ranks {found['two'] * 1e3:.1f} ms: {speed:.2f}x")


if __name__ == "__main__":
    main()
