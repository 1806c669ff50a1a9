"""From the numbers of a run to tables (Markdown) and plots."""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import environments
from lmkit_bench.stats import Ratio, paired_ratio
from participants import PARTICIPANTS, Participant
from records import Records
from workloads import CONTEXT, MAIN, Workload

# (ours, workload) -> (ratio to the best peer, share of the limit) that is aimed at
TARGETS = {
    ("lmkit bf16", "decode"): (1.15, 0.85), ("lmkit bf16", "batch16"): (1.2, 0.75),
    ("lmkit bf16", "prefill"): (1.1, 0.75),
    ("lmkit int8", "decode"): (1.35, 0.80), ("lmkit int8", "batch16"): (1.3, 0.75),
    ("lmkit w8a8", "prefill"): (1.5, 0.55), ("lmkit int4", "decode"): (1.5, 0.65),
}  # fmt: skip
LIMITS = ("read", "bfloat16", "int8")
PAGE_MARKS = ("<!-- peers: made by bench/peers/run.py --page -->", "<!-- end of peers -->")
SERVERS = ("lmkit server", "vllm server")
SERVE_ROWS = (("output", "tok/s"), ("ttft mean", "s"), ("ttft p99", "s"), ("tpot mean", "s"), ("errors", ""))


@dataclass(frozen=True)
class Shape:
    """What the bounds follow from."""

    linear: int  # parameters of the layers' linears
    head: int  # and of the output projection

    @classmethod
    def read(cls, records: Records, root: Path = environments.ROOT) -> Shape | None:
        shape = records.runs[0].shape if records.runs else ""
        file = root / "models" / shape / "hf" / "config.json"
        if not file.exists():
            return None
        c = json.loads(file.read_text())
        d, m = c["hidden_size"], c["intermediate_size"]
        dim = c.get("head_dim") or d // c["num_attention_heads"]
        q, kv = c["num_attention_heads"] * dim, c["num_key_value_heads"] * dim
        return cls(c["num_hidden_layers"] * (d * (2 * q + 2 * kv) + 3 * d * m), d * c["vocab_size"])


def write(records: Records, out: Path, name: str) -> str:
    """OUT/NAME.md and its plots; returns the text."""
    text = "\n".join(_page(records, name))
    out.mkdir(parents=True, exist_ok=True)
    (out / f"{name}.md").write_text(text)
    plots(records, out, name)
    return text


def into_page(records: Records, name: str, page: Path) -> None:
    """Puts the tables between the two marks of docs/bench.md."""
    before, _, rest = page.read_text().partition(PAGE_MARKS[0])
    _, found, after = rest.partition(PAGE_MARKS[1])
    if not found:
        sys.exit(f"{page} has no marks {PAGE_MARKS[0]} and {PAGE_MARKS[1]}")
    m, created = records.runs[0].machine, records.runs[0].created[:10]
    head = f"{records.runs[0].shape}, {m.processor}, {m.cores} cores ({', '.join(m.features)}), {created}; "
    head += f"medians, in brackets smallest and largest ([all of it](../bench/results/{name}.md)):\n"
    lines = [PAGE_MARKS[0], head, *_main_table(records), *_ratio_table(records), *_serve_table(records)]
    lines = [line.replace("## ", "### ", 1) for line in lines]
    page.write_text(before + "\n".join(lines) + "\n\n" + PAGE_MARKS[1] + after)


def _page(records: Records, name: str) -> Iterator[str]:
    if not records.runs:
        yield "Nothing was measured."
        return
    first, last = records.runs[0], records.runs[-1]
    yield f"# lmkit and its peers, {first.shape}\n"
    m = first.machine
    yield f"{m.processor}, {m.cores} cores ({', '.join(m.features)}), {m.memory / 2**30:.0f} GiB, {m.system},"
    yield f"Python {m.python}, torch {first.versions.get('torch', '?')}; {first.created}, commit {last.commit}."
    limits = {w: [v for g in records.by_round("limits", w).values() for v in g.values()] for w in LIMITS}
    if limits["read"]:
        shown = [
            f"{w} {min(v) / 1e9:.0f} to {max(v) / 1e9:.0f} {'GB/s' if w == 'read' else 'GFLOP/s'}"
            for w, v in limits.items()
            if v
        ]
        yield f"Measured in the run: {', '.join(shown)}.\n"
    yield "Medians of the rounds; in brackets the smallest and the largest. Random weights, random prompts, greedy.\n"
    yield from _main_table(records)
    yield from _memory_lines(records)
    yield from _ratio_table(records)
    yield from _serve_table(records)
    yield from _context_table(records)
    if records.reasons:
        yield "\n## Absent\n"
        yield from (f"- {who}, {workload}: {reason}" for (workload, _, who), reason in records.reasons.items())
    yield f"\nRaw numbers: {name}.jsonl. Made by `python bench/peers/run.py`.\n"


