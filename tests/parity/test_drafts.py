"""Every native architecture in tiny form says the same with drafts and without, greedy and seeded: its attention reads
and rewrites the places of several tokens of a row in one step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from lmkit import LLM, SamplingParams
from lmkit.api import AttnNeed, SelectionError
from lmkit.config import CacheConfig, EngineConfig, ModelConfig, SchedConfig
from lmkit_testing.checkpoints import byte_tokenizer, tiny_checkpoint
from lmkit_testing.model import installed, prompt
from lmkit_testing.toy_engine import TreeSource
from lmkit_worker.proposals import Proposals

from .classes import conformance_classes

pytest.importorskip("lmkit_proposer_ngram", reason="the proposer is not installed")

VOCAB = 259
CLASSES = {kit.name(): kit for kit in conformance_classes() if kit.plugin == f"model:{kit.name()}"}
PARAMS = [
    SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True),
    SamplingParams(max_tokens=20, temperature=1.0, seed=7, ignore_eos=True),
]
PROMPTS = [prompt(VOCAB, 5, seed=5), prompt(VOCAB, 40, seed=40)]


class Recalls:
    """Guesses from texts that are known, and makes every seventh guess a wrong one."""

    def __init__(self, texts: Sequence[Sequence[int]]) -> None:
        self.texts, self.count = texts, 0

    def propose(self, texts: Sequence[np.ndarray], most: Sequence[int]) -> list[list[int]]:
        found = []
        for row, limit in zip(texts, most, strict=True):
            known, n = next((known for known in self.texts if known[: len(row)] == row.tolist()), ()), len(row)
            self.count += 1
            guess = list(known[n : n + limit])
            if guess and self.count % 4 == 0:
                guess[-1] = (guess[-1] + 1) % VOCAB
            found.append(guess)
        return found


def recalled_trees(texts: Sequence[Sequence[int]]) -> Callable[[list[int], int], tuple[list[int], list[int]]]:
    """What follows in known texts, behind wrong siblings and with wrong children."""

    def trees(row: list[int], most: int) -> tuple[list[int], list[int]]:
        known, n = next((known for known in texts if known[: len(row)] == row), ()), len(row)
        tokens: list[int] = []
        parents: list[int] = []
        last = -1
        for token in known[n : n + most // 3]:
            wrong = (token + 1) % VOCAB
            tokens += [wrong, token, wrong]
            parents += [last, last, len(tokens) - 3]
            last = len(tokens) - 2
        return tokens, parents

    return trees


def engine(directory: Path, proposer: str) -> LLM:
    config = EngineConfig(
        model=ModelConfig(str(directory), dtype="float32", max_length=128),
        cache=CacheConfig(num_blocks=64),
        sched=SchedConfig(max_tokens=48, max_rows=2),
        wanted={"proposer": proposer},
    )
    return LLM(config=config, host=installed())


def answers(llm: LLM, params: SamplingParams) -> list[list[int]]:
    outputs = llm.generate(PROMPTS, params, progress=False)
    assert [output.outputs[0].error for output in outputs] == [None] * len(PROMPTS)
    return [output.token_ids for output in outputs]


def proposals(llm: LLM) -> Any:
    return llm._engine.core.executor.worker.runner.head.proposals


@pytest.mark.parametrize(
    ("architecture", "plugin"), [(name, kit.plugin) for name, kit in sorted(CLASSES.items())], ids=sorted(CLASSES)
)
@pytest.mark.one_in(36)
def test_drafts_change_no_token(
    architecture: str, plugin: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kit = CLASSES[architecture]
    values = {**kit.values, **kit.published, "vocab_size": VOCAB, "eos_token_id": None}
    tiny_checkpoint(kit.family or architecture, tmp_path, **values)
    kit.name_architecture(tmp_path)
    byte_tokenizer(tmp_path)
    with engine(tmp_path, "none") as llm:
        recurrent = bool(llm.info.recurrent)
        plain = [answers(llm, params) for params in PARAMS]
    if recurrent:
        with pytest.raises(SelectionError, match="recurrent"):
            engine(tmp_path, "ngram")
        return
    with engine(tmp_path, "ngram") as llm:
        for params, wanted in zip(PARAMS, plain, strict=True):
            proposals(llm).source.proposer = Recalls([[*p, *more] for p, more in zip(PROMPTS, wanted, strict=True)])
            assert answers(llm, params) == wanted
        stats = llm._engine.core.scheduler.stats()
        assert 0 < stats.num_accepted < stats.num_drafts
    trees_change_no_token(tmp_path, plain, monkeypatch)


def trees_change_no_token(directory: Path, plain: list[list[list[int]]], patch: pytest.MonkeyPatch) -> None:
    """The same with trees, or a refusal where attention reads distances."""
    defaults = [field.name == "tree" or field.default for field in fields(AttnNeed) if field.default is not MISSING]
    patch.setattr(AttnNeed.__init__, "__defaults__", tuple(defaults))
    assert AttnNeed(1, 1, 1).tree
    patch.setattr("lmkit_worker.lengths.TOKENS", 32)
    patch.setattr("lmkit_worker.proposals.clock", lambda: 0.0)
    patch.setattr("lmkit_worker.lengths.Lengths.hopeless", False)
    try:
        llm = engine(directory, "ngram")
    except SelectionError as e:
        assert "tree_distances" in str(e)  # noqa: PT017
        return
    with llm:
        assert not any(need.window or need.alibi for need, _ in llm.info.kv_groups())
        head, most = llm._engine.core.executor.worker.runner.head, 15  # type: ignore[attr-defined]
        for params, wanted in zip(PARAMS, plain, strict=True):
            trees = recalled_trees([[*p, *more] for p, more in zip(PROMPTS, wanted, strict=True)])
            head.proposals = Proposals(TreeSource(trees, head.rows), head.rows, most, VOCAB)
            assert answers(llm, params) == wanted
        stats = llm._engine.core.scheduler.stats()
        assert stats.num_drafts / 4 < stats.num_accepted < stats.num_drafts
