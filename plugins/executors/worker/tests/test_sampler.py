"""The sampler: order, references, seeds, statistics, faults."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lmkit.api import GrammarMasks, InvalidParam, SampleContext, SamplingParams
from lmkit_layers import truncate, vocabulary
from lmkit_worker.sampling import SampleBatch, Sampler, sampler
from lmkit_worker.sampling.noise import seed_of, uniform

V = 50


@dataclass
class Row:
    """One row to sample: parameters, prompt, output so far, and the drafts being verified."""

    params: SamplingParams
    prompt: list[int] = field(default_factory=lambda: [1, 2, 3])
    output: list[int] = field(default_factory=list)
    drafts: list[int] = field(default_factory=list)
    seed: int = 0


def run(logits: torch.Tensor, rows: Sequence[Row], masks: GrammarMasks | None = None, **kwargs) -> sampler.Sampled:
    """Samples rows in slots of reverse order, so that slot and row differ."""
    made = Sampler(16, logits.shape[-1], **kwargs)
    slots = list(range(len(rows)))[::-1]
    tokens = {}
    for slot, row in zip(slots, rows, strict=True):
        tokens[slot] = np.array(row.prompt + row.output, np.int64)
        made.add(slot, row.params, tokens[slot], len(row.prompt), row.params.seed or row.seed)
    num_drafts = np.array([len(row.drafts) for row in rows])
    ahead = [range(len(row.drafts) + 1) for row in rows]
    batch = SampleBatch(
        slots=np.repeat(slots, num_drafts + 1),
        positions=np.array([len(tokens[s]) + i for s, more in zip(slots, ahead, strict=True) for i in more]),
        plan_rows=np.arange(len(rows)),
        tokens=tokens.__getitem__,
        num_drafts=num_drafts if num_drafts.any() else None,
        guessed=[row.drafts[:i] for row, more in zip(rows, ahead, strict=True) for i in more],
    )
    result = made.sample(logits.clone(), batch, masks).read()
    for slot in slots:
        made.remove(slot)
    assert not (made.num_random)
    assert not (made.watched)
    assert not (made.bias)
    return result


def logits_of(num_rows: int, seed: int = 0, vocab: int = V) -> torch.Tensor:
    return torch.randn(num_rows, vocab, generator=torch.Generator().manual_seed(seed)) * 3


def draw_many(logits: torch.Tensor, params: SamplingParams, n: int = 4000) -> np.ndarray:
    """How often each token of one row is drawn, over n seeds."""
    made = Sampler(1, logits.shape[-1])
    counts = np.zeros(logits.shape[-1], int)
    for first in range(0, n, 500):
        slots = np.zeros(500, np.int64)
        made.add(0, params, np.array([1]), 1, first)
        batch = SampleBatch(slots, np.arange(first, first + 500), np.arange(500), lambda _: [1])
        counts += np.bincount(
            made.sample(logits.expand(500, -1).clone(), batch).read().tokens, minlength=logits.shape[-1]
        )
        made.remove(0)
    return counts


def chi_square_fits(counts: np.ndarray, probs: np.ndarray) -> bool:
    """Wilson-Hilferty: the statistic stays below five standard deviations."""
    assert not counts[probs == 0].any(), "a token of probability 0 was drawn"
    expected = probs * counts.sum()
    rare = expected < 5
    seen = np.append(counts[~rare], counts[rare].sum())
    wanted = np.append(expected[~rare], expected[rare].sum())
    seen, wanted = seen[wanted > 0], wanted[wanted > 0]
    k = len(seen) - 1
    if k == 0:
        return True
    statistic = ((seen - wanted) ** 2 / wanted).sum()
    return ((statistic / k) ** (1 / 3) - (1 - 2 / (9 * k))) / math.sqrt(2 / (9 * k)) < 5


def reference_probs(logits: torch.Tensor, p: SamplingParams) -> np.ndarray:
    """Temperature, min_p, top_k, top_p by sorting everything."""
    probs = torch.softmax(logits.double() / p.temperature, -1).numpy()
    probs = np.where(probs < p.min_p * probs.max(), 0, probs)
    if p.top_k:
        probs = np.where(probs < np.sort(probs)[::-1][min(p.top_k, len(probs)) - 1], 0, probs)
    probs /= probs.sum()
    ordered = np.sort(probs)[::-1]
    last = int(np.argmax(ordered.cumsum() >= p.top_p)) if p.top_p < 1 else len(ordered) - 1
    probs = np.where(probs < ordered[last], 0, probs)
    return probs / probs.sum()


# ---------------------------------------------------------------------------------------------------- greedy


@pytest.mark.parametrize(
    "asked",
    [{"temperature": 1.0}, {"logprobs": 0}, {"min_tokens": 1}, {"logit_bias": ((3, 1.0),)}, {"frequency_penalty": 0.5}],
)
def test_greedy_rows_take_the_largest_while_no_other_row_asks_for_more(asked: dict[str, object]) -> None:
    made = Sampler(4, V, eos_token_ids=(2,))
    for slot in range(3):
        made.add(slot, SamplingParams(temperature=0, min_tokens=0), np.array([1]), 1, slot)
    assert made.takes_largest
    made.add(3, SamplingParams(**{"temperature": 0, **asked}), np.array([1]), 1, 3)
    assert not made.takes_largest
    made.remove(3)
    assert made.takes_largest


def test_first_of_equal_logits_wins() -> None:
    logits = torch.zeros(1, V)
    logits[0, [7, 30]] = 1.0
    assert run(logits, [Row(SamplingParams(temperature=0))]).tokens.tolist() == [7]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab", [1, 7, 512, 513, 1500, 2048])
def test_argmax_in_blocks(vocab: int, dtype: torch.dtype) -> None:
    """Equal to torch's, ties and NaN included."""
    x = torch.randn(40, vocab, generator=torch.Generator().manual_seed(vocab)).to(dtype)
    x[1] = 0.0
    x[2, vocab // 2] = torch.nan
    x[3] = -torch.inf
    tokens, largest = vocabulary.argmax(x)
    assert tokens.tolist() == x.argmax(-1).tolist()
    torch.testing.assert_close(largest, x.amax(-1), equal_nan=True)


@pytest.mark.parametrize("vocab", [100, 3000, 3001])
@pytest.mark.parametrize("k", [1, 5, 100])
def test_topk_in_blocks(vocab: int, k: int) -> None:
    x = torch.randn(20, vocab, generator=torch.Generator().manual_seed(k)).round(decimals=1)
    x[1] = 0.0
    x[2, ::7] = -torch.inf
    values, positions = vocabulary.topk(x, k)
    assert torch.equal(values, x.topk(k).values)
    assert torch.equal(x.gather(1, positions), values)
    assert all(len(set(row)) == k for row in positions.tolist())


# ----------------------------------------------------------------------------------------------------- order


@dataclass
class Recorder:
    """A processor that records what it sees and changes it."""

    stage: str
    keeps_argmax: bool = False
    options: type | None = None
    seen: list = field(default_factory=list)
    add_to: tuple[int, float] = (0, 0.0)

    def add(self, slot: int, params: SamplingParams, prompt: Sequence[int]) -> bool:
        return True

    def remove(self, slot: int) -> None:
        self.seen.append(("removed", slot))

    def apply(self, x: torch.Tensor, ctx: SampleContext) -> None:
        self.seen.append(
            (x.clone(), list(ctx.slots), list(ctx.positions), [list(ctx.tokens(i)) for i in range(len(x))])
        )
        x[:, self.add_to[0]] += self.add_to[1]


def test_order_of_the_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """The numbered docstring is what happens, for one request that uses all of it."""
    calls: list[str] = []

    def spy(owner: object, name: str, label: str) -> None:
        real = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *a, **k: (calls.append(label), real(*a, **k))[1])

    spy(Sampler, "_raw_logprobs", "1 raw log-probabilities")
    spy(torch.Tensor, "float", "2 logits to float32")
    spy(Sampler, "_grammar", "3 grammar")
    spy(Sampler, "_min_tokens", "4 min_tokens")
    spy(Sampler, "_bias", "5 logit bias")
    spy(Sampler, "_penalties", "7 penalties")
    spy(torch.Tensor, "div_", "8 temperature")
    spy(truncate, "min_p_", "9 min_p")
    spy(truncate, "top_k_", "9 top_k")
    spy(truncate, "top_p_", "9 top_p")
    spy(vocabulary, "draw", "11 draw")
    spy(sampler, "_gather", "12 log-probabilities")

    class Staged(Recorder):
        def apply(self, x: torch.Tensor, ctx: SampleContext) -> None:
            calls.append("6 logits processors" if self.stage == "logits" else "10 probs processors")

    everything = SamplingParams(
        temperature=0.7, min_p=0.01, top_k=20, top_p=0.9, logit_bias=((4, 1.0),), min_tokens=2, max_tokens=5,
        frequency_penalty=0.5, logprobs=1, extra={"a": 1, "b": 1},
    )  # fmt: skip
    words = -(-V // 32)
    run(
        logits_of(2),
        [Row(everything), Row(SamplingParams(temperature=0))],
        GrammarMasks([0], b"\xff" * 4 * words),
        eos_token_ids=(0,),
        processors={"a": Staged("logits"), "b": Staged("probs")},
    )
    steps = [int(call.split()[0]) for call in calls if call != "2 logits to float32"]
    assert steps == [1, 3, 4, 5, 6, 7, 8, 9, 9, 9, 10, 11, 12]
    assert [c.split()[1] for c in calls if c.startswith("9")] == ["min_p", "top_k", "top_p"]
    assert calls.index("2 logits to float32") < calls.index("3 grammar")
    numbered = [line for line in (sampler.__doc__ or "").splitlines() if line[:2].strip().isdigit()]
    assert [int(line.split()[0]) for line in numbered] == list(range(1, 13))


def test_processors_see_only_their_rows() -> None:
    record = Recorder("logits", add_to=(9, 1000.0))
    rows = [Row(SamplingParams(temperature=0)), Row(SamplingParams(temperature=0, extra={"r": 1}), [4, 5], [6])]
    assert run(logits_of(2), rows, processors={"r": record}).tokens.tolist()[1] == 9
    (x, slots, positions, tokens), removed = record.seen
    assert (x.shape, slots, positions, tokens) == ((1, V), [0], [3], [[4, 5, 6]])
    assert removed == ("removed", 0)


def test_processor_that_keeps_the_argmax_is_skipped_for_greedy_rows() -> None:
    record = Recorder("logits", keeps_argmax=True)
    params = [SamplingParams(temperature=t, extra={"r": 1}) for t in (0.0, 1.0)]
    run(logits_of(2), [Row(p) for p in params], processors={"r": record})
    assert [entry[1] for entry in record.seen if entry[0] != "removed"] == [[0]]


# ------------------------------------------------------------------------------------------------ references


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 10**6), st.sampled_from([0.3, 1.0, 1.7]), st.sampled_from([0.0, 0.02, 0.3, 1.0]),
    st.sampled_from([0, 1, 3, 40, 1000]), st.sampled_from([0.05, 0.5, 0.9, 0.999, 1.0]),
)  # fmt: skip
def test_truncation_keeps_what_the_reference_keeps(seed: int, t: float, min_p: float, top_k: int, top_p: float) -> None:
    params = SamplingParams(temperature=t, min_p=min_p, top_k=top_k, top_p=top_p, extra={"r": 1})
    logits = logits_of(1, seed, vocab=200)
    record = Recorder("probs")
    run(logits, [Row(params)], processors={"r": record})
    torch.testing.assert_close(
        record.seen[0][0][0].double(), torch.from_numpy(reference_probs(logits[0], params)), rtol=1e-4, atol=1e-6
    )


