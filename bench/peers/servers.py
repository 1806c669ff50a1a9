"""lmkit serve and vLLM's server under the same load, in turn; and their first token after the start."""

from __future__ import annotations

import argparse
import asyncio
import sys
from contextlib import ExitStack

import environments
from lmkit.api import EngineError
from lmkit_bench.client import Client, first_token
from lmkit_bench.serve import Load, run_loads, summary
from lmkit_bench.server import ServerProcess
from lmkit_bench.workload import Prompt
from records import Absent, Records, Sample
from workloads import prompts

INPUT, OUTPUT = 512, 64
LOADS = {1: 4, 16: 32, 32: 32}  # clients -> requests
MAX_LENGTH, KV_GIB = 1024, 2
GROUP = "serve"


def command(peer: str, args: argparse.Namespace) -> tuple[list[str], str, dict[str, str]]:
    """(command, path that answers 200 when ready, environment)."""
    model = str(args.models / "hf")
    if peer == "lmkit":
        limits = ["--max-length", str(MAX_LENGTH), "--kv-memory", f"{KV_GIB}GiB", "--threads", str(args.threads)]
        return [sys.executable, "-m", "lmkit", "serve", model, *limits], "/ready", {}
    vllm = str(environments.python("vllm", args.root).parent / "vllm")
    options = ["--dtype", "bfloat16", "--max-model-len", str(MAX_LENGTH), "--max-num-seqs", "64"]
    environment = {"VLLM_CPU_KVCACHE_SPACE": str(KV_GIB), "HF_HUB_OFFLINE": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
    return [vllm, "serve", model, *options], "/health", environment


def start(peer: str, args: argparse.Namespace) -> ServerProcess:
    line, ready, environment = command(peer, args)
    return ServerProcess(line, ready=ready, environment=environment)


def measure(args: argparse.Namespace, peers: set[str], parts: set[str], records: Records) -> None:
    """The parts "start" and "serve"."""
    known = {}
    for peer in [p for p in ("lmkit", "vllm") if p in peers]:
        if peer == "lmkit" or environments.is_complete(peer, args.root):
            known[peer] = f"{peer} server"
        else:
            reason = f"no environment: python bench/peers/environments.py {peer}"
            records.absent(Absent("serve", GROUP, f"{peer} server", reason))
    if "start" in parts:
        for round in range(args.rounds):
            for peer, who in known.items():
                if not records.has(round, GROUP, "first token", who) and not (peer == "vllm" and round):
                    _measure_start(peer, who, round, args, records)
    if "serve" in parts:
        _measure_loads(known, args, records)


def _measure_start(peer: str, who: str, round: int, args: argparse.Namespace, records: Records) -> None:
    """vLLM once: its start takes longer than the rest of a round."""
    try:
        with start(peer, args) as server:
            ready = server.wait_ready()
            seconds = first_token(server.url, Prompt(prompts(1, 32, round)[0], 1)).ttft
            records.add(Sample(round, GROUP, "first token", who, ready + seconds, "s"))
            print(f"round {round + 1}  first token  {who:18s} {ready + seconds:10.2f} s", flush=True)
    except EngineError as error:
        records.absent(Absent("start", GROUP, who, str(error)))


def _measure_loads(known: dict[str, str], args: argparse.Namespace, records: Records) -> None:
    missing = [
        round
        for round in range(args.rounds)
        if not all(records.has(round, GROUP, f"c{max(LOADS)} output", who) for who in known.values())
    ]
    if not missing:
        return
    with ExitStack() as stack:
        servers: dict[str, ServerProcess] = {}
        for peer, who in known.items():
            print(f"{who}: starting", flush=True)
            server = stack.enter_context(start(peer, args))
            try:
                records.once(Sample(0, GROUP, "ready", who, server.wait_ready(), "s"))
                servers[who] = server
            except EngineError as error:
                records.absent(Absent("serve", GROUP, who, str(error)))
        for round in missing:
            order = list(servers) if round % 2 == 0 else list(servers)[::-1]
            for clients in LOADS:
                for who in order:
                    if not records.has(round, GROUP, f"c{clients} output", who):
                        _measure_load(servers[who], who, clients, round, records)
        for who, server in servers.items():
            records.once(Sample(0, GROUP, "resident", who, float(server.memory()), "B"))


def _measure_load(server: ServerProcess, who: str, clients: int, round: int, records: Records) -> None:
    def work(load: Load, number: int) -> list[Prompt]:
        """Number 0 is measured, the other warms up."""
        seed = 10_000 * round + 100 * clients + number
        return [Prompt(ids, OUTPUT) for ids in prompts(LOADS[clients], INPUT, seed)]

    try:
        found = asyncio.run(run_loads(Client(server.url), [Load("concurrency", clients)], work))
    except EngineError as error:
        records.absent(Absent(f"c{clients}", GROUP, who, str(error)))
        return
    values = {name.partition("/")[2]: metric for name, metric in found.items()}
    ttft, tpot = summary(values["ttft"]), summary(values["tpot"])
    numbers = {
        "output": (values["output"].median, "tok/s"),
        "errors": (values["errors"].median, ""),
        "ttft mean": (ttft["mean"], "s"),
        "ttft p99": (ttft["p99"], "s"),
        "tpot mean": (tpot["mean"], "s"),
    }
    for name, (value, unit) in sorted(numbers.items(), key=lambda item: item[0] == "output"):  # its presence: all done
        records.add(Sample(round, GROUP, f"c{clients} {name}", who, value, unit))
    shown = f"{numbers['output'][0]:10.2f} tok/s, p99 TTFT {ttft['p99']:.2f} s"
    print(f"round {round + 1}  c{clients:<10} {who:18s} {shown}", flush=True)
