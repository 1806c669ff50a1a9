"""Where the time of a step goes: kernels by name, with their share of the device's time, and how long the device had
nothing to do."""

from __future__ import annotations

from engine import Engine, opened, prompts
from machine import Machine
from report import Report
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

KERNELS = 12  # named in the report, of each case


def measure(machine: Machine, report: Report, seconds: float) -> None:
    for shape, cases in (("0.6b", ((1, 64, 32),)), ("8b", ((1, 64, 32), (128, 512, 16), (1, 8192, 1)))):
        options = {"max_length": 8256, "max_rows": 128}
        if machine.small:
            cases, options = (
                ((2, 9, 4),),
                {"max_length": 128, "num_blocks": 64, "max_step_tokens": 64, "block_size": 16},
            )
        with opened(machine.config(machine.folder(shape), **options)) as engine:
            for rows, length, tokens in cases:
                with report.trying(f"profile {shape} {rows}x{length}"):
                    one(machine, engine, report, f"profile {shape} {rows}x{length}+{tokens}", rows, length, tokens)


def one(machine: Machine, engine: Engine, report: Report, case: str, rows: int, length: int, tokens: int) -> None:
    """`rows` prompts of `length` tokens, and `tokens` of each; all but the first step of which are decode steps."""
    vocab = engine.facts.vocab_size
    for seed in (1, 2):  # kernels, and graphs
        engine.play(prompts(rows, length, vocab, seed), tokens)
    kinds = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (machine.kind != "cpu")
    with profile(activities=kinds) as found:
        played = engine.play(prompts(rows, length, vocab, 3), tokens)
        machine.wait()
    device = machine.kind != "cpu"
    events = [e for e in found.key_averages() if not device or e.device_type == DeviceType.CUDA]
    spent = {e.key: (e.self_device_time_total if device else e.self_cpu_time_total, e.count) for e in events}
    first = sorted(spent.items(), key=lambda item: -item[1][0])[:KERNELS]
    whole = sum(time for time, _ in spent.values())
    named = {name[:90]: (round(time), count) for name, (time, count) in first}
    busy = whole / (1e6 * played.steps[-1])
    report.add(case, busy, "share", said="of the time with a kernel", row=True, kernels=named, step=played.steps)