def test_top_p_widens_its_search() -> None:
    weights = torch.rand(3, 5000, generator=torch.Generator().manual_seed(1))
    weights[0, :10] *= 1e4
    weights /= weights.amax(-1, keepdim=True)
    p = torch.tensor([0.9, 0.5, 0.999999])
    got = weights.clone()
    truncate.top_p_(got, p)
    for row in range(3):
        ordered = weights[row].double().sort(descending=True).values
        kept = int((ordered.cumsum(0) >= p[row].double() * weights[row].double().sum()).int().argmax()) + 1
        assert int((got[row] > 0).sum()) == kept


@settings(max_examples=40, deadline=None)
@given(
    st.integers(0, 10**6), st.floats(-2, 2), st.floats(-2, 2), st.floats(0.1, 3),
    st.lists(st.integers(0, V - 1), min_size=1, max_size=20), st.lists(st.integers(0, V - 1), max_size=20),
    st.lists(st.integers(0, V - 1), max_size=3),
)  # fmt: skip
def test_penalties_equal_a_naive_reference(
    seed: int, presence: float, frequency: float, repetition: float, prompt: list[int], output: list[int],
    drafts: list[int],
) -> None:  # fmt: skip
    params = SamplingParams(
        temperature=1.0, presence_penalty=presence, frequency_penalty=frequency, repetition_penalty=repetition,
        extra={"r": 1},
    )  # fmt: skip
    record = Recorder("probs")
    logits = logits_of(1 + len(drafts), seed)
    run(logits, [Row(params, prompt, output, drafts)], processors={"r": record})
    for i, probs in enumerate(record.seen[0][0]):
        expected = logits[i].double()
        so_far = output + drafts[:i]
        for token in range(V):
            if token in prompt or token in so_far:
                expected[token] = expected[token] / repetition if expected[token] > 0 else expected[token] * repetition
            expected[token] -= frequency * so_far.count(token) + presence * (token in so_far)
        torch.testing.assert_close(probs.double(), torch.softmax(expected, -1), rtol=1e-4, atol=1e-6)


