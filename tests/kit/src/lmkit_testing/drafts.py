"""Conformance of proposers that run a model."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import pytest
from lmkit import LLM, SamplingParams
from lmkit.config import CacheConfig, EngineConfig, ModelConfig, SchedConfig
from lmkit_worker.drafting import Drafting

from lmkit_testing.checkpoints import byte_tokenizer, tiny_checkpoint
from lmkit_testing.model import installed, prompt
from lmkit_testing.specs import PluginConformance

VOCAB, TOKENS, GUESSES = 259, 24, 3
WAYS: dict[str, dict[str, Any]] = {  # of running: what is guessed depends on none of them
    "alone": {"max_rows": 1, "max_tokens": 256, "cache": False},
    "together": {"max_rows": 8, "max_tokens": 256, "cache": False},
    "in chunks": {"max_rows": 8, "max_tokens": 16, "cache": False},
    "behind cached blocks": {"max_rows": 8, "max_tokens": 64, "cache": True},
    "now and then": {"max_rows": 8, "max_tokens": 64, "cache": False, "every": 7},
}
PROMPTS = [prompt(VOCAB, 5, seed=5), prompt(VOCAB, 40, seed=40), prompt(VOCAB, 40, seed=40)[:36]]
PARAMS = [
    SamplingParams(max_tokens=TOKENS, temperature=0.0, ignore_eos=True),
    SamplingParams(max_tokens=TOKENS, temperature=1.0, seed=7, ignore_eos=True),
]


class Asked(Drafting):
    """Asks in every step for GUESSES of each row, or in one of `every`, and notes what is guessed for which text."""

    found: ClassVar[dict[tuple[int, ...], list[int]]] = {}
    every: ClassVar[int] = 1

    def guess(self, step: Any, hidden: Any, result: Any, asked: Any, most: Any) -> list[list[int]]:
        rows = [row for row in step.sample_rows.tolist() if result.tokens[row]]
        if step.plan.step % self.every:
            Drafting.guess(self, step, hidden, result, [], [])
            return [[] for _ in asked]
        given = Drafting.guess(self, step, hidden, result, rows, [GUESSES] * len(rows))
        for row, guess in zip(rows, given, strict=True):
            self.found[tuple(self._rows.row_tokens(int(step.slots[row])).tolist())] = guess
        by_row = dict(zip(rows, given, strict=True))
        return [by_row[row] for row in asked]


class DraftConformance(PluginConformance):
    """A draft of any quality passes. No token changes; and what it guesses follows from the text alone, which it does
    not where its keys are stale or stand elsewhere, or hidden states are those of another place."""

    def write(self, folder: Path) -> dict[str, Any]:
        """Writes a tiny model without end tokens, VOCAB tokens and a tokenizer, into `folder`, and what guesses for it.

        Returns the options of the proposer. The model here is a Llama; `write_draft` is enough for it.
        """
        tiny_checkpoint("LlamaForCausalLM", folder, vocab_size=VOCAB, eos_token_id=None, num_hidden_layers=4)
        byte_tokenizer(folder)
        return self.write_draft(folder, folder / "draft")

    def write_draft(self, model: Path, folder: Path) -> dict[str, Any]:
        """Writes what guesses for the Llama `model` into `folder`, if anything. Returns the proposer's options."""
        return {}

    @pytest.fixture
    def answers(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
        """(a proposer or "none", a way) -> the answers, and what was guessed by text."""
        options, name = self.write(tmp_path), self.plugin.partition(":")[2]
        monkeypatch.setattr("lmkit_worker.runner.Drafting", Asked)
        monkeypatch.setattr("lmkit_worker.lengths.Lengths.hopeless", False)  # else it is not told of most steps

        def ask(proposer: str, way: str) -> tuple[list[list[int]], dict[tuple[int, ...], list[int]]]:
            how = WAYS[way]
            config = EngineConfig(
                model=ModelConfig(str(tmp_path), dtype="float32", max_length=96),
                cache=CacheConfig(num_blocks=96, prefix_cache=how["cache"]),
                sched=SchedConfig(max_tokens=how["max_tokens"], max_rows=how["max_rows"]),
                wanted={"proposer": proposer},
                plugins={f"proposer.{name}": options} if proposer == name else {},
            )
            Asked.found.clear()
            monkeypatch.setattr(Asked, "every", how.get("every", 1))
            with LLM(config=config, host=installed()) as llm:
                outputs = [llm.generate(PROMPTS, params, progress=False) for params in PARAMS]
            assert all(output.outputs[0].error is None for found in outputs for output in found)
            return [output.token_ids for found in outputs for output in found], dict(Asked.found)

        return ask

    @pytest.mark.parametrize("way", list(WAYS)[1:])
    @pytest.mark.one_in(3)
    def test_no_token_changes_and_guesses_follow_from_the_text(self, answers: Any, way: str) -> None:
        name, usual = self.plugin.partition(":")[2], next(iter(WAYS))
        plain, _ = answers("none", usual)
        first: dict[tuple[int, ...], list[int]] = {}
        for each in (usual, way):
            tokens, guesses = answers(name, each)
            assert tokens == plain
            assert len(guesses) * WAYS[each].get("every", 1) > TOKENS
            for text, guess in guesses.items():
                wanted = first.setdefault(text, guess)
                num = min(len(wanted), len(guess))  # where a row has no block for more, fewer are guessed
                assert wanted[:num] == guess[:num], text
