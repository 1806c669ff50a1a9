"""Asks a machine with a GPU everything in one command of less than ten minutes: is it right, and how fast is it.

    bench/gpu.sh                   on the machine: no network, nothing installed but torch
    bench/gpu.sh pack              before, where there is a network: wheels of what the machine may lack
    bench/gpu.sh --cpu             every part at the size of a toy on the CPU, through the same code

Each part is a process of its own with a time of its own; what fails is written down, and the next one runs. Raw results
go to $OUT/gpu-DATE.json, or to bench/results; the table is printed last.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pack
from report import Report
from site_folder import ROOT, make
from table import table

HERE = Path(__file__).parent
PARTS = {  # name -> seconds that it may take on a GPU, in the order in which they run
    "limits": 30, "platform": 40, "attention": 110, "operators": 60, "parity": 100, "large": 170, "small": 50,
    "kernels": 80, "profile": 60, "serve": 60, "ready": 120,
}  # fmt: skip
WHOLE = 570.0  # seconds, of all parts


def run_part(name: str, path: Path, args: argparse.Namespace, scratch: Path, site: Path, seconds: float) -> None:
    """One part in its own session of processes, ended when its time is over."""
    command = [sys.executable, str(HERE / "parts.py"), name, str(path), "--kind", "cpu" if args.cpu else "gpu"]
    command += ["--small"] if args.cpu or args.small else []
    command += ["--scratch", str(scratch), "--seconds", str(seconds)]
    paths = [str(site), *filter(None, [os.environ.get("PYTHONPATH")])]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "PYTHONUNBUFFERED": "1", "HF_HUB_OFFLINE": "1"}
    report, began = Report(path, name), time.monotonic()
    with (scratch / f"{name}.log").open("w+") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env=env, start_new_session=True)
        try:
            status = process.wait(seconds)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            report.fail(name, f"ended after its {seconds:.0f} s", log=tail(log))
            status = 0
        if status:
            report.fail(name, f"the process ended with status {status}", log=tail(log))
    report.add(f"{name} took", time.monotonic() - began, "s")


def tail(log) -> str:
    log.seek(0)
    return log.read()[-3000:]


def arguments(given: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="bench/gpu.sh", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cpu", action="store_true", help="on the CPU, every part at the size of a toy")
    parser.add_argument("--small", action="store_true", help="on the GPU at the size of a toy")
    parser.add_argument("--parts", default=",".join(PARTS), help="those to run, in this order (default: all)")
    parser.add_argument("--seconds", type=float, default=WHOLE, help=f"for all parts (default: {WHOLE:.0f})")
    return parser.parse_args(given)


def main(given: list[str]) -> int:
    if given[:1] == ["pack"]:
        return pack.main(given[1:])
    args = arguments(given)
    chosen = args.parts.split(",")
    if unknown := [name for name in chosen if name not in PARTS]:
        raise SystemExit(f"no part {unknown[0]!r}; there are {', '.join(PARTS)}")
    began = time.monotonic()
    folder = Path(os.environ.get("OUT") or ROOT / "bench" / "results")
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="lmkit-gpu-") as scratch:
        path = Path(scratch) / "lines.jsonl"
        report = Report(path, "run")
        report.add("python", sys.version.split()[0])
        with report.trying("site"):
            report.add("wheels unpacked", ", ".join(make(Path(scratch) / "site")))
        for name in chosen:
            left = args.seconds - (time.monotonic() - began)
            if left < 5:
                report.fail(name, "no time was left for it")
                continue
            print(f"{time.monotonic() - began:6.1f} s  {name}", flush=True)
            run_part(name, path, args, Path(scratch), Path(scratch) / "site", min(left, PARTS[name]))
        lines = report.lines()
    now = datetime.datetime.now().strftime("%Y-%m-%d-%H%M")
    raw = folder / f"gpu-{now}.json"
    raw.write_text(json.dumps(lines, indent=1))
    print(f"\n{table(lines)}\n{time.monotonic() - began:.0f} s; raw results: {raw}")
    return int(any("failed" in line for line in lines))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
