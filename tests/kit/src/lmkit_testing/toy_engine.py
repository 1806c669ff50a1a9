"""An engine of the toy model with logits that are worth sampling: the scheduler, the runner, the sampler, proposers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace

import torch
from lmkit.api import (
    Control,
    EngineRequest,
    GrammarMasks,
    KVConfig,
    LogitsProcessor,
    Proposer,
    Reply,
    SamplingParams,
    SchedLimits,
    SchedStats,
    StepLimits,
    StepPlan,
    StepResult,
    TokenEvent,
    WorkerFacts,
)
from lmkit.engine.core import EngineCore
from lmkit.engine.intake import Intake
from lmkit.scheduling.scheduler import Scheduler
from lmkit_worker.loaded import LoadedModel
from lmkit_worker.runner import Runner
from lmkit_worker.uniproc import StepFuture
from torch import Tensor

from lmkit_testing.stepper import ArrivalOrder
from lmkit_testing.toy import TOY_VOCAB, ToyAttention, ToyModel, ToyPlatform, checksum, toy_info

EOS = 1
MAX_LENGTH = 64


class ManyWays(ToyModel):
    """Several tokens are likely after each text: logits [V] are those of the text's checksum."""

    def __init__(self, vocab_size: int) -> None:
        super().__init__(replace(toy_info(4, (None,)), vocab_size=vocab_size), ToyAttention())
        numbers = torch.Generator().manual_seed(vocab_size)
        self.table = torch.randn(TOY_VOCAB, vocab_size, generator=numbers) * 1.5

    def logits(self, hidden: Tensor) -> Tensor:
        return self.table[hidden[:, 0].long()].clone()

    def after(self, tokens: Sequence[int]) -> Tensor:
        """The logits of what follows `tokens`, [V] float32, without an engine."""
        return self.table[int(checksum(tokens))]


class ToyEngine:
    """Implements Executor around one runner, and steps the core until all requests are answered."""

    depth = 1

    def __init__(
        self, vocab_size: int = TOY_VOCAB, proposer: Proposer | None = None, most: int = 8, max_rows: int = 4,
        processors: Mapping[str, LogitsProcessor] | None = None,
    ) -> None:  # fmt: skip
        """`most`: guesses for a row and step."""
        self.model = ManyWays(vocab_size)
        lookahead = most if proposer is not None else 0
        limits = SchedLimits(64, max_rows, MAX_LENGTH, (EOS,), lookahead=lookahead, max_waiting=1 << 20)
        kv = KVConfig(tuple(self.model.info.kv_specs(4, "float32")), (4 * max_rows * MAX_LENGTH // 4,))
        sizes = StepLimits(max_rows, 64, -(-(MAX_LENGTH + lookahead) // 4) + 1, MAX_LENGTH)
        self.runner = Runner(
            LoadedModel(self.model, self.model.info, 0), kv, sizes, [ToyAttention()], ToyPlatform(),
            torch.device("cpu"), eos_token_ids=(EOS,), max_drafts=lookahead, processors=processors, proposer=proposer,
        )  # fmt: skip
        known = dict.fromkeys(processors or {})
        self.core = EngineCore(
            Scheduler(limits, kv, ArrivalOrder()), self, Intake(vocab_size, MAX_LENGTH, processors=known)
        )

    def answers(self, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams]) -> list[list[TokenEvent]]:
        """The events of each prompt."""
        found: dict[str, list[TokenEvent]] = {str(i): [] for i in range(len(prompts))}
        for i, (prompt, each) in enumerate(zip(prompts, params, strict=True)):
            self.core.add(EngineRequest(str(i), list(prompt), each, arrival=float(i)))
        while self.core.has_work():
            for event in self.core.step():
                found[event.id].append(event)
            self.runner.check()
        return list(found.values())

    def tokens(self, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams]) -> list[list[int]]:
        return [[token for event in events for token in event.tokens] for events in self.answers(prompts, params)]

    @property
    def stats(self) -> SchedStats:
        return self.core.scheduler.stats()

    # ------------------------------------------------------------------------------------------- Executor protocol

    def start(self) -> WorkerFacts:
        raise AssertionError("not used")

    def configure_kv(self, kv: KVConfig, limits: SchedLimits) -> None:
        raise AssertionError("not used")

    def forward(self, plan: StepPlan) -> None:
        self.runner.forward(plan)

    def sample(self, step: int, masks: GrammarMasks | None) -> Future[StepResult]:
        return StepFuture(self.runner.sample(step, masks))

    def control(self, command: Control) -> list[Reply]:
        self.runner.reset()
        return [Reply(True)]

    def inspect_adapter(self, path: str) -> str:
        raise AssertionError("not used")

    def on_failure(self, callback: object) -> None:
        """Never fails."""

    def close(self) -> None:
        """Nothing to close."""


__all__ = ["EOS", "MAX_LENGTH", "ManyWays", "ToyEngine"]