def test_counts_are_incremental() -> None:
    made = Sampler(2, V)
    params = SamplingParams(temperature=0, frequency_penalty=1.0, min_tokens=2, max_tokens=9, stop_token_ids=(5,))
    made.add(1, params, np.array([3, 4]), 2, 0)
    for i, token in enumerate([7, 7, 3]):
        made.observe(1, [token], i + 1)
    counts = made.counts[1]
    assert dict(zip(counts.ids.tolist(), counts.output.tolist(), strict=True)) == {3: 1, 4: 0, 7: 2}
    assert not made.blocked


def test_min_tokens_blocks_eos_and_stop_ids() -> None:
    logits = torch.zeros(3, V)
    logits[:, 0], logits[:, 1], logits[:, 2] = 9.0, 8.0, 7.0
    base = {"temperature": 0, "max_tokens": 9, "stop_token_ids": (1, 10**6)}
    rows = [
        Row(SamplingParams(**base, min_tokens=2), output=[5]),
        Row(SamplingParams(**base, min_tokens=2), output=[5, 5]),
        Row(SamplingParams(**base, min_tokens=2, ignore_eos=True), output=[5]),
    ]
    assert run(logits, rows, eos_token_ids=(0,)).tokens.tolist() == [2, 0, 0]


def test_min_tokens_counts_drafts() -> None:
    logits = torch.zeros(3, V)
    logits[:, 0], logits[:, 2] = 9.0, 7.0
    row = Row(SamplingParams(temperature=0, min_tokens=2, max_tokens=9), output=[5], drafts=[2, 2])
    assert run(logits, [row], eos_token_ids=(0,)).tokens.tolist() == [2, 0, 0]


