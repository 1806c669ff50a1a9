"""The table that is printed last: what was asked, what was found, and what failed."""

from __future__ import annotations

from typing import Any

SHOWN = 20  # failures
QUESTIONS: tuple[tuple[str, str], ...] = (
    # name of the result, words
    ("bandwidth", "bandwidth: of copies, read and written, or of reads, the larger"),
    ("gemm", "bfloat16 products of matrices"),
    ("8b decode share", "8B bfloat16, decoding one row: weights read, of the bandwidth"),
    ("8b decode", "8B bfloat16, decoding one row"),
    ("8b batch", "8B, 1k in, 1k out, 256 at once"),
    ("8b prefill share", "8B, a prompt of 8k: arithmetic, of the products' rate"),
    ("0.6b decode", "0.6B, decoding one row"),
    ("8b ready", "8B from files to the first token"),
)


def shown(value: Any, unit: str) -> str:
    if isinstance(value, str):
        return value
    if unit == "share":
        return f"{100 * value:.1f} %"
    digits = 1 if isinstance(value, float) and abs(value) < 1000 else 0
    return f"{value:,.{digits}f} {unit}".strip()


def table(lines: list[dict[str, Any]]) -> str:
    """Markdown: the questions in order, then what the kernels' parts found, then failures."""
    found = {line["name"]: line for line in lines if "value" in line}
    rows = [("", "measured")]
    rows += [(words, shown(found[n]["value"], found[n]["unit"]) if n in found else "-") for n, words in QUESTIONS]
    named = {name for name, _ in QUESTIONS}
    rows += [
        (line["name"], shown(line["value"], line["unit"]) + (f" ({line['said']})" if "said" in line else ""))
        for line in lines
        if line.get("row") and line["name"] not in named
    ]
    text = [f"| {first} | {second} |" for first, second in rows]
    text.insert(1, "|---|---|")
    failed = [f"FAILED {line['part']}, {line['name']}: {line['failed']}" for line in lines if "failed" in line]
    shortened = [f.splitlines()[0][:200] for f in failed[:SHOWN]]
    return "\n".join([*text, *shortened, f"{len(failed)} failures{' (the first are shown)' * (len(failed) > SHOWN)}"])
