"""A model of 8B parameters, with random weights: decoding a row, a long prompt, and many rows at once."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from time import monotonic, perf_counter

from engine import Engine, opened, prompts
from machine import Machine
from report import Report

ROWS, LENGTH, PROMPT = 256, 1024, 8192  # at once, in and out of each; and a long prompt


def measure(machine: Machine, report: Report, seconds: float) -> None:
    ends = monotonic() + seconds
    rows, length, prompt = (ROWS, LENGTH, PROMPT) if not machine.small else (6, 24, 96)
    folder = machine.folder("8b")
    options = {"max_length": prompt + 64, "max_rows": rows}
    if machine.small:
        options |= {"num_blocks": 64, "max_step_tokens": 128, "block_size": 16}
    began = perf_counter()
    with opened(machine.config(folder, **options)) as engine:
        report.add("8b made", perf_counter() - began, "s", phases=engine.facts.phases, chosen=engine.choices)
        report.add("8b kv tokens", engine.facts.num_kv_tokens, "tokens")
        decode(engine, folder, report, "8b", 128 if not machine.small else 8)
        with report.trying("8b prefill"):
            prefill(engine, folder, report, prompt)
        with report.trying("8b batch"):
            batch(engine, report, rows, length, ends - monotonic() - 8)


def decode(engine: Engine, folder: Path, report: Report, name: str, num: int) -> None:
    """One row: tokens a second, and what share of the bandwidth its weights are read with."""
    shape = json.loads((folder / "config.json").read_text())
    engine.play(prompts(1, 16, shape["vocab_size"]), 8)  # graphs, kernels
    steps = [engine.play(prompts(1, num, shape["vocab_size"], seed=i + 1), num).step for i in range(3)]
    step = statistics.median(steps)
    report.add(f"{name} decode", 1 / step, "tok/s", steps=steps)
    read = engine.facts.weight_bytes
    if not shape["tie_word_embeddings"]:
        read -= shape["vocab_size"] * shape["hidden_size"] * 2  # a row of it alone
    if bandwidth := report.value("bandwidth"):
        report.add(f"{name} decode share", read / step / 1e9 / bandwidth, "share", weights_gb=read / 1e9)


def prefill(engine: Engine, folder: Path, report: Report, length: int) -> None:
    """One long prompt to its first token: arithmetic of linears and attention, of the rate of products."""
    shape = json.loads((folder / "config.json").read_text())
    runs = [engine.play(prompts(1, length, shape["vocab_size"], seed=100 + i), 1).first for i in range(3)]
    taken = statistics.median(runs[1:])
    hidden, middle, heads = shape["hidden_size"], shape["intermediate_size"], shape["num_attention_heads"]
    size, kv_heads = shape["head_dim"], shape["num_key_value_heads"]
    layer = hidden * size * (heads + 2 * kv_heads) + heads * size * hidden + 3 * hidden * middle
    pairs = length * (length + 1) // 2
    flops = shape["num_hidden_layers"] * (2 * length * layer + 4 * pairs * heads * size)
    report.add("8b prefill", length / taken, "tok/s", runs=runs, length=length)
    if gemm := report.value("gemm"):
        report.add("8b prefill share", flops / taken / 1e12 / gemm, "share")


def batch(engine: Engine, report: Report, rows: int, length: int, seconds: float) -> None:
    """Many requests handed over at once; where time is over before they end, the tokens until then."""
    vocab = engine.facts.vocab_size
    engine.play(prompts(rows, 4, vocab, seed=7), 4)  # the graph of that many rows
    played = engine.play(prompts(rows, length, vocab, seed=8), length, seconds)
    num = sum(map(len, played.tokens))
    report.add(
        "8b batch", num / played.steps[-1], "tok/s", rows=rows, length=length, tokens=num, ended=played.ended,
        seconds=played.steps[-1], first=min(times[0] for times in played.times if times),
    )  # fmt: skip
    tail = [at for at in played.steps if at > played.steps[-1] / 2]
    if len(tail) > 1:
        report.add("8b batch step", (tail[-1] - tail[0]) / (len(tail) - 1) * 1e3, "ms", said="later half", row=True)
    if not played.ended:
        report.fail("8b batch", f"ended before its {rows * length} tokens, after {seconds:.0f} s")
