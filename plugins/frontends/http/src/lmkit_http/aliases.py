"""The same figures under the names of vLLM, for dashboards and autoscalers that exist.

A name is here where the meaning is the same. Theirs: https://docs.vllm.ai/en/latest/design/metrics.
"""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric

# alias -> our name; counters without _total
ALIASES = {
    "vllm:num_requests_waiting": "lmkit_requests_waiting",
    "vllm:num_requests_running": "lmkit_requests_running",
    "vllm:kv_cache_usage_perc": "lmkit_kv_usage_ratio",
    "vllm:gpu_cache_usage_perc": "lmkit_kv_usage_ratio",
    "vllm:num_preemptions": "lmkit_preemptions",
    "vllm:prompt_tokens": "lmkit_engine_prompt_tokens",
    "vllm:prompt_tokens_cached": "lmkit_prefix_cache_hits",
    "vllm:generation_tokens": "lmkit_engine_output_tokens",
    "vllm:prefix_cache_queries": "lmkit_prefix_cache_queries",
    "vllm:prefix_cache_hits": "lmkit_prefix_cache_hits",
    "vllm:spec_decode_num_draft_tokens": "lmkit_draft_tokens",
    "vllm:spec_decode_num_accepted_tokens": "lmkit_accepted_draft_tokens",
    "vllm:request_success": "lmkit_requests_finished",
    "vllm:time_to_first_token_seconds": "lmkit_time_to_first_token_seconds",
    "vllm:inter_token_latency_seconds": "lmkit_inter_token_latency_seconds",
    "vllm:e2e_request_latency_seconds": "lmkit_request_seconds",
    "vllm:request_queue_time_seconds": "lmkit_request_queue_seconds",
    "vllm:request_prefill_time_seconds": "lmkit_request_prefill_seconds",
    "vllm:request_decode_time_seconds": "lmkit_request_decode_seconds",
}
_LABELS = {"lmkit_requests_finished": {"reason": "finished_reason"}}  # those that have another name there


class Aliases:
    """A collector: the metrics of another registry, once more."""

    def __init__(self, source: CollectorRegistry) -> None:
        self._source = source

    def collect(self) -> Iterator[Metric]:
        ours = {metric.name: metric for metric in self._source.collect()}
        for alias, name in ALIASES.items():
            if (metric := ours.get(name)) is None:
                continue  # the engine said nothing
            same, renamed = Metric(alias, metric.documentation, metric.type), _LABELS.get(name, {})
            for sample in metric.samples:
                if not sample.name.endswith("_created"):
                    labels = {renamed.get(label, label): value for label, value in sample.labels.items()}
                    same.add_sample(alias + sample.name.removeprefix(name), labels, sample.value)
            yield same
