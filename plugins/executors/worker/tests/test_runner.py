"""The runner with a model whose tokens are checksums of what it reads: rows, inputs, drafts, copies, faults."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lmkit.api import (
    EngineError,
    GrammarMasks,
    KVConfig,
    NewRow,
    PluginError,
    RowWork,
    SamplingParams,
    StepLimits,
    StepPlan,
)
from lmkit_testing.toy import TOY_VOCAB, ToyAttention, ToyModel, ToyPlatform, checksum, toy_model, toy_tokens
from lmkit_worker.runner import Runner

GREEDY = SamplingParams(temperature=0)


def make_runner(
    block_size: int = 4, num_blocks: int = 64, backend: ToyAttention | None = None, max_drafts: int = 0, **limits: int
) -> Runner:
    loaded = toy_model(block_size)
    specs = tuple(loaded.info.kv_specs(block_size, "float32"))
    sizes = StepLimits(**({"max_rows": 8, "max_tokens": 64, "max_blocks_per_row": 64, "max_length": 64} | limits))
    return Runner(
        loaded, KVConfig(specs, (num_blocks,)), sizes, [backend or ToyAttention()], ToyPlatform(), torch.device("cpu"),
        max_drafts=max_drafts, debug_kv=True,
    )  # fmt: skip


@dataclass
class Live:
    """The scheduler's side of one row, as small as it can be."""

    id: str
    prompt: list[int]
    tokens: list[int]
    blocks: list[int] = field(default_factory=list)
    computed: int = 0
    epoch: int = 0
    sent: bool = False


