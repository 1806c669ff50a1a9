"""Drafts change no token and no probability: the scheduler, the runner and the sampler with guesses of every sort, and
every sampling parameter."""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lmkit.api import SampleContext, SamplingParams
from lmkit_testing.toy_engine import EOS, MAX_LENGTH, ManyWays, ToyEngine
from lmkit_worker import heads
from lmkit_worker.lengths import Lengths
from lmkit_worker.sampling import accept, sampler
from lmkit_worker.sampling.counts import TokenCounts
from lmkit_worker.sampling.noise import uniform

NUM_DRAWS = int(os.environ.get("DRAWS", "1500"))
SMALL = 4  # tokens of the vocabulary whose distribution is compared
PLACES = 3  # tokens drawn
PROMPT = (2, 3, 2)


class Guesses:
    """Says for a text what `of` says, over and over if it is short."""

    def __init__(self, of: Mapping[tuple[int, ...], Sequence[int]] | None = None, *, wrong: float = 0.0) -> None:
        """`of`: what follows a text. `wrong`: the share of guesses that are another token."""
        self.of, self.wrong, self.rng = dict(of or {}), wrong, np.random.default_rng(0)

    def propose(self, texts: Sequence[np.ndarray], most: Sequence[int]) -> list[list[int]]:
        found = []
        for text, limit in zip(texts, most, strict=True):
            guess = self.of.get(tuple(text.tolist()), ())[:limit]
            found.append([0 if self.rng.random() < self.wrong else token for token in guess])
        return found


class Same:
    """Guesses always the same tokens."""

    def __init__(self, *tokens: int) -> None:
        self.tokens = list(tokens)

    def propose(self, texts: Sequence[np.ndarray], most: Sequence[int]) -> list[list[int]]:
        return [self.tokens * 9 for _ in texts]


class LiftsLast:
    """A logits processor: the token drawn last becomes likelier."""

    stage, keeps_argmax, options = "logits", False, None

    def add(self, slot: int, params: SamplingParams, prompt: Sequence[int]) -> bool:
        return True

    def remove(self, slot: int) -> None:
        """Nothing is kept."""

    def apply(self, logits: Any, ctx: SampleContext) -> None:
        for row in range(len(ctx.slots)):
            logits[row, ctx.tokens(row)[-1]] += 1.0


# ------------------------------------------------------------------------------------------------ tokens stay

params = st.builds(
    SamplingParams,
    max_tokens=st.integers(1, 30),
    min_tokens=st.just(0),
    temperature=st.sampled_from([0.0, 0.5, 1.0, 3.0]),
    top_p=st.sampled_from([1.0, 0.7]),
    top_k=st.sampled_from([0, 2, 20]),
    min_p=st.sampled_from([0.0, 0.1]),
    presence_penalty=st.sampled_from([0.0, 1.0, -2.0]),
    frequency_penalty=st.sampled_from([0.0, 0.7]),
    repetition_penalty=st.sampled_from([1.0, 1.3, 0.8]),
    seed=st.sampled_from([None, 3]),
    stop_token_ids=st.sampled_from([(), (5, 6, 7, 8)]),
    ignore_eos=st.booleans(),
    logprobs=st.sampled_from([None, 2]),
    logit_bias=st.sampled_from([(), ((4, 3.0), (9, -100.0))]),
    extra=st.sampled_from([{}, {"lifts_last": {}}]),
)
cases = st.lists(st.tuples(st.lists(st.integers(0, 11), min_size=1, max_size=20), params), min_size=1, max_size=5)