def _cell(records: Records, p: Participant, workload: str, form: str = "{:.0f}", scale: float = 1.0) -> str:
    values = [v * scale for v in records.by_round(p.group, workload).get(p.name, {}).values()]
    if not values:
        return "-"
    spread = f" ({form.format(min(values))}-{form.format(max(values))})" if len(values) > 1 else ""
    return form.format(statistics.median(values)) + spread


def _main_table(records: Records) -> Iterator[str]:
    titles = ("", "decode, batch 1 tok/s", "batch 16 out tok/s", "prefill 2048 tok/s", "TTFT, known prefix / new",
              "ready s", "first token s", "resident MiB", "peak MiB")  # fmt: skip
    yield f"| {' | '.join(titles)} |\n|{'---|' * len(titles)}"
    for p in PARTICIPANTS:
        cells = [_cell(records, p, w) for w in ("decode", "batch16", "prefill")]
        cells += [_cell(records, p, "prefix", "{:.1%}")]
        cells += [_cell(records, p, w, "{:.1f}") for w in ("ready", "first")]
        cells += [_cell(records, p, w, scale=2**-20) for w in ("resident", "peak")]
        if any(cell != "-" for cell in cells):
            name = f"**{p.name}**" if p.is_ours else p.name
            yield f"| {name} | {' | '.join(cells)} |"


def _memory_lines(records: Records) -> Iterator[str]:
    """What of lmkit's memory is neither weights nor KV."""
    for ours in (p for p in PARTICIPANTS if p.is_ours):
        names = ("resident", "weight bytes", "kv bytes")
        held = [records.by_round(ours.group, name).get(ours.name, {}).get(0) for name in names]
        if None in held:
            continue
        resident, weights, kv = (value / 2**20 for value in held if value is not None)
        mapped = records.by_round(ours.group, "mapped").get(ours.name, {}).get(0, 0.0) / 2**20
        parts = f"weights {weights:.0f} + KV {kv:.0f} + embeddings mapped from the checkpoint {mapped:.0f}"
        rest = resident - weights - kv - mapped
        yield f"\n{ours.name}: resident {resident:.0f} MiB = {parts} + {rest:.0f} (aim: 400)."


def best_peer(records: Records, ours: Participant, workload: Workload) -> tuple[str, Ratio] | None:
    """The peer of the group with the best median, and our ratio to it (above 1: ahead) over their common rounds."""
    by_round = records.by_round(ours.group, workload.name)
    own = by_round.get(ours.name, {})
    names = {p.name for p in PARTICIPANTS if not p.is_ours}
    peers = {who: values for who, values in by_round.items() if who in names and set(values) & set(own)}
    if not peers:
        return None
    sign = 1 if workload.better == "higher" else -1
    best = max(peers, key=lambda who: sign * statistics.median(peers[who].values()))
    rounds = sorted(set(own) & set(peers[best]))
    a, b = [own[r] for r in rounds], [peers[best][r] for r in rounds]
    return best, paired_ratio(a, b) if sign == 1 else paired_ratio(b, a)


def bound(records: Records, shape: Shape, ours: Participant, workload: str, round: int) -> float | None:
    """Tokens per second that bytes and arithmetic allow in that round; attention is not counted."""
    limits = {w: records.by_round("limits", w).get(ours.group, {}).get(round) for w in LIMITS}
    size = records.by_round(ours.group, "weight bytes").get(ours.name, {}).get(0)
    read, peak = limits["read"], limits["int8" if ours.weights == "w8a8" else "bfloat16"]
    if not (read and peak and size):
        return None
    prompt = 2 * shape.linear / peak  # seconds per prompt token
    if workload == "decode":
        return read / size
    if workload == "prefill":
        return 1 / prompt
    if workload == "batch16":
        step = max(size / read, 16 * 2 * (shape.linear + shape.head) / peak)
        return 16 * 64 / (16 * 128 * prompt + 64 * step)
    return None


