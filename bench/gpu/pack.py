"""`bench/gpu.sh pack`: wheels of what lmkit needs and a bare GPU machine may lack, put into bench/wheels.

It runs where there is a network; the machine has none. A machine for GPUs has torch, and with it numpy and triton:
these, and what is large and no part needs, stay out. The folder is carried along with the checkout.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
from pathlib import Path

from site_folder import WHEELS, projects

LARGEST = 60 << 20  # bytes of all wheels: with the checkout less than the 64 MiB that travel
THERE = {"torch", "triton", "numpy", "transformers", "flashinfer-python", "accelerate", "huggingface-hub"}
PLATFORMS = [f"manylinux_2_{n}_x86_64" for n in (34, 28, 27, 17)] + ["manylinux2014_x86_64"]
PARTS = (  # dists whose needs are packed: those that the parts import
    "lmkit-core", "lmkit-tokenizer-json", "lmkit-worker", "lmkit-python", "lmkit-cli", "lmkit-http", "lmkit-bench",
    "lmkit-testing",
)  # fmt: skip


def needs() -> list[str]:
    """What those dists require of others, each once."""
    wanted = [need for p in projects().values() if p["name"] in PARTS for need in p.get("dependencies", ())]
    plain = {need.split(";")[0].strip() for need in wanted if not need.startswith("lmkit-")}
    return sorted(need for need in plain if re.split(r"[\[<>=!~ ]", need)[0].lower() not in THERE)


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="bench/gpu.sh pack", description=__doc__)
    parser.add_argument("--python", default="3.12", help="version of Python on the GPU machine (default: 3.12)")
    parser.add_argument("--to", type=Path, default=WHEELS)
    args = parser.parse_args(arguments)
    shutil.rmtree(args.to, ignore_errors=True)
    command = [sys.executable, "-m", "pip", "download", "-q", "--only-binary=:all:", "--implementation", "cp"]
    command += ["--python-version", args.python, "-d", str(args.to)]
    for platform in PLATFORMS:
        command += ["--platform", platform]
    subprocess.run([*command, *needs()], check=True)
    size = 0
    for wheel in sorted(args.to.glob("*.whl"), key=lambda path: -path.stat().st_size):
        if wheel.name.split("-")[0].lower() in THERE:
            wheel.unlink()
            continue
        size += wheel.stat().st_size
        print(f"{wheel.stat().st_size / 2**20:6.1f} MiB  {wheel.name}")
    print(f"{size / 2**20:6.1f} MiB in all")
    return int(size > LARGEST)