def test_logit_bias_and_unknown_ids() -> None:
    rows = [
        Row(SamplingParams(temperature=0, logit_bias=((8, 100.0), (10**6, 5.0)))),
        Row(SamplingParams(temperature=0)),
    ]
    logits = logits_of(2)
    assert run(logits, rows).tokens.tolist() == [8, int(logits[1].argmax())]


def bits(*allowed: int) -> bytes:
    return sum(1 << token for token in allowed).to_bytes(4 * -(-V // 32), "little")


def test_grammar_masks_of_all_rows_and_of_some() -> None:
    rows = [Row(SamplingParams(temperature=0)), Row(SamplingParams(temperature=0))]
    logits = torch.zeros(2, V)
    logits[:, 9] = 1.0
    assert run(logits.clone(), rows, GrammarMasks([0, 1], bits(3) + bits(40))).tokens.tolist() == [3, 40]
    assert run(logits.clone(), rows, GrammarMasks([1], bits(40))).tokens.tolist() == [9, 40]


def test_grammar_masks_of_rows_with_drafts() -> None:
    rows = [Row(SamplingParams(temperature=0)), Row(SamplingParams(temperature=0), drafts=[4])]

    masks = GrammarMasks([1, 1], bits(31, 4) + bits(40))
    logits = torch.zeros(3, V)
    logits[:, 31], logits[0, 9] = 1.0, 5.0
    assert run(logits, rows, masks).tokens.tolist() == [9, 31, 40]


# ------------------------------------------------------------------------------------------------ statistics


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(),
        SamplingParams(temperature=0.5, top_k=5),
        SamplingParams(top_p=0.8),
        SamplingParams(min_p=0.1, temperature=1.5),
        SamplingParams(temperature=1e-30),
    ],
)
def test_draws_follow_the_distribution(params: SamplingParams) -> None:
    logits = logits_of(1, 3)
    probs = np.zeros(V)
    probs[int(logits.argmax())] = 1.0
    if params.temperature > 1e-20:
        probs = reference_probs(logits[0], params)
    assert chi_square_fits(draw_many(logits, params), probs)


