"""Latency and throughput of an engine in this process, driven with token ids: no tokenizer, no server, no text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count
from time import perf_counter
from types import TracebackType
from typing import TYPE_CHECKING

from lmkit.api import EngineError, EngineRequest, Progress, SamplingParams
from lmkit.config import EngineConfig
from lmkit.config.environment import adopt_environment
from lmkit.engine.platform import platform_environment
from lmkit.plugins.host import PluginHost
from lmkit.plugins.resolve import resolve

from lmkit_bench.result import Metric
from lmkit_bench.workload import Prompt, random_prompts

if TYPE_CHECKING:
    from lmkit.engine.messages import EngineFacts

Advance = Callable[[], None]


@dataclass(frozen=True, slots=True)
class Run:
    """Several prompts run at once. Seconds since the first was handed over."""

    tokens: list[list[float]]  # per prompt: when each output token was there
    steps: list[float]  # when each step ended

    @property
    def seconds(self) -> float:
        return self.steps[-1]

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.tokens))

    @property
    def ttft(self) -> float:
        """Until every prompt has its first token."""
        return max(times[0] for times in self.tokens)

    @property
    def step_seconds(self) -> float | None:
        """Mean time of a decode step: from the last first token to the last token."""
        steps = [at for at in self.steps if at > self.ttft]
        return (steps[-1] - self.ttft) / len(steps) if steps else None


class BenchEngine:
    """The engine of a configuration. Close it, or use it in a `with`."""

    def __init__(self, config: EngineConfig, host: PluginHost | None = None, progress: Progress | None = None) -> None:
        """Raises what prevents an engine from starting."""
        host = host or PluginHost()
        resolved, checkpoint, _ = resolve(config, host)
        adopt_environment(platform_environment(config, resolved))
        from lmkit.engine.build import build_engine  # imports torch

        self.resolved = resolved
        self._config, self._host, self._checkpoint = config, host, checkpoint
        self._engine = build_engine(config, resolved, checkpoint, progress)
        self._numbers = count()

    @property
    def facts(self) -> EngineFacts:
        return self._engine.facts

    @property
    def vocabulary(self) -> range:
        """Ids for random prompts: all but the first, which are special tokens as a rule."""
        return range(3, self.facts.vocab_size)

    def tokenized(self, prompts: Sequence[Prompt]) -> list[Prompt]:
        """Texts as token ids. Raises CheckpointError when there is a text, and no tokenizer."""
        if all(isinstance(p.prompt, list) for p in prompts):
            return list(prompts)
        from lmkit.text.side import TextSide

        text = TextSide.open(self._checkpoint, self.resolved, self._config)
        return [Prompt(text.encode_prompt(p.prompt), p.num_output) if isinstance(p.prompt, str) else p for p in prompts]

    def run(self, prompts: Sequence[tuple[Sequence[int], int]]) -> Run:
        """(token ids, output tokens) of each prompt; greedy, ends ignored. Raises RequestError, EngineError."""
        core = self._engine.core
        ids = [f"bench-{next(self._numbers)}" for _ in prompts]
        times: dict[str, list[float]] = {id: [] for id in ids}
        steps = []
        began = perf_counter()
        for id, (prompt, num_output) in zip(ids, prompts, strict=True):
            params = SamplingParams(max_tokens=num_output, temperature=0, ignore_eos=True)
            core.add(EngineRequest(id, list(prompt), params))
        while core.has_work():
            events = core.step()
            now = perf_counter() - began
            if events:
                steps.append(now)
            for event in events:
                if event.error is not None:
                    raise EngineError(f"a request of the benchmark failed: {event.error.message}")
                times[event.id] += [now] * len(event.tokens)
        return Run([times[id] for id in ids], steps)

    def close(self) -> None:
        self._engine.close()

    def __enter__(self) -> BenchEngine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def latency(
    engine: BenchEngine, num_input: int, num_output: int, batch: int, rounds: int, advance: Advance = lambda: None
) -> dict[str, Metric]:
    """One batch at a time, `rounds` times after a warm-up; every round has new prompts, so no prefix is found."""
    runs = []
    for number in range(rounds + 1):
        prompts = random_prompts(batch, num_input, num_output, seed=number, vocabulary=engine.vocabulary)
        runs.append(engine.run(_as_ids(prompts)))
        advance()
    runs = runs[1:]
    metrics = {
        "ttft": Metric("s", "lower", [r.ttft for r in runs]),
        "e2e": Metric("s", "lower", [r.seconds for r in runs]),
        "prefill": Metric("tok/s", "higher", [batch * num_input / r.ttft for r in runs]),
        "output": Metric("tok/s", "higher", [r.num_tokens / r.seconds for r in runs]),
    }
    steps = [r.step_seconds for r in runs if r.step_seconds is not None]
    if steps:
        metrics["decode step"] = Metric("s", "lower", steps)
        metrics["decode"] = Metric("tok/s", "higher", [batch / s for s in steps])
    return metrics


def throughput(
    engine: BenchEngine, prompts: Sequence[Prompt], rounds: int, advance: Advance = lambda: None
) -> dict[str, Metric]:
    """All prompts handed over at once, `rounds` times; later rounds find what the first left in the prefix cache."""
    engine.run([(prompts[0].prompt[:16], 2)])  # type: ignore[list-item]
    runs = []
    for _ in range(rounds):
        runs.append(engine.run(_as_ids(prompts)))
        advance()
    num_input = sum(len(p.prompt) for p in prompts)
    return {
        "requests": Metric("req/s", "higher", [len(prompts) / r.seconds for r in runs]),
        "output": Metric("tok/s", "higher", [r.num_tokens / r.seconds for r in runs]),
        "total": Metric("tok/s", "higher", [(r.num_tokens + num_input) / r.seconds for r in runs]),
        "seconds": Metric("s", "lower", [r.seconds for r in runs]),
    }


def _as_ids(prompts: Sequence[Prompt]) -> list[tuple[list[int], int]]:
    assert all(isinstance(p.prompt, list) for p in prompts), "texts are tokenized before"
    return [(p.prompt, p.num_output) for p in prompts]  # type: ignore[misc]
