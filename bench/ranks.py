"""What several ranks cost on one host: the executor multiproc against uniproc, orders to many ranks, and sums.

    python bench/ranks.py [--rounds 5] [--tokens 200] [--shape qwen2-0.5b | --shape none] [--mixture qwen3-moe-0.7b]
    python bench/ranks.py --only pp --shape llama-160m --tokens 60 --rounds 3 [--rows 16] [--context 1500]

`step`: a decode step of the demo checkpoint with one row, in this process and in one of its own, with one and with two
steps in flight, by turns.
`broadcast`: an order for 256 decoding rows to 8 ranks that wait for it and only read it.
`all_reduce`: 64 KiB summed by two ranks, against one copy of as many bytes.
`tp`: decoding of a random checkpoint of that shape, 2 ranks with a thread each against 1 rank with 2 threads, by turns.
`ep`: alone, with `--mixture`: decoding of a random mixture of that shape, 1 row and 16 rows, 2 ranks with a thread each
that have half of the experts against 2 that have half of each expert, by turns.
`pp`: decoding of many rows by two stages with a thread each, with so many steps in flight, by turns.
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
from time import perf_counter, sleep
from typing import Any

import torch
from lmkit.api import EngineRequest, RowWork, SamplingParams, StepPlan
from lmkit.config import EngineConfig, ModelConfig, ParallelConfig
from lmkit.engine.build import build_engine
from lmkit.engine.core import EngineCore
from lmkit.plugins.resolve import resolve
from lmkit_bench.shapes import shaped_checkpoint
from lmkit_multiproc.messages import Forward, encode, send_whole
from lmkit_platform_cpu.native import load
from lmkit_platform_cpu.ranks import open_collectives

TARGETS = {
    "step": "< 60 us more", "broadcast": "< 150 us", "all_reduce": "<= 3x a copy", "tp": ">= 0.9x", "pp": ">= 1.5x",
}  # fmt: skip


def engine(model: str, executor: str, ranks: int, threads: int, **parallel: Any) -> EngineCore:
    config = EngineConfig(
        model=ModelConfig(model=model, max_length=2048 if "pp" in parallel else 1024),
        parallel=ParallelConfig(tp=ranks, threads=threads, **parallel),
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


def tokens_per_second(core: EngineCore, rows: int, context: int, tokens: int, name: str) -> float:
    """How fast rows decode together, from when the last of them has its first token until the first of them ends."""
    params = SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True)
    for row in range(rows):
        core.add(EngineRequest(f"{name} {row}", [3 + row + i % 97 for i in range(context)], params))
    said = dict.fromkeys(range(rows), 0)
    began, before, now, at = 0.0, 0, 0, 0.0
    while core.has_work():
        for event in core.step():
            said[int(event.id.rpartition(" ")[2])] += len(event.tokens)
        if max(said.values()) < tokens:
            now, at = sum(said.values()), perf_counter()
        if not began and min(said.values()):
            began, before = at, now
    return (now - before) / (at - began) if at > began else 0.0


def pipeline(model: str, args: argparse.Namespace) -> dict[int, float]:
    """Steps in flight -> median tokens per second. Prompts are computed in a round of their own before, and found."""
    depths = [int(depth) for depth in args.depths.split(",")]
    cores = {depth: engine(model, "multiproc", 1, 1, pp=2, depth=depth) for depth in depths}
    found: dict[int, list[float]] = {depth: [] for depth in depths}
    for number in range(args.rounds + 1):
        for depth, core in cores.items():
            speed = tokens_per_second(core, args.rows, args.context, args.tokens if number else 1, f"{number}")
            found[depth] += [speed] * (number > 0)
    for depth, values in found.items():
        print(f"  {depth} in flight: " + ", ".join(f"{speed:.0f}" for speed in values), flush=True)
    return {depth: median(values) for depth, values in found.items()}


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
        sleep(0.002)  # all of them wait again
        began = perf_counter()
        frame = encode(order)
        for connection in connections:
            send_whole(frame, connection)
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
        summed = group.all_reduce(x)  # each run writes it
    times = []
    for _ in range(rounds):
        began = perf_counter()
        tape.run()
        times.append(perf_counter() - began)
    told.send_bytes(str(median(times)).encode())
    del summed


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
    parser.add_argument("--mixture", help="a shape with experts: only what it costs to deal them out")
    parser.add_argument("--shape", default="qwen2-0.5b", help="of the last figures; none: leave them out")
    parser.add_argument("--rows", type=int, default=16, help="of pp")
    parser.add_argument("--context", type=int, default=1500, help="tokens of their prompts")
    parser.add_argument("--depths", default="1,2", help="steps in flight")
    parser.add_argument("--only", choices=["pp"])
    args = parser.parse_args()
    if args.mixture:
        dealt_out(args.mixture, args.rounds, args.tokens // 5)
        return
    if args.only == "pp":
        with tempfile.TemporaryDirectory() as folder:
            found = pipeline(str(shaped_checkpoint(args.shape, Path(folder))), args)
        each = ", ".join(f"{depth}: {speed:.0f} tokens/s" for depth, speed in found.items())
        first, *others = found.values()
        show("pp", f"steps in flight {each}: " + ", ".join(f"{speed / first:.2f}x" for speed in others))
        return
    show("broadcast", f"{broadcast() * 1e6:.0f} us")
    summed, copied = all_reduce()
    show("all_reduce", f"{summed * 1e6:.1f} us, a copy {copied * 1e6:.1f} us: {summed / copied:.1f}x")
    cores = {"here": engine("demo", "uniproc", 1, 1)}
    cores |= {f"{depth} in flight": engine("demo", "multiproc", 1, 1, depth=depth) for depth in (1, 2)}
    here, *others = by_turns(cores, args.rounds, args.tokens).values()
    more = ", ".join(f"{(other - here) * 1e6:+.0f} us with {depth} in flight" for depth, other in enumerate(others, 1))
    show("step", f"{here * 1e6:.0f} us, in a process of its own {more}")
    if args.shape != "none":
        with tempfile.TemporaryDirectory() as folder:
            model = str(shaped_checkpoint(args.shape, Path(folder)))
            pair = {"one": engine(model, "uniproc", 1, 2), "two": engine(model, "multiproc", 2, 1, depth=2)}
            found = by_turns(pair, args.rounds, args.tokens // 5)
        speed = found["one"] / found["two"]
        show("tp", f"{found['one'] * 1e3:.1f} ms, two ranks {found['two'] * 1e3:.1f} ms: {speed:.2f}x")


if __name__ == "__main__":
    main()