class Driver:
    """Drives a runner with random but legal plans, and predicts every token."""

    def __init__(self, draw: st.DrawFn, block_size: int) -> None:
        self.draw, self.block_size = draw, block_size
        self.runner = make_runner(block_size, num_blocks=120, max_drafts=3)
        self.free = list(range(119, 0, -1))
        self.live: list[Live] = []
        self.paused: list[Live] = []
        self.step = self.made = 0

    def run(self) -> None:
        draw = self.draw
        gone = []
        for row in list(self.live):
            fate = draw(st.sampled_from(["keep"] * 6 + ["finish", "preempt"]))
            if fate != "keep":
                self.live.remove(row)
                gone.append(row.id)
                self.free += row.blocks
                row.blocks = []
                if fate == "preempt":
                    row.epoch += 1
                    row.computed, row.sent = 0, False
                    self.paused.append(row)
        if self.paused and len(self.live) < 8 and draw(st.booleans()):
            self.live.append(self.paused.pop())
        elif len(self.live) < 8 and draw(st.booleans()):
            prompt = draw(st.lists(st.integers(0, TOY_VOCAB - 1), min_size=1, max_size=12))
            self.live.append(Live(f"r{self.made}", prompt, list(prompt)))
            self.made += 1
        plan = StepPlan(self.step, gone=gone)
        order = draw(st.permutations(self.live))
        expected = [self.work(plan, row) for row in order if len(row.tokens) < 40]
        self.runner.forward(plan)
        result = self.runner.sample(self.step).read()
        assert not result.faults
        assert result.tokens == [tokens for tokens in expected if tokens is not None]
        self.check_batch(plan)
        self.step += 1

    def work(self, plan: StepPlan, row: Live) -> list[int] | None:
        draw = self.draw
        missing = len(row.tokens) - row.computed
        n = draw(st.integers(1, missing)) if missing > 1 else 1
        sample = row.computed + n == len(row.tokens)
        drafts: list[int] = []
        if sample and draw(st.booleans()):
            right = toy_tokens(row.tokens, 3)
            drafts = draw(st.sampled_from([right, right[:1], [*right[:2], 0], [1]]))
        new_blocks = []
        while (len(row.blocks) + len(new_blocks)) * self.block_size < row.computed + n + len(drafts):
            new_blocks.append(self.free.pop())
        row.blocks += new_blocks
        if not row.sent:
            plan.new.append(
                NewRow(row.id, row.epoch, list(row.tokens), len(row.prompt), [list(row.blocks)], row.computed, GREEDY)
            )
            row.sent = True
        elif new_blocks:
            plan.grown.append((row.id, [new_blocks]))
        plan.rows.append(RowWork(row.id, row.epoch, row.computed, n + len(drafts), drafts, sample))
        row.computed += n
        if not sample:
            return []
        right = toy_tokens(row.tokens, len(drafts) + 1)
        accepted = 0
        while accepted < len(drafts) and drafts[accepted] == right[accepted]:
            accepted += 1
        row.tokens += right[: accepted + 1]
        row.computed += accepted
        return right[: accepted + 1]

    def check_batch(self, plan: StepPlan) -> None:
        """W1, W2."""
        rows, batch = self.runner.rows, self.runner.inputs.batches[0]
        rows.check(row.id for row in self.live if row.sent)
        self.runner.check()
        for row in self.live:
            if row.sent:
                slot = rows.slot_of[row.id]
                assert rows.row_tokens(slot).tolist() == row.tokens
                assert rows.row_blocks(0, slot).tolist() == row.blocks
        if not plan.rows:
            return
        slots = batch.slots.host[: batch.num_tokens].tolist()
        assert len(set(slots)) == len(slots), "W2: slots differ"
        starts = batch.query_start.host[: batch.num_rows + 1].tolist()
        blocks_of = {row.id: set(row.blocks) for row in self.live}
        for work, first, last in zip(plan.rows, starts, starts[1:], strict=False):
            held = {slot // self.block_size for slot in slots[first:last]}
            assert held <= blocks_of[work.id], "W2: slots in the row's own blocks"
            assert 0 not in held, "W2: never the null block"


@settings(max_examples=40, deadline=None)
@given(st.data(), st.sampled_from([1, 4]))
def test_rows_mirror_the_plans_and_tokens_are_right(data: st.DataObject, block_size: int) -> None:
    driver = Driver(data.draw, block_size)
    for _ in range(data.draw(st.integers(1, 12))):
        driver.run()


def work(id: str, start: int, n: int = 1, drafts: tuple[int, ...] = ()) -> RowWork:
    """A row that samples."""
    return RowWork(id, 0, start, n + len(drafts), list(drafts), True)


def start(id: str, tokens: list[int], blocks: list[int], params: SamplingParams = GREEDY) -> StepPlan:
    """A plan that computes one new row whole."""
    return StepPlan(0, new=[NewRow(id, 0, tokens, len(tokens), [blocks], 0, params)], rows=[work(id, 0, len(tokens))])


def merge(*plans: StepPlan) -> StepPlan:
    return StepPlan(plans[0].step, new=[n for p in plans for n in p.new], rows=[w for p in plans for w in p.rows])


def test_inputs_of_a_batch_are_those_of_its_rows() -> None:
    """W3."""
    prompts = {"a": [5, 6, 7, 8, 9], "b": [1], "c": [2, 3]}
    plans = [start(id, tokens, [10 * i + 1, 10 * i + 2]) for i, (id, tokens) in enumerate(prompts.items())]

    def build(plan: StepPlan) -> tuple[list, ...]:
        runner = make_runner()
        runner.rows.apply(plan)
        step, batch = runner.inputs.build(plan), runner.inputs.batches[0]
        n, t = batch.num_rows, batch.num_tokens
        return (
            step.inputs.token_ids.tolist(), step.inputs.positions.tolist(), batch.slots.host[:t].tolist(),
            batch.seq_len.host[:n].tolist(), batch.query_start.host[: n + 1].diff().tolist(), step.positions.tolist(),
        )  # fmt: skip

    singles = [build(plan) for plan in plans]
    assert build(merge(*plans)) == tuple([x for part in column for x in part] for column in zip(*singles, strict=True))


def test_decode_rows_are_counted_from_the_front() -> None:
    runner = make_runner(max_drafts=2)
    runner.forward(merge(start("a", [1], [1]), start("b", [2], [2]), start("c", [3, 4], [3])))
    batch = runner.inputs.batches[0]
    assert (batch.num_decode_rows, batch.max_query, batch.max_seq, batch.num_tokens) == (2, 2, 2, 4)
    runner.sample(0).read()
    runner.forward(
        StepPlan(
            1,
            rows=[
                RowWork("a", 0, 1, 3, [0, 0], True),
                RowWork("b", 0, 1, 1, [], True),
                RowWork("c", 0, 2, 1, [], True),
            ],
        )
    )
    assert (batch.num_decode_rows, batch.max_query, batch.num_tokens) == (3, 3, 5)


def test_copy_and_zero() -> None:
    """A copied block is as good as the original; the row reads the copy."""
    runner = make_runner()
    tokens = [5, 6, 7, 8, 9, 10]
    runner.forward(start("a", tokens, [3, 4]))
    first = runner.sample(0).read().tokens[0]
    resumed = NewRow("b", 0, tokens, 6, [[3, 9]], 5, GREEDY)
    runner.forward(StepPlan(1, new=[resumed], copies=[(0, 4, 9)], rows=[RowWork("b", 0, 5, 1, [], True)]))
    assert runner.sample(1).read().tokens == [first]
    runner.forward(StepPlan(2, gone=["a", "b"], zero=[(0, 9)]))
    assert runner.sample(2).read().tokens == []
    assert all(float(kv[:, 9 * 4 : 10 * 4].abs().sum()) == 0 for kv in runner.blocks.kv)


def test_reading_what_nobody_wrote_is_a_fault_of_that_row() -> None:
    """With debug_kv fresh blocks hold NaN; the plan lies about `start`, so positions 0..3 are never written."""
    runner = make_runner()
    lying = NewRow("bad", 0, [1, 2, 3, 4, 5], 5, [[1, 2]], 0, GREEDY)
    plan = merge(StepPlan(0, new=[lying], rows=[RowWork("bad", 0, 4, 1, [], True)]), start("good", [1, 2], [7]))
    runner.forward(plan)
    result = runner.sample(0).read()
    assert result.tokens == [[], toy_tokens([1, 2], 1)]
    assert [row for row, _ in result.faults] == [0]
    # A step that was in flight still runs, and the next one does without the row.
    runner.forward(StepPlan(1, rows=[RowWork("bad", 0, 5, 1, [], True), RowWork("good", 0, 2, 1, [], True)]))
    assert runner.sample(1).read().tokens[1] == toy_tokens([1, 2], 2)[1:]
    runner.forward(StepPlan(2, gone=["bad"], rows=[RowWork("good", 0, 3, 1, [], True)]))
    assert runner.sample(2).read().tokens == [toy_tokens([1, 2], 3)[2:]]


def test_a_mask_binds_a_greedy_row_and_no_other() -> None:
    runner, only = make_runner(), (toy_tokens([1, 2], 1)[0] + 1) % TOY_VOCAB
    runner.forward(merge(start("free", [1, 2], [7]), start("bound", [1, 2], [8])))
    bits = (1 << only).to_bytes(-(-TOY_VOCAB // 32) * 4, "little")
    assert runner.sample(0, GrammarMasks([1], bits)).read().tokens == [toy_tokens([1, 2], 1), [only]]


def test_a_row_whose_parameters_leave_no_token_is_told_from_a_fault_of_the_model() -> None:
    runner = make_runner()
    nothing = SamplingParams(temperature=0, min_tokens=2, stop_token_ids=tuple(range(TOY_VOCAB)))
    row = NewRow("none", 0, [1, 2], 2, [[1, 2]], 0, nothing)
    bad = NewRow("bad", 0, [1, 2, 3, 4, 5], 5, [[3, 4]], 0, nothing)  # its first positions are never written: NaN
    works = [RowWork("none", 0, 0, 2, [], True), RowWork("bad", 0, 4, 1, [], True)]
    runner.forward(merge(StepPlan(0, new=[row, bad], rows=works), start("good", [1, 2], [7])))
    result = runner.sample(0).read()
    assert ([i for i, _ in result.undrawn], [i for i, _ in result.faults]) == ([0], [1])
    assert result.tokens == [[], [], toy_tokens([1, 2], 1)]


@pytest.mark.parametrize(
    "wrong",
    [
        RowWork("a", 1, 3, 1, [], True),  # another epoch
        RowWork("a", 0, 4, 1, [], True),  # beyond the known tokens
        RowWork("a", 0, 2, 1, [], True),  # samples before the last token
        RowWork("a", 0, 3, 3, [1, 2], True),  # more positions than blocks
    ],
)
def test_plans_that_do_not_fit_are_refused(wrong: RowWork) -> None:
    runner = make_runner(max_drafts=2)
    runner.forward(start("a", [1, 2, 3], [1]))
    runner.sample(0).read()
    with pytest.raises(EngineError, match="does not fit its row"):
        runner.forward(StepPlan(1, rows=[wrong]))


def test_too_many_rows_and_double_rows_are_refused() -> None:
    runner = make_runner(max_rows=1)
    runner.forward(start("a", [1], [1]))
    with pytest.raises(EngineError, match="more than 1 rows"):
        runner.forward(start("b", [1], [2]))
    with pytest.raises(EngineError, match="twice"):
        runner.forward(start("a", [1], [2]))


def test_prompt_logprobs_in_chunks() -> None:
    params = SamplingParams(temperature=0, prompt_logprobs=1)
    tokens = [5, 6, 7, 8, 9]
    runner = make_runner()
    whole = start("a", tokens, [1, 2], params)
    runner.forward(whole)
    expected = runner.sample(0).read().logprobs[0]
    assert (expected.prompt_start, [e.token for e in expected.prompt]) == (1, tokens[1:])
    found = []
    for i, (first, n) in enumerate([(0, 2), (2, 1), (3, 2)]):
        new = [NewRow("b", 0, tokens, 5, [[3, 4]], 0, params)] if i == 0 else []
        runner.forward(StepPlan(i + 1, new=new, rows=[RowWork("b", 0, first, n, [], first + n == 5)]))
        part = runner.sample(i + 1).read().logprobs
        assert [p.prompt_start for p in part] == [first + 1]
        found += part[0].prompt
    assert found == expected.prompt
    logits = ToyModel(runner.model.info, ToyAttention()).logits(torch.tensor([[checksum(tokens[:1])]]))
    assert found[0].logprob == pytest.approx(float(torch.log_softmax(logits, -1)[0, tokens[1]]), abs=1e-5)


def test_bytes_are_those_predicted() -> None:
    """W4, and a backend that takes more than planned is named."""
    runner = make_runner(num_blocks=10)
    assert sum(kv.nbytes for kv in runner.blocks.kv) == runner.kv_config.nbytes

    class Greedy(ToyAttention):
        def kv_shape(self, need, num_blocks):
            return (2, *super().kv_shape(need, num_blocks))

    with pytest.raises(PluginError, match="bytes"):
        make_runner(backend=Greedy())


def test_sampled_rows_equal_plain_decoding_whatever_the_drafts() -> None:
    """M2 for a random row: the same seed gives the same tokens with right, wrong and no drafts."""

    def tokens(propose) -> list[int]:
        runner = make_runner(max_drafts=3)
        params = SamplingParams(seed=11, temperature=5.0)
        runner.forward(start("a", [1, 2, 3], list(range(1, 14)), params))
        found = runner.sample(0).read().tokens[0]
        step = 1
        while len(found) < 30:
            drafts = propose(found)[:3]
            runner.forward(StepPlan(step, rows=[RowWork("a", 0, 2 + len(found), 1 + len(drafts), drafts, True)]))
            found += runner.sample(step).read().tokens[0]
            step += 1
        return found[:30]

    plain = tokens(lambda found: [])
    assert len(set(plain)) > 10
    assert tokens(lambda found: plain[len(found) :]) == plain
    assert tokens(lambda found: [0, 0]) == plain
    assert tokens(lambda found: [*plain[len(found) : len(found) + 1], 1, 2]) == plain


def test_slots_are_reused_lowest_first() -> None:
    runner = make_runner()
    runner.forward(merge(*(start(id, [1], [i + 1]) for i, id in enumerate("abc"))))
    runner.sample(0).read()
    runner.forward(StepPlan(1, gone=["a", "b"], new=start("d", [1], [9]).new, rows=[work("d", 0)]))
    assert runner.rows.slot_of == {"c": 2, "d": 0}
    assert np.count_nonzero(runner.rows.num_tokens) == 2


def test_every_accepted_token_has_its_logprob() -> None:
    runner = make_runner(max_drafts=3)
    runner.forward(start("a", [1, 2, 3], [1, 2, 3], SamplingParams(temperature=0, logprobs=0)))
    runner.sample(0).read()
    right = toy_tokens([1, 2, 3], 4)
    runner.forward(StepPlan(1, rows=[work("a", 3, drafts=(right[1], right[2], 0 if right[3] else 1))]))
    result = runner.sample(1).read()
    assert result.tokens == [right[1:]]
    assert [entry.token for entry in result.logprobs[0].tokens] == right[1:]