def _ratio_table(records: Records) -> Iterator[str]:
    shape = Shape.read(records)
    yield "\n## Against the best peer, and against the limit\n"
    yield "Ratios of numbers of one round. The limit: bandwidth and arithmetic of that round, bytes and multiplications"
    yield "of the weights (attention is not counted).\n"
    yield "| | | best peer | ratio | aim | share of the limit | aim |\n|---|---|---|---|---|---|---|"
    for ours in (p for p in PARTICIPANTS if p.is_ours):
        for workload in MAIN:
            found = best_peer(records, ours, workload)
            own = records.by_round(ours.group, workload.name).get(ours.name, {})
            if not own:
                continue
            peer, ratio = (found[0], str(found[1])) if found else ("-", "-")
            bounds = {r: bound(records, shape, ours, workload.name, r) for r in own} if shape else {}
            shares = [own[r] / b for r, b in bounds.items() if b]
            share = f"{statistics.median(shares):.0%}" if shares else "-"
            aims = TARGETS.get((ours.name, workload.name))
            aim = (f"{aims[0]:.2f}x", f"{aims[1]:.0%}") if aims else ("", "")
            yield f"| {ours.name} | {workload.title} | {peer} | {ratio} | {aim[0]} | {share} | {aim[1]} |"


def _serve_table(records: Records) -> Iterator[str]:
    workloads = dict.fromkeys(s.workload for s in records.samples if s.group == "serve")
    if not workloads:
        return
    yield "\n## Serving (512 in, 64 out, bf16)\n"
    yield "| | lmkit | vLLM | lmkit / vLLM |\n|---|---|---|---|"
    for workload in sorted(workloads, key=_serve_order):
        by_round = records.by_round("serve", workload)
        ours, theirs = (by_round.get(who, {}) for who in SERVERS)
        rounds = sorted(set(ours) & set(theirs))
        zero = any(theirs[r] == 0 for r in rounds)
        ratio = paired_ratio([ours[r] for r in rounds], [theirs[r] for r in rounds]) if rounds and not zero else ""
        cells = [
            f"{statistics.median(v.values()):,.2f}" if v else "-"
            for v in (_in_mib(workload, x) for x in (ours, theirs))
        ]
        yield f"| {workload}{_serve_unit(workload)} | {cells[0]} | {cells[1]} | {ratio} |"


def _in_mib(workload: str, values: dict[int, float]) -> dict[int, float]:
    return {r: v / 2**20 for r, v in values.items()} if workload == "resident" else values


def _serve_unit(workload: str) -> str:
    if workload == "resident":
        return ", MiB"
    unit = next((unit for name, unit in SERVE_ROWS if workload.endswith(name)), "s")
    return f", {unit}" if unit else ""


def _serve_order(workload: str) -> tuple[int, int]:
    load, _, name = workload.partition(" ")
    if not load[1:].isdigit():
        return (1 << 20, 0)
    return int(load[1:]), next(i for i, (row, _) in enumerate(SERVE_ROWS) if row == name)


def _context_table(records: Records) -> Iterator[str]:
    rows = {
        p: [_cell(records, p, w.name, "{:.1f}") for w in CONTEXT]
        for p in PARTICIPANTS
        if any(p.name in records.by_round(p.group, w.name) for w in CONTEXT)
    }
    if not rows:
        return
    yield "\n## Decode over long contexts, tok/s\n"
    yield f"| | {' | '.join(w.title.partition('at ')[2] for w in CONTEXT)} |\n|---|{'---|' * len(CONTEXT)}"
    for p, cells in rows.items():
        yield f"| {p.name} | {' | '.join(cells)} |"


def plots(records: Records, out: Path, name: str) -> None:
    """Bars for the main workloads; nothing when matplotlib is not installed."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        print("no plots: pip install 'lmkit-bench[plot]'")
        return
    panels: Sequence[Workload] = [w for w in (*MAIN[:3], *CONTEXT) if _rows(records, w)]
    if not panels:
        return
    figure = Figure(figsize=(5.5 * min(3, len(panels)), 4.2 * -(-len(panels) // 3)), layout="constrained")
    for number, workload in enumerate(panels, 1):
        axes = figure.add_subplot(-(-len(panels) // 3), min(3, len(panels)), number)
        for at, (p, values) in enumerate(_rows(records, workload)):
            middle = statistics.median(values)
            spread = [[middle - min(values)], [max(values) - middle]]
            axes.barh(at, middle, xerr=spread, color="C1" if p.is_ours else "C0", capsize=3)
        axes.set_yticks(range(len(_rows(records, workload))), [p.name for p, _ in _rows(records, workload)])
        axes.invert_yaxis()
        axes.set_title(workload.title)
        axes.set_xlabel(workload.unit)
    run = records.runs[0]
    figure.suptitle(f"{run.shape}: {run.machine.processor}, {run.machine.cores} cores, {run.created[:10]}")
    for suffix in ("png", "svg"):
        figure.savefig(out / f"{name}.{suffix}", dpi=110)


def _rows(records: Records, workload: Workload) -> list[tuple[Participant, list[float]]]:
    found = []
    for p in PARTICIPANTS:
        values = list(records.by_round(p.group, workload.name).get(p.name, {}).values())
        if values:
            found.append((p, values))
    return found
