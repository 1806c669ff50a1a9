"""What a server's /metrics say, and what two looks at them tell of the time between."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from prometheus_client.parser import text_string_to_metric_families

# what is shown -> the names under which servers have it, lmkit's first; values of all labels are added up
GAUGES: Mapping[str, tuple[str, ...]] = {
    "up": ("lmkit_engine_up",),
    "waiting": ("lmkit_requests_waiting", "vllm:num_requests_waiting"),
    "running": ("lmkit_requests_running", "vllm:num_requests_running"),
    "kv": ("lmkit_kv_usage_ratio", "vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"),
    "blocks": ("lmkit_kv_blocks",),
}
COUNTERS: Mapping[str, tuple[str, ...]] = {
    "output": ("lmkit_engine_output_tokens_total", "vllm:generation_tokens_total"),
    "prompt": ("lmkit_engine_prompt_tokens_total", "vllm:prompt_tokens_total"),
    "hits": ("lmkit_prefix_cache_hits_total", "vllm:prefix_cache_hits_total"),
    "queries": ("lmkit_prefix_cache_queries_total", "vllm:prefix_cache_queries_total"),
    "steps": ("lmkit_steps_total",),
    "preempted": ("lmkit_preemptions_total", "vllm:num_preemptions_total"),
    "drafts": ("lmkit_draft_tokens_total", "vllm:spec_decode_num_draft_tokens_total"),
    "accepted": ("lmkit_accepted_draft_tokens_total", "vllm:spec_decode_num_accepted_tokens_total"),
    "finished": ("lmkit_requests_finished_total", "vllm:request_success_total"),
}
HISTOGRAMS: Mapping[str, tuple[str, ...]] = {
    "first": ("lmkit_time_to_first_token_seconds", "vllm:time_to_first_token_seconds"),
    "next": ("lmkit_inter_token_latency_seconds", "vllm:inter_token_latency_seconds"),
}


@dataclass(frozen=True)
class Snapshot:
    """One look. What the server does not say is not in the mappings."""

    at: float  # seconds of a monotonic clock
    values: Mapping[str, float]
    buckets: Mapping[str, Mapping[float, float]] = field(default_factory=dict)  # upper bound, seconds -> how many
    model: str = ""


def read(text: str, at: float) -> Snapshot:
    """Raises ValueError for a text that is no exposition of metrics, or has nothing of an engine."""
    found: dict[str, float] = {}
    buckets: dict[str, dict[float, float]] = {}
    model = ""
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            model = model or sample.labels.get("model_name", "")
            if "le" in sample.labels:
                counts = buckets.setdefault(sample.name.removesuffix("_bucket"), {})
                bound = float(sample.labels["le"])
                counts[bound] = counts.get(bound, 0.0) + sample.value
            else:
                found[sample.name] = found.get(sample.name, 0.0) + sample.value
    values = {name: found[known] for name, known in _known({**GAUGES, **COUNTERS}, found)}
    if "running" not in values and "output" not in values:
        raise ValueError("there are no figures of an engine in it")
    return Snapshot(at, values, {name: buckets[known] for name, known in _known(HISTOGRAMS, buckets)}, model)


def _known(names: Mapping[str, tuple[str, ...]], found: Iterable[str]) -> Iterable[tuple[str, str]]:
    for name, candidates in names.items():
        if known := next((candidate for candidate in candidates if candidate in found), None):
            yield name, known


def rate(name: str, before: Snapshot, after: Snapshot) -> float | None:
    """How fast a counter grew, a second. None where it is not known, or began anew: the server was started again."""
    if name not in before.values or name not in after.values or after.at <= before.at:
        return None
    grown = after.values[name] - before.values[name]
    return grown / (after.at - before.at) if grown >= 0 else None


def share(part: str, whole: str, before: Snapshot, after: Snapshot) -> float | None:
    """The share of what one counter grew by in what another did, of which it is a part."""
    of, grown = rate(part, before, after), rate(whole, before, after)
    return of / grown if of is not None and grown else None


def quantile(name: str, q: float, before: Snapshot, after: Snapshot) -> float | None:
    """Seconds below which a share `q` of what happened between two looks lay, as far as buckets tell."""
    then, now = before.buckets.get(name, {}), after.buckets.get(name, {})
    counts = [(bound, now[bound] - then.get(bound, 0.0)) for bound in sorted(now)]
    total = counts[-1][1] if counts else 0.0
    if total <= 0 or any(count < 0 for _, count in counts):
        return None
    low, below = 0.0, 0.0
    for bound, count in counts:
        if count >= q * total:
            if math.isinf(bound):
                return low
            return low + (bound - low) * ((q * total - below) / (count - below) if count > below else 1.0)
        low, below = bound, count
    return low
