"""An engine of the toy model with logits that are worth sampling: the scheduler, the runner, the sampler, proposers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from lmkit.api import (
    AttentionBackend,
    EngineRequest,
    KVConfig,
    LogitsProcessor,
    Proposer,
    SamplingParams,
    SchedLimits,
    SchedStats,
    StepLimits,
    TokenEvent,
)
from lmkit.engine.core import EngineCore
from lmkit.engine.intake import Intake
from lmkit.scheduling.scheduler import Scheduler
from lmkit_worker.loaded import LoadedModel
from lmkit_worker.runner import Runner
from torch import Tensor

from lmkit_testing.one_runner import OneRunner
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
    """An engine core around one runner, stepped until all requests are answered."""

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
        attention: AttentionBackend = ToyAttention()
        self.runner = Runner(
            LoadedModel(self.model, self.model.info, 0), kv, sizes, [attention], ToyPlatform(),
            torch.device("cpu"), eos_token_ids=(EOS,), max_drafts=lookahead, processors=processors, proposer=proposer,
        )  # fmt: skip
        known = dict.fromkeys(processors or {})
        self.core = EngineCore(
            Scheduler(limits, kv, ArrivalOrder()),
            OneRunner(self.runner),
            Intake(vocab_size, MAX_LENGTH, processors=known),
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


__all__ = ["EOS", "MAX_LENGTH", "ManyWays", "ToyEngine"]