@pytest.mark.parametrize("vocab", [1, 511, 512, 513, 3000])
def test_draw_over_several_blocks(vocab: int) -> None:
    weights = torch.rand(1, vocab, generator=torch.Generator().manual_seed(vocab), dtype=torch.float32)
    weights[0, ::3] = 0.0
    weights[0, vocab - 1] = 1.0
    u = uniform(np.full(6000, 5, np.uint64), np.arange(6000))
    drawn = vocabulary.draw(weights.expand(6000, -1), u).numpy()
    assert chi_square_fits(np.bincount(drawn, minlength=vocab), (weights[0] / weights.sum()).double().numpy())


def test_draw_at_the_ends() -> None:
    weights = torch.zeros(2, 1500)
    weights[:, 3] = weights[:, 700] = 1.0
    assert vocabulary.draw(weights, np.array([0.0, np.nextafter(1.0, 0.0)])).tolist() == [3, 700]


def test_draw_gives_only_tokens_with_a_weight() -> None:
    """Sums of blocks are rounded, so a target may lie behind all weights of its block, or of the row."""
    weights = torch.rand(300, 1500, generator=torch.Generator().manual_seed(2))
    weights[:, 1100:] = 0.0
    drawn = vocabulary.draw(weights, np.full(300, np.nextafter(1.0, 0.0)))
    assert int(drawn.max()) < 1500
    assert bool((weights.gather(1, drawn[:, None]) > 0).all())


def test_streams_of_seeds_are_not_shifted_copies() -> None:
    """Position and seed enter separately: no seed continues the stream of another."""
    positions = np.arange(50)
    step = np.uint64(0x9E3779B97F4A7C15)
    for seed in (np.uint64(1), np.uint64(77)):
        shifted = uniform(np.full(50, seed) + step, positions)
        assert not np.isin(shifted, uniform(np.full(51, seed), np.arange(51))).any()


def test_noise_is_uniform_and_independent_along_seeds_and_positions() -> None:
    along_positions = uniform(np.full(20000, 9, np.uint64), np.arange(20000))
    along_seeds = uniform(np.arange(20000, dtype=np.uint64), np.full(20000, 9))
    for u in (along_positions, along_seeds):
        assert u.min() >= 0
        assert u.max() < 1
        assert chi_square_fits(np.bincount((u * 64).astype(int), minlength=64), np.full(64, 1 / 64))
        pairs = (u[:-1] * 8).astype(int) * 8 + (u[1:] * 8).astype(int)
        assert chi_square_fits(np.bincount(pairs, minlength=64), np.full(64, 1 / 64))
    assert seed_of("a") == seed_of("a") != seed_of("a", 1) != seed_of("b")


# -------------------------------------------------------------------------------------------------- invariance


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10**6), st.permutations(range(6)))
def test_a_row_does_not_depend_on_its_neighbours(seed: int, order: list[int]) -> None:
    """M3, M4: alone, in a batch, in a permuted batch: the same token and log-probability."""
    kinds = [
        SamplingParams(seed=seed), SamplingParams(seed=5, top_k=7), SamplingParams(temperature=0, logprobs=2),
        SamplingParams(seed=1, top_p=0.5, min_p=0.01), SamplingParams(seed=-3, presence_penalty=1.0, logprobs=0),
        SamplingParams(seed=seed + 1, temperature=2.0, top_p=0.999),
    ]  # fmt: skip
    rows = [Row(p, [1, 2], list(range(i))) for i, p in enumerate(kinds)]
    logits = logits_of(6, seed, vocab=700)
    alone = [run(logits[i : i + 1], [row]) for i, row in enumerate(rows)]
    mixed = run(logits[order], [rows[i] for i in order])
    assert [int(r.tokens[0]) for r in alone] == [int(mixed.tokens[order.index(i)]) for i in range(6)]
    for i in (2, 4):
        assert alone[i].logprobs[0] == mixed.logprobs[order.index(i)]


# ------------------------------------------------------------------------------------------ logprobs, faults


