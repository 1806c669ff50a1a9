"""The worker: one model on one device. The same object in all executors."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from lmkit.api import (
    Checkpoint,
    Control,
    EngineError,
    GrammarMasks,
    KVConfig,
    LoadedModel,
    LogitsProcessor,
    ModelInfo,
    NewRow,
    PluginError,
    Reply,
    ResetCache,
    ResolvedPlan,
    RowLogprobs,
    StepLimits,
    StepPlan,
    StepResult,
    WorkerFacts,
)
from lmkit.execution import memory
from lmkit.execution.inputs import InputBuilder, PromptJob, Step
from lmkit.execution.rows import RowTable
from lmkit.plugins import load_target
from lmkit.sampling import SampleBatch, Sampled, Sampler, TokenChoice, accept, gather_logprobs
from lmkit.sampling.noise import seed_of

if TYPE_CHECKING:
    from torch import Tensor

    from lmkit.api import AttentionBackend, Platform, Progress
    from lmkit.config import EngineConfig

PROMPT_ROWS = 64  # rows of logits made at once for prompt log-probabilities


@dataclass(slots=True)
class Pending:
    """A step between forward and sample."""

    step: Step
    hidden: Tensor


class Runner:
    """Runs steps of a loaded model: applies plans to rows, builds inputs, calls the model, samples.

    Knows neither configuration nor loading; Worker makes it once the KV cache is configured.
    """

    def __init__(
        self, loaded: LoadedModel, kv: KVConfig, limits: StepLimits, backends: Sequence[AttentionBackend],
        platform: Platform, device: torch.device, *, eos_token_ids: Sequence[int] = (), max_drafts: int = 0,
        seed: int = 0, processors: Mapping[str, LogitsProcessor] | None = None, debug_kv: bool = False,
    ) -> None:  # fmt: skip
        """`backends`: one per KV group. `debug_kv` fills fresh blocks with NaN: reading what nobody wrote shows."""
        self.model, self.kv_config, self.seed, self.debug_kv = loaded.model, kv, seed, debug_kv
        needs = [need for need, _ in loaded.info.kv_groups()]
        self.kv, self._spans = _allocate(kv, needs, backends, device)
        max_blocks = [-(-limits.max_length // spec.block_size) for spec in kv.specs]
        self.rows = RowTable(limits.max_rows, limits.max_length + max_drafts + 1, max_blocks)
        self.sampler = Sampler(limits.max_rows, loaded.info.vocab_size, eos_token_ids, processors)
        planners = [b.planner(need, limits, platform) for b, need in zip(backends, needs, strict=True)]
        self.inputs = InputBuilder(self.rows, limits, kv.specs, planners, self.kv, platform)
        self.graphs = platform.graphs(limits)
        self.pending: dict[int, Pending | None] = {}  # step -> work to sample; None: the step has no rows

    @torch.inference_mode()
    def forward(self, plan: StepPlan) -> None:
        """Applies the diff, then computes hidden states of plan.rows."""
        self.rows.apply(plan, self.sampler.remove, self._added)
        if self.debug_kv:
            self._poison(plan)
        for group, source, target in plan.copies:
            for block_of in self._spans[group]:
                block_of(target).copy_(block_of(source))
        for group, block in plan.zero:
            for block_of in self._spans[group]:
                block_of(block).zero_()
        if not plan.rows:
            self.pending[plan.step] = None
            return
        step = self.inputs.build(plan)
        if any(row.params.prompt_logprobs is not None for row in plan.new) or self._prompt_slots:
            step.prompt_jobs = self.inputs.prompt_jobs(step)
        self.pending[plan.step] = Pending(step, self.graphs.run(self.model.forward, step.inputs))

    @torch.inference_mode()
    def sample(self, number: int, masks: GrammarMasks | None = None) -> StepResult:
        """Tokens of the sampling rows of step `number`; they are appended to the rows."""
        pending = self.pending.pop(number)
        if pending is None:
            return StepResult(number, [])
        step = pending.step
        result = StepResult(number, [[] for _ in step.plan.rows])
        if len(step.sample_rows):
            hidden = pending.hidden if step.all_rows else pending.hidden[step.inputs.logits_rows]
            drafts = None
            if step.num_drafts is not None:
                drafts = {self.rows.slot_of[w.id]: w.drafts for w in step.plan.rows if w.drafts}
            batch = SampleBatch(
                step.logit_slots, step.positions, step.sample_rows, self.rows.row_tokens, step.num_drafts, drafts
            )
            self._accept(step, self.sampler.sample(self.model.logits(hidden), batch, masks), result)
        for job in step.prompt_jobs:
            self._prompt_logprobs(job, step, pending.hidden, result)
        return result
