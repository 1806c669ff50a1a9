"""One part of the run, in a process of its own: what breaks a device's context, or does not end, ends with it.

python bench/gpu/parts.py NAME REPORT --kind gpu|cpu [--small] --scratch FOLDER --seconds N
"""

from __future__ import annotations

import argparse
import importlib
from pathlib import Path

from machine import Machine
from report import Report


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("name")
    parser.add_argument("report", type=Path)
    parser.add_argument("--kind", required=True)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--scratch", type=Path, required=True)
    parser.add_argument("--seconds", type=float, required=True, help="after which the part is ended")
    args = parser.parse_args()
    report = Report(args.report, args.name)
    with report.trying(args.name):
        module = importlib.import_module(f"part_{args.name}")
        module.measure(Machine(args.kind, args.small, args.scratch), report, args.seconds)


if __name__ == "__main__":
    main()