def test_logprobs_are_of_the_raw_logits() -> None:
    logits = logits_of(2, 8)
    params = SamplingParams(seed=1, temperature=0.1, logprobs=3, logit_bias=((9, 100.0),), top_k=1)
    result = run(logits, [Row(SamplingParams(temperature=0)), Row(params)])
    assert list(result.logprobs) == [1]
    entry, expected = result.logprobs[1], torch.log_softmax(logits[1], -1)
    assert entry.token == 9
    assert entry.logprob == pytest.approx(float(expected[9]), abs=1e-5)
    assert entry.rank == int((expected > expected[9]).sum()) + 1
    top = expected.topk(3)
    assert [t for t, _ in entry.top] == top.indices.tolist()
    assert [p for _, p in entry.top] == pytest.approx(top.values.tolist(), abs=1e-5)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_bad_logits_fail_their_row_only(temperature: float, bad: float) -> None:
    logits = logits_of(3)
    clean = run(logits, [Row(SamplingParams(temperature=temperature, seed=4, logprobs=0)) for _ in range(3)])
    logits[1] = bad
    result = run(logits, [Row(SamplingParams(temperature=temperature, seed=4, logprobs=0)) for _ in range(3)])
    assert list(result.faults) == [1]
    assert result.tokens[[0, 2]].tolist() == clean.tokens[[0, 2]].tolist()
    assert sorted(result.logprobs) == [0, 2]
    assert ("no token" if bad == -float("inf") else str(bad)) in result.faults[1]


ASKS = {
    "logprobs": SamplingParams(temperature=0, logprobs=2),
    "logprobs of the chosen only": SamplingParams(temperature=0, logprobs=0),
    "penalties": SamplingParams(temperature=0, frequency_penalty=1.0),
    "bias": SamplingParams(temperature=0, logit_bias=((3, 5.0),)),
    "bias out of the vocabulary": SamplingParams(temperature=0, logit_bias=((V + 3, 5.0),)),
    "min_tokens": SamplingParams(temperature=0, min_tokens=9, stop_token_ids=(4,)),
    "min_tokens without stops": SamplingParams(temperature=0, min_tokens=9, ignore_eos=True),
    "random": SamplingParams(temperature=1.0, top_p=0.5, top_k=3, min_p=0.1, seed=1),
}


@pytest.mark.parametrize("name", ASKS)
def test_a_row_that_asks_for_something_and_is_not_in_the_step_changes_nothing(name: str) -> None:
    """A prompt of several steps: its row is held, and only others are sampled."""
    made = Sampler(4, V, eos_token_ids=(0,))
    made.add(0, ASKS[name], np.array([1, 2, 3]), 3, 7)
    made.add(2, SamplingParams(temperature=0), np.array([1]), 1, 0)
    logits = logits_of(1)
    batch = SampleBatch(np.array([2]), np.array([1]), np.array([0]), lambda _: [1])
    for masks in (None, GrammarMasks([], b"")):
        sampled = made.sample(logits.clone(), batch, masks).read()
        assert sampled.tokens.tolist() == [int(logits.argmax())]
        assert (sampled.faults, sampled.logprobs) == ({}, {})


LIMITS = [
    {name: value}
    for name, values in {
        "temperature": (1e-300, 5e-324, 100.0), "top_p": (1e-300, 1 - 1e-16), "min_p": (1e-300, 1.0),
        "top_k": (1, 1 << 31), "presence_penalty": (-2.0, 2.0, 1e-300), "frequency_penalty": (-2.0, 2.0, 1e-300),
        "repetition_penalty": (1e-6, 100.0), "logit_bias": (((3, 100.0),), ((3, -100.0),), ((3, 1e-300),)),
        "seed": (-(1 << 63), (1 << 63) - 1),
    }.items()
    for value in values
]  # fmt: skip


@pytest.mark.parametrize("params", LIMITS, ids=str)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_no_parameter_within_its_limits_is_a_fault(params: dict, temperature: float) -> None:
    """Nor just outside of what it is refused for: a value that a float32 cannot hold does not get to the logits."""
    row = Row(SamplingParams(**{"temperature": temperature, "seed": 1, **params}), output=[3, 3, 4])
    for scale in (1e-3, 1.0, 1e4):
        assert run(logits_of(2) * scale, [row, Row(SamplingParams(temperature=0))]).faults == {}


@pytest.mark.parametrize("value", [0.0, 1e-300, 1e-38, 1e-7, -1.0, 101.0, math.inf, math.nan])
def test_a_repetition_penalty_that_makes_infinite_logits_is_refused(value: float) -> None:
    with pytest.raises(InvalidParam, match="repetition_penalty"):
        SamplingParams(repetition_penalty=value)
