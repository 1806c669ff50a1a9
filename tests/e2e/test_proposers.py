"""A proposer saves steps, and changes no token; one that guesses wrong, or too much, changes none either."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from lmkit import LLM, SamplingParams
from lmkit.api import ConfigError, SelectionError
from lmkit.config import from_options
from lmkit.plugins.resolve import resolve
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


@pytest.fixture(autouse=True)
def _stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps are counted here: how many tokens are guessed must not depend on how fast the machine is."""
    monkeypatch.setattr("lmkit_worker.proposals.clock", lambda: 0.0)


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


DRAFTS = {"eagle": {}, "draft_model": {"proposer.draft_model": {"model": "demo"}}}  # what runs a model, and its options


@pytest.mark.parametrize("proposer", ["ngram", "suffix", *DRAFTS])
@pytest.mark.parametrize("options", [{}, {"max_rows": 1}, {"prefix_cache": False, "max_step_tokens": 16}], ids=str)
@pytest.mark.one_in(6)
def test_guesses_change_no_token(plain: list[Any], proposer: str, options: dict[str, Any]) -> None:
    pytest.importorskip(f"lmkit_proposer_{proposer}", reason="the proposer is not installed")
    found, stats = answers(proposer=proposer, plugins=DRAFTS.get(proposer, {}), **options)
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


def test_one_step_in_flight_where_a_gpu_would_have_two() -> None:
    config = from_options({"model": "demo", "device": "cuda:9.0:141GB"})
    assert resolve(config)[0].value("depth") == 2
    assert resolve(replace(config, wanted={"proposer": "ngram"}))[0].value("depth") == 1


def test_what_a_proposer_cannot_serve_is_refused() -> None:
    with pytest.raises(ConfigError, match="one step in flight"):
        LLM("demo", proposer="ngram", depth=2)
    with pytest.raises(SelectionError, match="ngrams"):
        LLM("demo", proposer="ngrams")


CHATS = [
    [{"role": "user", "content": text}]
    for text in ("Count from 3 to 20", "Sort these words: pear, apple, fig, plum", "What is lmkit?")
]


def accepted(proposer: str, *, again: bool = False, temperature: float = 0, **options: Any) -> tuple[int, int, int]:
    """Guesses that were right, all guesses, and steps, for the demo's own chats; with `again`, when asked once more."""
    pytest.importorskip(f"lmkit_proposer_{proposer}", reason="the proposer is not installed")
    llm = LLM("demo", proposer=proposer, plugins=DRAFTS[proposer], **options)
    params, before = SamplingParams(max_tokens=40, temperature=temperature, seed=1), (0, 0, 0)
    for i in range(1 + again):
        llm.chat(CHATS, params, progress=False)
        stats = llm._engine.core.scheduler.stats()
        found = stats.num_accepted, stats.num_drafts, stats.num_steps
        if i == 0 and again:
            before = found
    right, drafts, steps = (now - then for now, then in zip(found, before, strict=True))
    return right, drafts, steps


@pytest.mark.parametrize("options", [{}, {"max_step_tokens": 16}, {"prefix_cache": False}], ids=str)
@pytest.mark.one_in(3)
def test_a_model_that_guesses_for_itself_is_always_right(options: dict[str, Any]) -> None:
    """At temperature 0, also behind cached blocks and prompts in chunks: its keys are where they belong."""
    for again in (False, True):
        right, drafts, _ = accepted("draft_model", again=again, **options)
        assert 0 < right == drafts


def test_the_head_of_the_demo_is_mostly_right() -> None:
    right, drafts, steps = accepted("eagle")
    assert right > 0.6 * drafts
    plain = LLM("demo")
    plain.chat(CHATS, SamplingParams(max_tokens=40, temperature=0), progress=False)
    assert steps < 0.6 * plain._engine.core.scheduler.stats().num_steps
    right, drafts, _ = accepted("eagle", temperature=1)
    assert right > 0.5 * drafts


def stale(monkeypatch: pytest.MonkeyPatch) -> None:
    """The draft's layers do not keep what the step computed."""
    from lmkit_worker.drafting import Drafting

    follow = Drafting._follow

    def forget(self: Drafting, *args: Any) -> Any:
        state = follow(self, *args)
        for kv in self._inputs.kv[-self._num_layers :]:
            kv.zero_()
        return state

    monkeypatch.setattr(Drafting, "_follow", forget)


def misplaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guesses stand one place behind where they belong."""
    from lmkit_worker.ahead import Ahead

    begin = Ahead.begin
    monkeypatch.setattr(
        Ahead, "begin", lambda self, slots, positions, *others: begin(self, slots, positions - 1, *others)
    )


def shifted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hidden states are those of the place before."""
    from lmkit_worker.drafting import Drafting

    follow = Drafting._follow
    monkeypatch.setattr(
        Drafting, "_follow", lambda self, step, hidden, last: follow(self, step, hidden.roll(1, 0), last)
    )


@pytest.mark.parametrize(
    ("fault", "proposer"), [(stale, "draft_model"), (misplaced, "draft_model"), (stale, "eagle"), (shifted, "eagle")]
)
@pytest.mark.one_in(4)
def test_faults_of_drafts_show_in_what_is_accepted(fault: Any, proposer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    right, drafts, _ = accepted(proposer)
    fault(monkeypatch)
    right_then, drafts_then, _ = accepted(proposer)
    assert right_then / drafts_then < 0.9 * right / drafts
