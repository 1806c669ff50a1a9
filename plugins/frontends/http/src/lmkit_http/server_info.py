"""What balancers read in labels of metrics: the model server protocol of Kubernetes' gateways.

https://github.com/kubernetes-sigs/gateway-api-inference-extension; the names are those of vLLM.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

from prometheus_client.core import GaugeMetricFamily, Metric

if TYPE_CHECKING:
    from lmkit_http.backend import Backend


class ServerInfo:
    """A collector: what a balancer wants to know of cache and adapters, in labels."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend

    def collect(self) -> Iterator[Metric]:
        facts, model = self._backend.facts, self._backend.model
        size = facts.block_size
        labels = {
            "model_name": model, "block_size": str(size),
            "num_gpu_blocks": str(facts.num_kv_tokens // size if size else 0),
            "enable_prefix_caching": str(self._backend.prefix_cache),
        }  # fmt: skip
        info = GaugeMetricFamily("vllm:cache_config_info", "the KV cache: blocks, and tokens in one", labels=[*labels])
        info.add_metric([*labels.values()], 1.0)
        yield info
        if facts.max_adapters:
            yield self._adapters(facts.max_adapters)

    def _adapters(self, most: int) -> Metric:
        """A request is running from its first token on: before, only the engine knows."""
        asked = [
            (bool(turn.first), turn.request.adapter)
            for generation in self._backend.running for turn in generation.turns
            if turn.request.adapter is not None and turn.message.finish is None
        ]  # fmt: skip
        asked += self._backend.elsewhere()
        running, waiting = (",".join(sorted({name for began, name in asked if began is b})) for b in (True, False))
        labels = {"max_lora": str(most), "running_lora_adapters": running, "waiting_lora_adapters": waiting}
        info = GaugeMetricFamily(
            "vllm:lora_requests_info", "adapters that requests use now; the value is the time", labels=[*labels]
        )
        info.add_metric([*labels.values()], time.time())
        return info
