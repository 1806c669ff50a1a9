"""From files to the first token: the 8B model's safetensors, with random weights, and an engine in a fresh process."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from pathlib import Path

import torch
from machine import Machine
from report import Report
from safetensors.torch import save_file

BLOCK = 1 << 20  # random numbers that are drawn; they repeat

CHILD = """
import sys, time
sys.path.insert(0, sys.argv[3])
from engine import opened
from lmkit.config import from_options
options = {"model": sys.argv[1], "platform": sys.argv[2], "max_length": 512, "max_rows": 8}
if sys.argv[4] == "small":
    options |= {"num_blocks": 64, "max_step_tokens": 128, "block_size": 16}
with opened(from_options(options)) as engine:
    print("READY", time.time(), dict(engine.facts.phases), flush=True)
    engine.play([[5, 6, 7, 8]], 1)
    print("FIRST", time.time(), flush=True)
"""


def measure(machine: Machine, report: Report, seconds: float) -> None:
    folder = machine.folder("8b")
    shape = json.loads((folder / "config.json").read_text())
    bytes_needed = 2 * parameters(shape)
    free = shutil.disk_usage(folder).free
    if free < bytes_needed + (2 << 30):
        report.add("8b ready", f"not measured: {free >> 30} GiB free, {bytes_needed >> 30} needed")
        return
    began = time.perf_counter()
    write(folder, shape)
    report.add("8b written", time.perf_counter() - began, "s", bytes=bytes_needed)
    for turn in ("first", "second"):
        began = time.time()
        size = "small" if machine.small else "whole"
        command = [sys.executable, "-c", CHILD, str(folder), machine.platform, str(Path(__file__).parent), size]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        said = {line.split()[0]: line.split(maxsplit=2) for line in done.stdout.splitlines() if line[:1] in "RF"}
        if "FIRST" not in said:
            report.fail(
                "8b ready", (done.stderr.strip().splitlines() or ["it said nothing"])[-1], log=done.stderr[-2000:]
            )
            return
        ready, first = (float(said[name][1]) - began for name in ("READY", "FIRST"))
        report.add("8b ready", first, "s", turn=turn, ready=ready, phases=said["READY"][2])


def tensors(shape: dict) -> list[dict[str, tuple[int, ...]]]:
    """Names and shapes of a Llama's weights, by file."""
    hidden, middle, size = shape["hidden_size"], shape["intermediate_size"], shape["head_dim"]
    q, kv, vocab = shape["num_attention_heads"] * size, shape["num_key_value_heads"] * size, shape["vocab_size"]
    layer = {
        "input_layernorm": (hidden,), "post_attention_layernorm": (hidden,), "self_attn.q_proj": (q, hidden),
        "self_attn.k_proj": (kv, hidden), "self_attn.v_proj": (kv, hidden), "self_attn.o_proj": (hidden, q),
        "mlp.gate_proj": (middle, hidden), "mlp.up_proj": (middle, hidden), "mlp.down_proj": (hidden, middle),
    }  # fmt: skip
    outside = {"model.embed_tokens": (vocab, hidden), "model.norm": (hidden,), "lm_head": (vocab, hidden)}
    files = [outside] + [
        {f"model.layers.{i}.{name}": sizes for name, sizes in layer.items()} for i in range(shape["num_hidden_layers"])
    ]
    return [{f"{name}.weight": sizes for name, sizes in file.items()} for file in files]


def parameters(shape: dict) -> int:
    return sum(torch.Size(sizes).numel() for file in tensors(shape) for sizes in file.values())


def write(folder: Path, shape: dict) -> None:
    """A file for each layer, and an index of them."""
    files = tensors(shape)
    some = torch.randn(BLOCK, generator=torch.Generator().manual_seed(0)).mul_(0.02).bfloat16()
    where: dict[str, str] = {}
    for number, file in enumerate(files):
        name = f"model-{number + 1:05d}-of-{len(files):05d}.safetensors"
        made = {}
        for key, sizes in file.items():
            count = torch.Size(sizes).numel()
            made[key] = some.repeat(-(-count // BLOCK))[:count].view(sizes).clone()
            where[key] = name
        save_file(made, folder / name, {"format": "pt"})
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))
