"""Who is light does not wait for who is heavy; over time all get the same."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lmkit_scheduler_fair import policy as module
from lmkit_scheduler_fair.hooks import Options
from lmkit_scheduler_fair.policy import Fair
from lmkit_scheduler_fcfs.policy import FirstComeFirstServed
from lmkit_testing.hash_model import hash_kv
from lmkit_testing.scheduler import SchedulerConformance
from lmkit_testing.stepper import Stepper, make_request

VOCAB = 50
WAITING = 8  # requests of a tenant that is never without any


class TestFair(SchedulerConformance):
    plugin = "scheduler:fair"


def request(stepper: Stepper, tenant: str, name: str, prompt: int, output: int) -> None:
    r = make_request(name, [len(stepper.scheduler.requests) % VOCAB] * prompt, output, ignore_eos=True)
    r.tenant = tenant
    stepper.scheduler.add(r)


def slowest(policy: object, load: list[tuple[int, str, int, int]], tenant: str) -> int:
    """`load`: step, tenant, prompt tokens, output tokens of each request. Most steps to a first token of `tenant`."""
    stepper = Stepper(hash_kv(1024, 4), policy=policy, max_rows=4, max_tokens=32, max_length=1024)  # type: ignore[arg-type]
    steps: dict[str, int] = {}
    waiting, step = sorted(enumerate(load), key=lambda item: item[1][0]), 0
    num = sum(of == tenant for _, of, _, _ in load)
    while sum(name.startswith(tenant) for name in steps) < num:
        while waiting and waiting[0][1][0] <= step:
            place, (_, of, prompt, output) = waiting.pop(0)
            request(stepper, of, f"{of} {place}", prompt, output)
        stepper.step()
        for name in stepper.events:
            steps.setdefault(name, step - load[int(name.split()[1])][0])
        step += 1
    return max(taken for name, taken in steps.items() if name.startswith(tenant))


def test_a_light_key_is_not_behind_a_heavy_one() -> None:
    """A hundred requests of one key are there before those of another come, now and then."""
    heavy = [(0, "heavy", 20, 12)] * 100
    light = [(step, "light", 20, 4) for step in range(40, 240, 20)]
    alone = slowest(Fair(), light, "light")
    assert slowest(Fair(), heavy + light, "light") <= 2 * alone + 12  # a row ends: an answer of the heavy key at most
    assert slowest(FirstComeFirstServed(), heavy + light, "light") > 100


@settings(deadline=None, max_examples=20)
@given(sizes=st.lists(st.tuples(st.integers(8, 24), st.integers(1, 8)), min_size=2, max_size=4))
def test_tokens_are_shared(sizes: list[tuple[int, int]]) -> None:
    """Who always has requests waiting gets as many tokens as whoever else does, however these are cut: what one
    is ahead does not grow with time."""
    stepper = Stepper(policy=Fair(output=1.0), max_rows=4, max_tokens=32, prefix_cache=False)
    tenant_of: dict[str, int] = {}
    got = [0] * len(sizes)
    had: dict[str, int] = {}  # positions of a prompt: what is computed again, for who gave way, is nobody's
    for _ in range(150):
        for tenant, (prompt, output) in enumerate(sizes):
            while sum(tenant_of[r.id] == tenant for r in stepper.scheduler.waiting) < WAITING:
                name = f"r{len(tenant_of)}"
                tenant_of[name] = tenant
                request(stepper, str(tenant), name, prompt, output)
        for work in stepper.step().rows:
            tenant = tenant_of[work.id]
            end = min(work.start + work.num_tokens, sizes[tenant][0])
            got[tenant] += max(0, end - had.get(work.id, 0)) + work.sample
            had[work.id] = max(end, had.get(work.id, 0))
    largest = max(prompt + output for prompt, output in sizes)
    # those that wait, and the four that run, were placed before what they take was known
    assert max(got) - min(got) <= (WAITING + 4) * largest


def test_answers_are_paid_for() -> None:
    policy = Fair(output=4.0)
    talker, other = make_request("talker", [1] * 10), make_request("other", [1] * 10)
    talker.tenant, other.tenant = "t", "o"
    for r in (talker, other):
        policy.admit_key(r)
        policy.victim_key(r)
    talker.tokens += [1] * 100
    talker.finish = "stop"
    later = [make_request(f"{name}{i}", [1]) for i in range(2) for name in "to"]
    for r in later:
        r.tenant = r.id[0]
    ranked = sorted(later, key=policy.admit_key)
    assert [r.id for r in ranked] == ["o0", "o1", "t0", "t1"]
    assert policy.admit_key(later[0])[1] == 10 + 4 * 100
    assert "talker" not in policy._running


def test_a_pause_is_not_saved_up() -> None:
    policy = Fair()
    for i in range(20):
        r = make_request(f"busy{i}", [1] * 50)
        r.tenant = "busy"
        policy.admit_key(r)
        policy.victim_key(r)
        r.finish = "stop"
    back = [make_request(f"back{i}", [1] * 50) for i in range(3)]
    for r in back:
        r.tenant = "back"
    assert [policy.admit_key(r)[1] for r in back] == [950.0, 1000.0, 1050.0]


def test_who_has_many_rows_gives_way_at_once() -> None:
    """The first token of a light key comes as soon as if it were alone, but for the step that runs."""
    heavy = [(4 * i, "heavy", 20, 60) for i in range(60)]
    light = [(step, "light", 20, 4) for step in range(40, 600, 61)]
    assert slowest(Fair(), light, "light") == 0
    assert slowest(Fair(), heavy + light, "light") <= 1
    assert slowest(FirstComeFirstServed(), heavy + light, "light") > 100


def test_who_gives_way_does_so_three_times_at_most_and_goes_on_next() -> None:
    policy = Fair()
    rows = [make_request(f"heavy{i}", [1] * 10) for i in range(4)]
    for order, r in enumerate(rows):
        r.tenant, r.order = "heavy", order
        policy.victim_key(r)
    behind = make_request("behind", [1] * 10)
    behind.tenant, behind.order = "heavy", 4
    policy.admit_key(behind)
    named = []
    for i in range(20):
        first = make_request(f"light{i}", [1])
        first.tenant, first.order = f"light{i}", 5 + i
        key = policy.admit_key(first)
        if (victim := policy.gives_way(first, rows)) is not None:
            named.append(victim.id)
            assert key < policy.admit_key(victim) < policy.admit_key(behind)
    assert named == [f"heavy{i}" for i in (3, 3, 3, 2, 2, 2, 1, 1, 1, 0, 0, 0)]


def test_who_shares_alike_does_not_give_way() -> None:
    policy = Fair()
    rows = [make_request(f"{name}{i}", [1]) for i in range(2) for name in "ab"]
    for r in rows:
        r.tenant = r.id[0]
        policy.victim_key(r)
    first = make_request("c", [1])
    first.tenant = "a"
    policy.admit_key(first)
    assert policy.gives_way(first, rows) is None
    urgent = make_request("urgent", [1], priority=-1)
    assert policy.gives_way(urgent, rows) is rows[-1]


def test_a_priority_comes_first() -> None:
    policy = Fair()
    urgent, first = make_request("urgent", [1], priority=-1), make_request("first", [1])
    assert sorted([first, urgent], key=policy.admit_key) == [urgent, first]


def test_what_is_remembered_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "REMEMBERED", 8)
    policy = Fair()
    for i in range(100):
        r = make_request(f"r{i}", [1])
        policy.admit_key(r)
        policy.victim_key(r)
        r.finish = "abort"
    assert len(policy._places) <= 8
    assert len(policy._running) <= 1


@pytest.mark.parametrize("output", [-1.0, 1e9, float("nan")])
def test_bad_options_are_refused(output: float) -> None:
    with pytest.raises(ValueError, match="output is"):
        Options(output)


# what a heavy key may send, as (step, prompt tokens, output tokens) of each request
HEAVY = {
    "one request with many choices": [(0, 1, 900)] * 16,
    "streams with several choices": [(4 * i, 1, 300) for i in range(4) for _ in range(4)],
    "many choices again and again": [(10 * i, 2, 200) for i in range(20) for _ in range(8)],
    "several prompts": [(0, 30, 50)] * 60,
    "long prompts": [(0, 500, 4)] * 10,
    "one long prompt after the other": [(17 * i, 500, 4) for i in range(12)],
    "long prompts and long answers": [(0, 300, 300)] * 6 + [(5, 1, 400)] * 6,
}


@pytest.mark.parametrize("sent", HEAVY)
@pytest.mark.parametrize("keys", [1, 2, 3])
@pytest.mark.parametrize("prompt", [1, 14])
def test_a_first_token_waits_a_step_for_each_heavy_key(sent: str, keys: int, prompt: int) -> None:
    """Whatever the heavy keys send, and however often the light one asks."""
    heavy = [(step, f"heavy{key}", *sizes) for key in range(keys) for step, *sizes in HEAVY[sent]]
    light = [(step, "light", prompt, 4) for step in range(30, 160, 7)]
    assert slowest(Fair(), heavy + light, "light") <= 1 + keys  # type: ignore[arg-type]


def test_who_asks_for_several_choices_gets_a_row_a_step() -> None:
    """Until it has as many as the other; the other keeps the rest."""
    stepper = Stepper(hash_kv(4096, 4), policy=Fair(), max_rows=8, max_tokens=64, max_length=1024)
    for i in range(12):
        request(stepper, "heavy", f"heavy{i}", 1, 500)
    for _ in range(20):
        stepper.step()
    for i in range(12):
        request(stepper, "light", f"light{i}", 1, 500)
    rows = []
    for _ in range(6):
        stepper.step()
        rows.append(sum(r.tenant == "light" for r in stepper.scheduler.running))
    assert rows == [1, 2, 3, 4, 4, 4]
    assert len(stepper.scheduler.running) == 8


@settings(deadline=None, max_examples=30)
@given(
    sent=st.lists(
        st.tuples(st.integers(0, 60), st.sampled_from("abc"), st.integers(1, 90), st.integers(1, 40)),
        min_size=1, max_size=40,
    )
)  # fmt: skip
def test_every_request_ends(sent: list[tuple[int, str, int, int]]) -> None:
    """Rows that give way come back, and nothing is drawn twice."""
    stepper = Stepper(policy=Fair(), max_rows=3, max_tokens=32)
    waiting, step = sorted(sent), 0
    while waiting or stepper.scheduler.has_work():
        while waiting and waiting[0][0] <= step:
            _, tenant, prompt, output = waiting.pop(0)
            request(stepper, tenant, f"{tenant} {len(waiting)}", prompt, output)
        stepper.step()
        step += 1
        assert step < 20_000