@settings(deadline=None, max_examples=int(os.environ.get("DRAFT_CASES", "40")))
@given(cases, st.integers(1, 5), st.sampled_from(["right", "half", "wrong", "same", "end"]), st.integers(1, 16))
def test_no_token_changes(asked: list[tuple[list[int], SamplingParams]], rows: int, sort: str, most: int) -> None:
    prompts, wanted = [prompt for prompt, _ in asked], [each for _, each in asked]
    wanted = [SamplingParams(**{**_fields(p), "min_tokens": min(7, p.max_tokens or 0)}) for p in wanted]
    plain = ToyEngine(12, max_rows=rows, processors={"lifts_last": LiftsLast()}).answers(prompts, wanted)
    follows = {}
    for prompt, events in zip(prompts, plain, strict=True):
        text = [*prompt, *(token for event in events for token in event.tokens)]
        follows |= {tuple(text[:i]): text[i:] for i in range(len(prompt), len(text))}
    proposer = {
        "right": Guesses(follows), "half": Guesses(follows, wrong=0.4), "wrong": Guesses(follows, wrong=1.0),
        "same": Same(3), "end": Same(EOS),
    }[sort]  # fmt: skip
    engine = ToyEngine(12, proposer, most, max_rows=rows, processors={"lifts_last": LiftsLast()})
    found = engine.answers(prompts, wanted)
    for one, other in zip(plain, found, strict=True):
        assert [t for e in other for t in e.tokens] == [t for e in one for t in e.tokens]
        assert [t.token for e in other for t in e.logprobs] == [t.token for e in one for t in e.logprobs]
        assert other[-1].finish == one[-1].finish
    if sort == "right" and len(set(map(tuple, prompts))) == len(prompts):
        assert engine.stats.num_accepted == engine.stats.num_drafts


def _fields(params: SamplingParams) -> dict[str, Any]:
    return {name: getattr(params, name) for name in params.__dataclass_fields__}


def test_guesses_end_where_the_context_ends() -> None:
    """A row that may get one more token is not given guesses for places that there are not."""
    asked = [SamplingParams(temperature=0, max_tokens=MAX_LENGTH - 3, ignore_eos=True)]
    plain = ToyEngine(12).tokens([PROMPT], asked)
    engine = ToyEngine(12, Same(*plain[0][:1]), 16)
    assert engine.tokens([PROMPT], asked) == plain
    assert len(plain[0]) == MAX_LENGTH - 3


# ------------------------------------------------------------------------------------- the distribution stays

PARAMS = {
    "plain": {},
    "temperature": {"temperature": 0.6},
    "hot": {"temperature": 2.5},
    "top_k": {"top_k": 2},
    "top_p": {"top_p": 0.7},
    "min_p": {"min_p": 0.25},
    "presence_penalty": {"presence_penalty": 1.5},
    "frequency_penalty": {"frequency_penalty": 1.2},
    "repetition_penalty": {"repetition_penalty": 1.8},
    "logit_bias": {"logit_bias": ((0, 1.0), (3, -1.0))},
    "min_tokens": {"min_tokens": 2, "ignore_eos": False},
    "stop_token_ids": {"min_tokens": 2, "stop_token_ids": (2,)},
    "processor": {"extra": {"lifts_last": {}}},
    "all": {
        "temperature": 0.8, "top_k": 3, "top_p": 0.95, "min_p": 0.02, "presence_penalty": 0.4,
        "frequency_penalty": 0.3, "repetition_penalty": 1.2, "logit_bias": ((1, 0.5),), "extra": {"lifts_last": {}},
    },
}  # fmt: skip


def next_probs(model: ManyWays, text: Sequence[int], p: SamplingParams) -> np.ndarray:
    """What the documented order of the sampler gives after `text`, in float64: [SMALL]."""
    x = model.after(text).double().numpy().copy()
    output = text[len(PROMPT) :]
    if len(output) < p.min_tokens:
        x[[*p.stop_token_ids, *(() if p.ignore_eos else (EOS,))]] = -np.inf
    for token, value in p.logit_bias:
        x[token] += value
    if p.extra:
        x[text[-1]] += 1.0
    for token in set(text):
        x[token] = x[token] / p.repetition_penalty if x[token] > 0 else x[token] * p.repetition_penalty
        x[token] -= p.frequency_penalty * output.count(token) + p.presence_penalty * (token in output)
    probs = np.exp((x - x.max()) / p.temperature)
    probs /= probs.sum()
    probs[probs < p.min_p * probs.max()] = 0
    if p.top_k:
        probs[probs < np.sort(probs)[-p.top_k]] = 0
    probs /= probs.sum()
    largest = np.sort(probs)[::-1]
    kept = largest[: int(np.argmax(largest.cumsum() >= min(p.top_p, 1 - 1e-12))) + 1]
    probs[probs < kept[-1]] = 0
    return probs / probs.sum()


