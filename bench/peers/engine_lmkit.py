"""lmkit: the engine of `lmkit bench latency`, in this process."""

from __future__ import annotations

from lmkit.config import EngineConfig, ModelConfig, ParallelConfig, SchedConfig
from lmkit.contracts.config import CacheConfig
from lmkit_bench.engine import BenchEngine
from protocol import Load, serve

BLOCK = 16  # tokens of the smallest usual block: with larger ones there is room to spare


class Lmkit:
    def __init__(self, load: Load) -> None:
        wanted = {} if load.weights.startswith(("bf16", "as in")) else {"quantization": load.weights}
        wanted |= {"op": "linear_native"} if load.weights == "bf16 plain" else {}
        self.engine = BenchEngine(
            EngineConfig(
                model=ModelConfig(
                    model=load.model,
                    max_length=load.max_length,
                ),
                cache=CacheConfig(num_blocks=load.max_rows * (-(-load.max_length // BLOCK) + 2)),
                sched=SchedConfig(max_rows=load.max_rows),
                parallel=ParallelConfig(threads=load.threads),
                wanted=wanted,
            )
        )

        facts = self.engine.facts
        self.facts = {"weight bytes": facts.weight_bytes, "kv bytes": facts.kv_bytes}

    def run(self, prompts: list[list[int]], tokens: int) -> list[list[float]]:
        return self.engine.run([(prompt, tokens) for prompt in prompts]).tokens


if __name__ == "__main__":
    serve(Lmkit)
