"""Conformance of logits processors."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import pytest
import torch
from lmkit.api import LogitsProcessor, SampleContext, SamplingParams, Spec
from torch import Tensor

from lmkit_testing.specs import PluginConformance

VOCAB = 64
TEXTS = [[1, 2, 3, 1, 2], [5], [7, 7, 7, 7, 7, 7], [9, 8, 1, 2, 3, 1, 2]]


class LogitsProcessorConformance(PluginConformance):
    """A row's logits follow from its own request and text: not from its slot, its neighbours, or what came before."""

    asked: ClassVar[Sequence[Mapping[str, Any]]] = ()  # what requests may say under its name; at least one
    refused: ClassVar[Sequence[Mapping[str, Any]]] = ()  # what its dataclass of options does not take

    @pytest.fixture
    def processor(self, target: Any) -> LogitsProcessor:
        made: LogitsProcessor = target()
        return made

    def applied(
        self, processor: LogitsProcessor, spec: Spec, options: Mapping[str, Any], texts: Sequence[Sequence[int]],
        logits: Tensor, slots: Sequence[int],
    ) -> Tensor:  # fmt: skip
        """What becomes of `logits` [S, VOCAB] of rows that begin with `texts`, in `slots`."""
        params = SamplingParams(extra={spec.name: options})
        taken = [processor.add(slot, params, text) for slot, text in zip(slots, texts, strict=True)]
        x = logits.clone()
        if all(taken):
            context = SampleContext(list(slots), [len(text) for text in texts], lambda row: texts[row])
            if processor.stage == "probs":
                x = x.softmax(-1)
            processor.apply(x, context)
            for slot in slots:
                processor.remove(slot)
        return x

    def test_options_are_checked(self, target: Any) -> None:
        options: Any = target.options
        if not self.asked:
            pytest.skip("`asked` is empty: the class of the test says what requests may ask")
        if options is None:
            return
        assert dataclasses.is_dataclass(target.options), "wrong options are refused by a dataclass"
        for value in self.asked:
            options(**value)
        for wrong in self.refused:
            with pytest.raises((TypeError, ValueError)):
                options(**wrong)

    def test_rows_stand_alone(self, processor: LogitsProcessor, spec: Spec) -> None:
        logits = torch.randn(len(TEXTS), VOCAB, generator=torch.Generator().manual_seed(0))
        for options in self.asked:
            slots = [3, 0, 7, 1]
            together = self.applied(processor, spec, options, TEXTS, logits, slots)
            for i, text in enumerate(TEXTS):
                alone = self.applied(processor, spec, options, [text], logits[i : i + 1], [5])
                assert torch.equal(alone[0], together[i])
            turned = self.applied(processor, spec, options, TEXTS[::-1], logits.flip(0), slots)
            assert torch.equal(turned.flip(0), together)

    def test_a_slot_is_forgotten(self, processor: LogitsProcessor, spec: Spec) -> None:
        logits = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(1))
        for options in self.asked:
            first = self.applied(processor, spec, options, TEXTS[:1], logits, [2])
            self.applied(processor, spec, options, TEXTS[2:3], logits, [2])
            assert torch.equal(self.applied(processor, spec, options, TEXTS[:1], logits, [2]), first)

    def test_the_argmax_is_kept_where_it_is_said(self, processor: LogitsProcessor, spec: Spec) -> None:
        if not processor.keeps_argmax:
            pytest.skip("may change what is likeliest")
        logits = torch.randn(len(TEXTS), VOCAB, generator=torch.Generator().manual_seed(2))
        for options in self.asked:
            found = self.applied(processor, spec, options, TEXTS, logits, range(len(TEXTS)))
            assert torch.equal(found.argmax(-1), logits.argmax(-1))

    def test_logits_stay_numbers(self, processor: LogitsProcessor, spec: Spec) -> None:
        """Neither NaN nor plus infinity; minus infinity bans a token."""
        for options in self.asked:
            found = self.applied(processor, spec, options, TEXTS, torch.zeros(len(TEXTS), VOCAB), range(len(TEXTS)))
            assert not found.isnan().any()
            assert not (found == torch.inf).any()