def text_probs(model: ManyWays, p: SamplingParams) -> dict[tuple[int, ...], float]:
    """Of every answer of PLACES tokens, or fewer where one of them ends it."""
    found = {}
    stops = {*p.stop_token_ids, *(() if p.ignore_eos else (EOS,))}
    for answer in product(range(SMALL), repeat=PLACES):
        share, text = 1.0, list(PROMPT)
        for i, token in enumerate(answer):
            share *= next_probs(model, text, p)[token]
            text.append(token)
            if token in stops and i + 1 > p.min_tokens:
                break
        found[tuple(text[len(PROMPT) :])] = share
    return found


def fits(seen: Mapping[tuple[int, ...], int], wanted: Mapping[tuple[int, ...], float]) -> bool:
    """Chi-square by Wilson and Hilferty's approximation: below five standard deviations. Rare answers count as one."""
    total = sum(seen.values())
    if any(wanted.get(answer, 0.0) == 0.0 for answer in seen):
        return False
    often = {answer: share * total for answer, share in wanted.items() if share * total >= 5}
    pairs = [(seen.get(answer, 0), expected) for answer, expected in often.items()]
    rest = total - sum(n for n, _ in pairs), total - sum(expected for _, expected in pairs)
    pairs += [rest] if rest[1] > 1e-6 else []
    k = len(pairs) - 1
    statistic = sum((n - expected) ** 2 / expected for n, expected in pairs)
    return ((statistic / k) ** (1 / 3) - (1 - 2 / (9 * k))) / math.sqrt(2 / (9 * k)) < 5


def drawn(name: str, proposer: Any, monkeypatch: pytest.MonkeyPatch) -> tuple[ToyEngine, Counter, SamplingParams]:
    """NUM_DRAWS answers with seeds of their own."""
    monkeypatch.setattr(Lengths, "choose", lambda self, slots, wanted: [PLACES] * len(slots))  # many are drawn at once
    base = {"ignore_eos": True, "max_tokens": PLACES + 2, **PARAMS[name]}  # guesses reach beyond what is compared
    asked = [SamplingParams(seed=seed, **base) for seed in range(NUM_DRAWS)]
    engine = ToyEngine(SMALL, proposer, PLACES, max_rows=32, processors={"lifts_last": LiftsLast()})
    answers = engine.tokens([PROMPT] * NUM_DRAWS, asked)
    return engine, Counter(tuple(answer[:PLACES]) for answer in answers), asked[0]


@pytest.mark.parametrize("name", PARAMS)
@pytest.mark.parametrize("guess", [(0, 0), (3, 2)], ids=str)
@pytest.mark.one_in(10)
def test_the_distribution_stays(name: str, guess: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    engine, seen, asked = drawn(name, Same(*guess), monkeypatch)
    wanted = text_probs(engine.model, asked)
    assert sum(wanted.values()) == pytest.approx(1.0)
    assert fits(seen, wanted)
    assert engine.stats.num_drafts > NUM_DRAWS


FAULTS = {
    "drafts are believed": lambda drawn, drafts: [*drafts, drawn[-1]],
    "one too many": lambda drawn, drafts: list(drawn[: len(accept(drawn, drafts)) + 1]),
    "the bonus of another place": lambda drawn, drafts: [*accept(drawn, drafts)[:-1], drawn[-1]],
}


@pytest.mark.one_in(3)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_of_verification_is_found(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heads, "accept", FAULTS[fault])
    engine, seen, asked = drawn("plain", Same(0, 0), monkeypatch)
    assert not fits(seen, text_probs(engine.model, asked))


def test_penalties_that_leave_out_drafts_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TokenCounts, "with_drafts", lambda self, drafts: (self.ids, self.output))
    engine, seen, asked = drawn("frequency_penalty", Same(3, 3), monkeypatch)
    assert not fits(seen, text_probs(engine.model, asked))


def test_noise_that_is_the_same_at_each_place_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampler, "uniform", lambda seeds, places: uniform(seeds, 0 * places))
    engine, seen, asked = drawn("plain", Same(0, 0), monkeypatch)
    assert not fits(seen, text_probs(engine.model, asked))
