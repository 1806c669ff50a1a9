"""lmkit and its peers on the same checkpoint and the same prompts, in turn, several rounds.

    python bench/peers/run.py [--rounds 3] [--only main,serve,...] [--peers lmkit,vllm] [--weights bf16,int8,int4]
                              [--shape qwen2-0.5b] [--name NAME] [--out bench/results] [--root DIR]

Parts: main (decode, batch 16, prefill, known prefix; memory and time to start beside them), serve (lmkit and vLLM as
servers under load), start (the servers' first token), context (decode at 1k, 8k and 32k tokens). Default:
main and serve.

Within a round every engine does the same work in turn, with the order turned round from round to round; only one
computes at a time. What counts is the ratio of two numbers of one round: the machine changes, both feel it.

Every number is written to OUT/NAME.jsonl when it is there. A run that was interrupted goes on where it stopped when it
is started again with the same --name. The tables and plots are made from that file; --report makes them anew.
A peer that is not installed or does not load is named in the report, with the reason.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime
from pathlib import Path

import environments
import report
import servers
from lmkit_bench.result import read
from participants import PARTICIPANTS, Participant, prepare
from process import EngineFailed, EngineProcess
from protocol import Load
from records import Absent, Records, Sample
from workloads import CONTEXT, MAIN, Workload

PARTS = ("main", "serve", "start", "context")


def measure_limits(model: Path, records: Records, round: int, group: str) -> None:
    """The machine's read bandwidth and arithmetic, now, with every case that lmkit's plugins know."""
    if records.has(round, "limits", "read", group):
        return
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "limits.json"
        command = [sys.executable, "-m", "lmkit", "bench", "kernels", str(model), "--only", "", "--output", str(file)]
        done = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, check=False)
        if done.returncode:
            records.absent(Absent("limits", group, "machine", done.stderr.strip()[-300:]))
            return
        limits = read(file).details["limits"]
    records.add(Sample(round, "limits", "read", group, limits["read"], "B/s"))
    for dtype, value in limits["flops"].items():
        records.add(Sample(round, "limits", dtype, group, value, "flop/s"))


@contextmanager
def running(
    members: Sequence[Participant], workloads: Sequence[Workload], args: argparse.Namespace, records: Records, part: str
) -> Iterator[dict[Participant, EngineProcess]]:
    """The engines that start, loaded and warm; why the others do not is recorded."""
    load_of = {
        "threads": args.threads,
        "max_length": max(w.max_length for w in workloads),
        "max_rows": max(w.max_rows for w in workloads),
    }
    with ExitStack() as stack:
        engines: dict[Participant, EngineProcess] = {}
        for member in members:
            if reason := member.absent(args.root):
                records.absent(Absent(part, member.group, member.name, reason))
                continue
            print(f"{member.name}: loading", flush=True)
            try:
                load = Load(model=str(member.model(args.models)), weights=member.weights, **load_of)
                engine = EngineProcess(member.command(args.root), load)
                stack.callback(engine.close)
                first = engine.run([list(range(1000, 1032))], 1)[0][0]
                engine.run([list(range(2000, 2064))] * load.max_rows, 8)
            except EngineFailed as error:
                records.absent(Absent(part, member.group, member.name, str(error)))
                continue
            engines[member] = engine
            if part == "main":
                records.once(Sample(0, member.group, "ready", member.name, engine.ready_after, "s"))
                records.once(Sample(0, member.group, "first", member.name, engine.ready_after + first, "s"))
        yield engines


def measure_group(
    members: Sequence[Participant], workloads: Sequence[Workload], args: argparse.Namespace, records: Records, part: str
) -> None:
    """All workloads of all rounds, the engines in turn."""
    missing = [
        (round, workload)
        for round in range(args.rounds)
        for workload in workloads
        if not all(records.has(round, m.group, workload.name, m.name) for m in members if not m.absent(args.root))
    ]
    if not missing:
        return
    with running(members, workloads, args, records, part) as engines:
        for round, workload in missing:
            measure_limits(args.models / "hf", records, round, members[0].group)
            order = list(engines)[round % len(engines) :] + list(engines)[: round % len(engines)] if engines else []
            for member in order:
                if records.has(round, member.group, workload.name, member.name):
                    continue
                try:
                    value = workload.measure(engines[member], 1000 * round + len(workload.name))
                except EngineFailed as error:
                    records.absent(Absent(workload.name, member.group, member.name, str(error)))
                    continue
                records.add(Sample(round, member.group, workload.name, member.name, value, workload.unit))
                print(
                    f"round {round + 1}  {workload.name:12s} {member.name:18s} {value:10.2f} {workload.unit}",
                    flush=True,
                )
        for member, engine in engines.items():
            if part == "main":
                records.once(Sample(0, member.group, "resident", member.name, float(engine.resident()), "B"))
                records.once(Sample(0, member.group, "mapped", member.name, float(engine.mapped()), "B"))
                records.once(Sample(0, member.group, "peak", member.name, float(engine.peak()), "B"))
                for fact, value in engine.facts.items():
                    records.once(Sample(0, member.group, fact, member.name, float(value), "B"))


def _terminated(number: int, frame: object) -> None:
    """SIGTERM: leave through every cleanup, so that no engine stays."""
    sys.exit(128 + number)


def main() -> int:
    signal.signal(signal.SIGTERM, _terminated)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", default="main,serve", help=f"parts: {', '.join(PARTS)}")
    parser.add_argument("--peers", default=f"lmkit,{','.join(environments.PEERS)}")
    parser.add_argument("--weights", default="bf16,int8,int4")
    parser.add_argument("--workloads", default="", help="of the parts main and context, by name; default: all")
    parser.add_argument("--shape", default="qwen2-0.5b")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--name", default="", help="of the files; default: the shape and the date")
    parser.add_argument("--out", type=Path, default=Path(__file__).parents[1] / "results")
    parser.add_argument("--root", type=Path, default=environments.ROOT, help="environments and models of the peers")
    parser.add_argument("--report", action="store_true", help="measure nothing, write tables and plots again")
    parser.add_argument("--page", action="store_true", help="put the tables into docs/bench.md, too")
    args = parser.parse_args()
    parts, peers, weights = (set(text.split(",")) for text in (args.only, args.peers, args.weights))
    if unknown := parts - set(PARTS) or peers - {"lmkit", *environments.PEERS} or weights - {"bf16", "int8", "int4"}:
        parser.error(f"unknown: {', '.join(sorted(unknown))}")
    name = args.name or f"{args.shape}-{datetime.now(UTC):%Y-%m-%d}"
    records = Records(args.out / f"{name}.jsonl", args.shape)
    if not args.report:
        args.models = prepare(args.shape, args.root)
        chosen = [p for p in PARTICIPANTS if p.peer in peers]
        only = set(args.workloads.split(",")) if args.workloads else None
        for part, workloads in (("main", MAIN), ("context", CONTEXT)):
            workloads = [w for w in workloads if only is None or w.name in only]
            for group in ("bf16", "int8", "int4"):
                members = [p for p in chosen if p.group == group]
                if part in parts and group in weights and members and workloads:
                    measure_group(members, workloads, args, records, part)
        if "serve" in parts or "start" in parts:
            servers.measure(args, peers, parts, records)
    print(report.write(records, args.out, name))
    if args.page:
        report.into_page(records, name, Path(__file__).parents[2] / "docs" / "bench.md")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
