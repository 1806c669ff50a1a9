"""An engine of the toy model with logits that are worth sampling: the scheduler, the runner, the sampler, proposers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch
from lmkit.api import (
    AttentionBackend,
    AttnNeed,
    EngineRequest,
    KVConfig,
    LayerInfo,
    LogitsProcessor,
    Proposer,
    SamplingParams,
    SchedLimits,
    SchedStats,
    StepInputs,
    StepLimits,
    StepResult,
    TokenEvent,
)
from lmkit.engine.core import EngineCore
from lmkit.engine.intake import Intake
from lmkit.scheduling.scheduler import Scheduler
from lmkit_worker.drafting import Source
from lmkit_worker.heads import TokenHead
from lmkit_worker.inputs import Step
from lmkit_worker.lengths import Lengths
from lmkit_worker.loaded import LoadedModel
from lmkit_worker.proposals import Proposals
from lmkit_worker.rows import RowTable
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
        info = toy_info(4, (None,))
        need = replace(info.layers[0].attn or AttnNeed(1, 1, 1), tree=True)
        super().__init__(replace(info, vocab_size=vocab_size, layers=(LayerInfo(0, need),)), ToyAttention())
        numbers = torch.Generator().manual_seed(vocab_size)
        self.table = torch.randn(TOY_VOCAB, vocab_size, generator=numbers) * 1.5

    def logits(self, hidden: Tensor) -> Tensor:
        return self.table[hidden[:, 0].long()].clone()

    def after(self, tokens: Sequence[int]) -> Tensor:
        """The logits of what follows `tokens`, [V] float32, without an engine."""
        return self.table[int(checksum(tokens))]


class Places(ManyWays):
    """What follows a text depends on the position of each of its tokens, too."""

    def forward(self, x: StepInputs) -> Tensor:
        return super().forward(replace(x, token_ids=(x.token_ids + 5 * x.positions) % TOY_VOCAB))


Trees = Callable[[list[int], int], tuple[list[int], list[int]]]


class TreeSource(Source):
    """Guesses of a test that branch: what `trees` gives for a text and a number of tokens, and their parents."""

    name, reads_hidden, branches, hopeless = "trees", False, True, False

    def __init__(self, trees: Trees, rows: RowTable) -> None:
        self.trees, self.rows = trees, rows

    def guess(
        self, step: Step, hidden: Tensor, result: StepResult, asked: Sequence[int], most: Sequence[int]
    ) -> list[list[int]]:
        """Contract: Source."""
        result.parents = [[] for _ in step.plan.rows]
        guesses = []
        for row, limit in zip(asked, most, strict=True):
            tokens, result.parents[row] = self.trees(self.rows.row_tokens(step.slots[row]).tolist(), limit)
            guesses.append(tokens)
        return guesses

    def rest(self) -> None:
        """Contract: Source."""


class Tireless(Lengths):
    """Wrong guesses are verified as often as right ones."""

    @property
    def hopeless(self) -> bool:
        return False


class ToyEngine:
    """An engine core around one runner, stepped until all requests are answered."""

    def __init__(
        self, vocab_size: int = TOY_VOCAB, proposer: Proposer | None = None, most: int = 8, max_rows: int = 4,
        processors: Mapping[str, LogitsProcessor] | None = None, *, trees: Trees | None = None,
        model: type[ManyWays] = ManyWays, num_blocks: int = 0, max_tokens: int = 64,
    ) -> None:  # fmt: skip
        """`most`: guesses for a row and step, of `proposer` or `trees`. `num_blocks` of the cache, 0: enough."""
        self.model = model(vocab_size)
        lookahead = most if proposer is not None or trees is not None else 0
        limits = SchedLimits(max_tokens, max_rows, MAX_LENGTH, (EOS,), lookahead=lookahead, max_waiting=1 << 20)
        specs = tuple(self.model.info.kv_specs(4, "float32"))
        kv = KVConfig(specs, (num_blocks or 4 * max_rows * MAX_LENGTH // 4,))
        sizes = StepLimits(max_rows, max_tokens, -(-(MAX_LENGTH + lookahead) // 4) + 1, MAX_LENGTH)
        attention: AttentionBackend = ToyAttention()
        self.runner = Runner(
            LoadedModel(self.model, self.model.info, 0), kv, sizes, [attention], ToyPlatform(),
            torch.device("cpu"), eos_token_ids=(EOS,), max_drafts=lookahead, processors=processors, proposer=proposer,
        )  # fmt: skip
        head = self.runner.head
        assert isinstance(head, TokenHead)
        if trees is not None:
            head.proposals = Proposals(TreeSource(trees, self.runner.rows), self.runner.rows, most, vocab_size)
        if head.proposals is not None:
            head.proposals.lengths = Tireless(max_rows, most)
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


__all__ = ["EOS", "MAX_LENGTH", "ManyWays", "Places", "ToyEngine", "Trees"]
