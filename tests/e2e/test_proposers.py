"""A proposer saves steps, and changes no token; one that guesses wrong, or too much, changes none either."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from lmkit import LLM, SamplingParams
from lmkit.api import ConfigError, SelectionError
from lmkit_testing.dists import write_dist

pytest.importorskip("lmkit_proposer_ngram", reason="the proposer is not installed")

COPY = "The quick brown fox jumps over the lazy dog. " * 3 + "The quick"
PROMPTS = [COPY, "17 + 25 =", "Sort: 5 3 9 1", "1 2 3 1 2 3 1 2"]
PARAMS = [
    SamplingParams(max_tokens=40, temperature=0, ignore_eos=True),
    SamplingParams(max_tokens=40, temperature=1, seed=3, ignore_eos=True),
    SamplingParams(max_tokens=40, temperature=0, repetition_penalty=1.3, presence_penalty=0.5, min_tokens=30),
    SamplingParams(max_tokens=40, temperature=0.7, top_p=0.9, seed=5, logprobs=2, stop=("3",)),
]

HOOKS = """
from lmkit.api import ProposerSpec, hookimpl


@hookimpl
def lmkit_proposers():
    for name in ("wrong", "endless", "outside", "broken"):
        yield ProposerSpec(name=name, summary="Guesses badly", target=f"toy_guesses.guess:{name.title()}")
"""
GUESS = """
class Wrong:
    def propose(self, texts, most):
        return [[(int(text[-1]) + 1 + i) % 50 for i in range(n)] for text, n in zip(texts, most)]


class Endless:
    def propose(self, texts, most):
        return [[int(text[-1])] * 1000 for text in texts]


class Outside:
    def propose(self, texts, most):
        return [[-1, 10**9][:n] for n in most]


class Broken:
    def propose(self, texts, most):
        raise RuntimeError("it cannot")
"""


def answers(**options: Any) -> tuple[list[Any], Any]:
    llm = LLM("demo", **options)
    found = [
        [(o.outputs[0].token_ids, o.outputs[0].text, o.outputs[0].finish_reason) for o in llm.generate(PROMPTS, params)]
        for params in PARAMS
    ]
    return found, llm._engine.core.scheduler.stats()


@pytest.fixture(scope="module")
def plain() -> list[Any]:
    return answers()[0]


@pytest.mark.parametrize("proposer", ["ngram", "suffix"])
@pytest.mark.parametrize("options", [{}, {"max_rows": 1}, {"prefix_cache": False, "max_step_tokens": 16}], ids=str)
def test_look_up_changes_no_token(plain: list[Any], proposer: str, options: dict[str, Any]) -> None:
    pytest.importorskip(f"lmkit_proposer_{proposer}", reason="the proposer is not installed")
    found, stats = answers(proposer=proposer, **options)
    assert found == plain
    assert 0 < stats.num_accepted <= stats.num_drafts


def test_fewer_steps_where_a_text_repeats_itself() -> None:
    params = SamplingParams(max_tokens=60, temperature=0, ignore_eos=True)
    steps = {}
    for proposer in ("none", "ngram"):
        llm = LLM("demo", proposer=proposer)
        llm.generate(COPY, params)
        steps[proposer] = llm._engine.core.scheduler.stats().num_steps
    assert steps["ngram"] < 0.8 * steps["none"]


def test_steps_with_guesses_are_recorded_as_others_are() -> None:
    """Else a step with guesses would cost more than they save: by the number of tokens, whatever rows they are of."""
    pytest.importorskip("lmkit_platform_cpu", reason="tapes are of the platform of CPUs")
    llm = LLM("demo", proposer="ngram")
    llm.generate("one two three one two three one two", SamplingParams(max_tokens=60, temperature=0, ignore_eos=True))
    graphs = llm._engine.core.executor.worker.runner.graphs
    if not hasattr(graphs, "refused"):
        pytest.skip("there are no native kernels here")
    assert graphs.refused is None
    assert max(key[-1] for key in graphs.graphs) > 1


def test_suffix_takes_fewer_steps_for_what_was_answered_before() -> None:
    pytest.importorskip("lmkit_proposer_suffix", reason="the proposer is not installed")
    params = SamplingParams(max_tokens=150, temperature=1, seed=1, ignore_eos=True)
    llm = LLM("demo", proposer="suffix")
    steps = [0]
    for _ in range(3):
        llm.generate("17 + 25 =", params)
        steps.append(llm._engine.core.scheduler.stats().num_steps)
    assert steps[3] - steps[2] < 0.6 * (steps[1] - steps[0])


@pytest.fixture
def _guesses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("wrong", "endless", "outside", "broken")
    hooks = dict.fromkeys(names, "toy_guesses.hooks")
    write_dist(tmp_path, "toy-guesses", {"proposer": hooks}, {"toy_guesses.hooks": HOOKS, "toy_guesses.guess": GUESS})
    monkeypatch.syspath_prepend(str(tmp_path))


@pytest.mark.usefixtures("_guesses")
@pytest.mark.parametrize("name", ["wrong", "endless"])
def test_bad_guesses_change_no_token(plain: list[Any], name: str) -> None:
    found, stats = answers(proposer=name)
    assert found == plain
    assert stats.num_drafts > 0


@pytest.mark.usefixtures("_guesses")
@pytest.mark.parametrize(("name", "words"), [("outside", "no token"), ("broken", "it cannot")])
def test_a_proposer_that_breaks_its_contract_ends_requests_not_the_engine(
    name: str, words: str, caplog: pytest.LogCaptureFixture
) -> None:
    llm = LLM("demo", proposer=name)
    for _ in range(2):
        (output,) = llm.generate("17 + 25 =", SamplingParams(max_tokens=4))
        assert output.outputs[0].error is not None
        assert "its step failed" in output.outputs[0].error.message
    assert words in caplog.text


def test_what_a_proposer_cannot_serve_is_refused() -> None:
    with pytest.raises(ConfigError, match="one step in flight"):
        LLM("demo", proposer="ngram", depth=2)
    with pytest.raises(SelectionError, match="ngrams"):
        LLM("demo", proposer="ngrams")
