"""Admission with a clock of the test: whom it takes, whom it sends away, and that Retry-After holds."""

from __future__ import annotations

import asyncio
import heapq
import random
from collections import deque
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lmkit.config import EngineConfig, from_options
from lmkit.contracts.config import SchedConfig
from lmkit.plugins.host import PluginHost
from lmkit.plugins.switches import Switches
from lmkit_cli.settings import Sourced
from lmkit_http.admission import (
    FIRST_WAIT,
    MAX_WAIT,
    Admission,
    Bucket,
    Overloaded,
    Place,
    RateLimited,
    Speed,
    TooManyChoices,
)
from lmkit_http.errors import HttpError
from lmkit_http.settings import ServerSettings
from lmkit_http.sharing import with_shares
from lmkit_testing.serving import hashed, listening, scripted

HELLO = {"messages": [{"role": "user", "content": "Hello"}]}
TWO_KEYS = ("alice", "bob")


def turn(num_prompt: int = 1, num_output: int = 0, priority: int = 0) -> Any:
    request = SimpleNamespace(token_ids=[0] * num_prompt, priority=priority, beams=None)
    usage = SimpleNamespace(completion_tokens=num_output)
    stream = SimpleNamespace(token_ids=[0] * num_output, usage=usage)
    return SimpleNamespace(request=request, stream=stream, message=SimpleNamespace(pooled=None))


class Server:
    """Rows that each take `service` seconds for a request, behind an Admission; the clock is ours."""

    def __init__(self, limit: int, rows: int, service: float = 1.0, **options: Any) -> None:
        self.now, self.inside, self.service, self.rows = 0.0, 0, service, rows
        self.waiting: deque[Place] = deque()
        self.running: list[tuple[float, int, Place]] = []
        self.served: dict[str, int] = {}
        self.waits: list[float] = []
        self._num = 0
        self.admission = Admission(limit, rows, ServerSettings(**options), lambda: self.inside, lambda: self.now)

    def enter(self, tenant: str = "", seconds: float | None = None, priority: int = 0) -> Place:
        """Raises what Admission raises; then the room is as before."""
        headers = {} if seconds is None else {"x-request-timeout": str(seconds)}
        place = self.admission.enter(tenant, headers)
        try:
            place.begin([turn(num_output=1, priority=priority)])
        except Overloaded:
            place.leave()
            raise
        self.inside += 1
        self.waiting.append(place)
        self.fill()
        return place

    def fill(self) -> None:
        while self.waiting and len(self.running) < self.rows:
            place = self.waiting.popleft()
            self._num += 1
            self.waits.append(self.now - place.came)
            heapq.heappush(self.running, (self.now + self.service, self._num, place))

    def until(self, time: float) -> None:
        while self.running and self.running[0][0] <= time:
            self.now, _, place = heapq.heappop(self.running)
            self.inside -= 1
            place.leave()
            self.served[place.tenant] = self.served.get(place.tenant, 0) + 1
            self.fill()
        self.now = time


def test_the_room_is_bounded_and_places_come_back() -> None:
    server = Server(limit=3, rows=1)
    for _ in range(3):
        server.enter()
    with pytest.raises(Overloaded) as refused:
        server.enter()
    assert refused.value.info().status == 503
    assert refused.value.retry_after == 2 * FIRST_WAIT  # nothing is measured yet
    server.until(1.0)
    place = server.enter()
    place.leave()
    place.leave()  # idempotent
    assert server.admission._accounts[""].num == 2


def test_retry_after_holds_for_all_who_were_sent_away() -> None:
    """Eighty come at once, ten times the room, and come back when they are told: nine in ten then get in, the others
    the time after."""
    server = Server(limit=8, rows=4, service=0.8)
    for second in range(8):  # speed is measured while all rows are taken
        server.until(second * 0.8)
        for _ in range(4):
            server.enter()
    told = [(server.now, who, 0) for who in range(80)]  # when, who, how often it was sent away
    tries: list[int] = []
    while told:
        when, who, num = heapq.heappop(told)
        server.until(when)
        try:
            server.enter()
            tries.append(num)
        except Overloaded as error:
            heapq.heappush(told, (when + error.retry_after, who, num + 1))
    assert sum(num <= 1 for num in tries) >= 0.9 * 80, sorted(tries)
    assert max(tries) <= 2
    assert server.now <= 1.1 * (8 * 0.8 + 80 / 5)  # and no place stays empty for long


ARRIVALS = st.lists(st.tuples(st.floats(0, 3), st.sampled_from(["a", "b"])), max_size=60)  # gap, tenant


@given(st.integers(1, 6), st.integers(0, 12), ARRIVALS)
@settings(max_examples=100, deadline=None)
def test_whatever_comes_the_room_holds(rows: int, waiting: int, arrivals: list[tuple[float, str]]) -> None:
    """Never more than the limit; a refusal says when, bounded; in the end nobody is left; the others are served."""
    server = Server(limit=rows + waiting, rows=rows, api_keys=TWO_KEYS)
    taken, told = 0, []
    for gap, tenant in arrivals:
        server.until(server.now + gap)
        try:
            server.enter(tenant)
            taken += 1
        except (Overloaded, RateLimited) as error:
            told.append(error.retry_after)
        assert server.inside <= rows + waiting
    assert all(0 < wait <= MAX_WAIT for wait in told)
    server.until(1e6)
    assert server.inside == 0
    assert sum(server.served.values()) == taken
    assert all(account.num == 0 for account in server.admission._accounts.values())


def test_a_key_that_fills_the_room_leaves_a_part_to_others() -> None:
    server = Server(limit=90, rows=4, api_keys=TWO_KEYS)
    for _ in range(80):
        server.enter("heavy")
    with pytest.raises(RateLimited, match="80 of 90 places"):
        server.enter("heavy")
    for _ in range(9):
        server.enter("light")
    with pytest.raises(RateLimited, match="this key"):
        server.enter("light")
    alone = Server(limit=90, rows=4, api_keys=("one",))
    for _ in range(90):
        alone.enter()
    with pytest.raises(Overloaded):
        alone.enter()


@pytest.mark.parametrize(("share", "taken"), [(0.5, False), (2.0, True)])
def test_who_cannot_make_it_is_refused_early(share: float, taken: bool) -> None:
    """20 wait before it for 4 rows of 1 s each: its turn comes after about 5 s."""
    server = Server(limit=100, rows=4)
    for second in range(8):  # speed is measured while all rows are taken
        server.until(second)
        for _ in range(4):
            server.enter()
    for _ in range(24 - server.inside):
        server.enter()
    before = server.inside
    wait = (before + 1 - 4) * 0.25
    if taken:
        server.enter(seconds=share * wait)
    else:
        with pytest.raises(Overloaded, match="deadline") as refused:
            server.enter(seconds=share * wait)
        assert refused.value.retry_after == pytest.approx(wait, rel=0.3)
        assert server.inside == before
        server.enter(seconds=share * wait, priority=-1)  # goes before them all
        other = Server(limit=100, rows=4, api_keys=TWO_KEYS)
        other.admission._speed = server.admission._speed
        other.now = server.now
        other.enter("light", seconds=share * wait)  # none of its own waits


@given(
    st.integers(1, 100),
    st.lists(st.tuples(st.floats(0, 30), st.integers(1, 150)), min_size=1, max_size=50),
)
@settings(max_examples=200, deadline=None)
def test_a_bucket_never_gives_more_than_it_gets(minute: int, takes: list[tuple[float, int]]) -> None:
    """In any time: what it holds at most, what has come since, and the one that overdrew it. What it says holds."""
    now, bucket, taken = 0.0, Bucket(minute, 0.0), []
    for gap, amount in takes:
        now += gap
        wait = bucket.wait(1, now)
        if wait:
            now += wait
            assert bucket.wait(1, now) < 1e-6
        bucket.take(amount, now)
        taken.append((now, amount))
    for i in range(len(taken)):
        for j in range(i, len(taken)):
            given = sum(amount for _, amount in taken[i : j + 1])
            assert given <= minute * (1 + (taken[j][0] - taken[i][0]) / 60) + taken[j][1] + 1e-6


def test_requests_and_tokens_a_minute() -> None:
    server = Server(limit=100, rows=100, service=0.1, key_requests=3)
    for _ in range(3):
        server.enter()
    with pytest.raises(RateLimited, match="3 requests") as refused:
        server.enter()
    assert refused.value.retry_after == pytest.approx(20.0)
    server.until(20.0)
    server.enter()

    tokens = Server(limit=100, rows=100, key_tokens=60)
    place = tokens.admission.enter("", {})
    place.begin([turn(num_prompt=60)])
    with pytest.raises(RateLimited, match="60 tokens") as refused:
        tokens.admission.enter("", {})
    assert refused.value.retry_after == pytest.approx(1.0)
    place.turns = [turn(num_output=30)]  # is paid for at the end
    place.leave()
    with pytest.raises(RateLimited) as refused:
        tokens.admission.enter("", {})
    assert refused.value.retry_after == pytest.approx(31.0)


def test_concurrent_requests_of_a_key() -> None:
    server = Server(limit=100, rows=10, key_concurrent=2, api_keys=TWO_KEYS)
    server.enter("a")
    server.enter("a")
    with pytest.raises(RateLimited, match="2 choices at once"):
        server.enter("a")
    server.enter("b")
    server.until(1.0)
    server.enter("a")


def test_speed_counts_the_time_of_rows_and_falls_while_nobody_leaves() -> None:
    speed, now = Speed(4, 0.0), 0.0
    speed.look(9, now)
    for _ in range(10):
        now += 0.5
        speed.leave(now)
    assert speed.interval() == pytest.approx(0.5)
    speed.look(0, now)
    speed.look(2, now + 1000)  # idle until now
    assert speed.interval() == pytest.approx(0.5)
    speed.look(4, now + 1004)  # half of the rows, for 4 s
    assert speed.interval() == pytest.approx(6.5 / 9)
    speed.look(4, now + 1094)
    assert speed.interval() == pytest.approx(96.5 / 9)


@pytest.mark.parametrize("text", ["", "x", "0", "-1", "nan", "inf", "1e9"])
def test_deadlines_that_are_none(text: str) -> None:
    server = Server(limit=1, rows=1)
    with pytest.raises(HttpError, match="x-request-timeout"):
        server.admission.enter("", {"x-request-timeout": text})


def test_the_sooner_of_two_deadlines_counts() -> None:
    server = Server(limit=9, rows=9, max_seconds=10.0)
    for asked, counts in ((None, 10.0), (3.0, 3.0), (30.0, 10.0)):
        assert server.enter(seconds=asked).remaining() == counts


# ---------------------------------------------------------------------------------------------------- over HTTP


@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_ends_at_its_deadline(stream: bool) -> None:
    """With a typed error, and its row is free again."""
    async with hashed(delay=0.005) as llm, listening(llm) as url, httpx.AsyncClient(base_url=url) as client:
        body = HELLO | {"ignore_eos": True, "max_completion_tokens": 3000, "stream": stream}
        answer = await client.post(
            "/v1/chat/completions", json=body, headers={"X-Request-Timeout": "0.5"}, timeout=60
        )  # fmt: skip
        assert answer.status_code == (200 if stream else 504)
        assert '"code":"deadline"' in answer.text
        assert answer.text.endswith("data: [DONE]\n\n") == stream
        async with asyncio.timeout(10):
            while (await llm.client.stats()).sched.num_running:
                await asyncio.sleep(0.01)
        good = await client.post("/v1/chat/completions", json=HELLO | {"max_completion_tokens": 2}, timeout=60)
        assert good.status_code == 200


async def test_an_answer_of_several_prompts_ends_at_its_deadline() -> None:
    """Also those that the engine was not given yet."""
    config = EngineConfig(sched=SchedConfig(max_rows=1))
    async with hashed(config, delay=0.005) as llm, listening(llm) as url, httpx.AsyncClient(base_url=url) as client:
        body = {"prompt": ["a", "b", "c"], "ignore_eos": True, "max_tokens": 3000}
        answer = await client.post("/v1/completions", json=body, headers={"X-Request-Timeout": "0.5"}, timeout=60)
        assert answer.status_code == 504
        assert answer.json()["error"]["type"] == "timeout_error"


async def test_refusals_say_when_and_whose(connect: Any) -> None:
    llm = scripted("a")
    client = connect(llm, ServerSettings(key_requests=2))
    for _ in range(2):
        assert (await client.post("/v1/chat/completions", json=HELLO)).status_code == 200
    refused = await client.post("/v1/chat/completions", json=HELLO)
    assert refused.status_code == 429
    assert refused.json()["error"]["code"] == "rate_limit_exceeded"
    assert 29 <= int(refused.headers["retry-after"]) <= 30
    assert int(refused.headers["retry-after-ms"]) <= 30_000
    assert (await client.post("/v1/messages", json={})).json()["error"]["type"] == "rate_limit_error"
    assert (await client.get("/v1/models")).status_code == 200  # costs nothing


async def test_places_come_back_whatever_happens(connect: Any) -> None:
    """Answers, streams, bad requests, deadlines that are none."""
    llm = scripted("abc")
    kept: list[Any] = []
    async with listening(llm, ServerSettings(port=0), kept.append) as url, httpx.AsyncClient(base_url=url) as client:
        for body in (HELLO, HELLO | {"stream": True}, {"messages": 1}, HELLO | {"max_completion_tokens": 10**6}, {}):
            await client.post("/v1/chat/completions", json=body)
        await client.post("/v1/chat/completions", json=HELLO, headers={"X-Request-Timeout": "soon"})
        await client.post("/v1/completions/render", json={"prompt": "a"})
        async with client.stream("POST", "/v1/chat/completions", json=HELLO | {"stream": True}):
            pass
        admission = kept[0].state.backend.admission
        async with asyncio.timeout(10):
            while admission._accounts[""].num:
                await asyncio.sleep(0.01)


def test_random_storms_keep_the_books() -> None:
    """A longer mix of deadlines, keys and priorities: nothing is lost, nobody waits longer than the room is deep."""
    rng = random.Random(7)
    server = Server(limit=40, rows=4, service=0.25, api_keys=TWO_KEYS, key_requests=3000)
    taken, told = 0, []
    for _ in range(4000):
        server.until(server.now + rng.expovariate(160))  # ten times what it can do
        try:
            server.enter(rng.choice("aaab"), rng.choice([None, None, 0.5, 5.0]), rng.choice([0, 0, 1]))
            taken += 1
        except (Overloaded, RateLimited) as error:
            told.append(error.retry_after)
    assert min(told) > 0
    busy = server.now
    server.until(1e6)
    assert sum(server.served.values()) == taken >= 0.95 * 16 * busy
    assert max(server.waits) <= 40 / 16 + 0.5


def several(num: int) -> list[Any]:
    """The turns of one request with so many choices."""
    return [turn() for _ in range(num)]


def test_a_request_counts_as_often_as_it_has_choices() -> None:
    """In the limit of its key, once its body is read; what is refused then leaves the books as they were."""
    server = Server(limit=100, rows=10, key_concurrent=4, api_keys=TWO_KEYS)
    admission = server.admission
    first = admission.enter("a", {})
    with pytest.raises(TooManyChoices, match="64 choices") as refused:
        first.begin(several(64))
    assert (refused.value.info().status, refused.value.field) == (400, "n")
    first.leave()
    place = admission.enter("a", {})
    place.begin(several(3))
    second = admission.enter("a", {})
    with pytest.raises(RateLimited, match="3 choices at once, and 2 more"):
        second.begin(several(2))
    second.leave()
    third = admission.enter("a", {})
    third.begin(several(1))
    with pytest.raises(RateLimited, match="4 choices at once"):
        admission.enter("a", {})
    admission.enter("b", {}).begin(several(4))
    place.leave()
    place.leave()
    admission.enter("a", {}).begin(several(3))
    assert admission._accounts["a"].choices == 4


@pytest.mark.parametrize("limit", [20, 320])
def test_the_share_of_a_key_counts_choices(limit: int) -> None:
    """One of several keys leaves places to the others, however many choices its requests have."""
    admission = Server(limit=limit, rows=4, api_keys=TWO_KEYS).admission
    places = [admission.enter("heavy", {})]
    places[0].begin(several(16))

    def fill() -> None:
        for _ in range(limit):
            places.append(admission.enter("heavy", {}))
            try:
                places[-1].begin(several(16))
            except RateLimited:
                places.pop().leave()
                raise

    with pytest.raises(RateLimited):
        fill()
    held = admission._accounts["heavy"].choices
    assert held == 16 * len(places)
    assert limit - held >= limit / 9 or len(places) == 1
    admission.enter("light", {}).begin(several(2))
    alone = Server(limit=limit, rows=4).admission
    for _ in range(limit):  # who shares with nobody has all places
        alone.enter("", {}).begin(several(16))


def test_a_single_request_is_never_too_large_for_its_share() -> None:
    admission = Server(limit=20, rows=4, api_keys=TWO_KEYS).admission
    place = admission.enter("heavy", {})
    place.begin(several(64))
    with pytest.raises(RateLimited):
        admission.enter("heavy", {})
    admission.enter("light", {}).begin(several(1))  # has none yet, and waits for nobody
    place.leave()
    admission.enter("heavy", {}).begin(several(64))


async def test_what_is_refused_for_its_choices_leaves_nothing_running() -> None:
    kept: list[Any] = []
    settings = ServerSettings(port=0, key_concurrent=2, api_keys=TWO_KEYS)
    async with (
        listening(scripted("abc"), settings, lambda app: kept.append(app.state.backend)) as url,
        httpx.AsyncClient(base_url=url, headers={"Authorization": "Bearer alice"}) as client,
    ):
        for path, body in [
            ("/v1/chat/completions", HELLO | {"n": 3}),
            ("/v1/completions", {"prompt": ["a", "b", "c"]}),
            ("/v1/completions", {"prompt": "a", "n": 3, "stream": True}),
            ("/v1/completions", {"prompt": "a", "best_of": 3}),
        ]:
            response = await client.post(path, json=body)
            assert (response.status_code, response.json()["error"]["code"]) == (400, "too-many-choices")
        assert (await client.post("/v1/chat/completions", json=HELLO | {"n": 2})).status_code == 200
        assert kept[0].num_active == 0
        assert all(a.choices == a.num == 0 for a in kept[0].admission._accounts.values())


@pytest.mark.parametrize(
    ("keys", "options", "scheduler"),
    [
        (("a", "b"), {}, "fair"),
        (("a",), {}, "auto"),
        ((), {}, "auto"),
        (("a", "b"), {"scheduler": "fcfs"}, "fcfs"),
        (("a", "b"), {"scheduler": "priority"}, "priority"),
    ],
)
def test_several_keys_share_the_steps(keys: tuple[str, ...], options: dict[str, str], scheduler: str) -> None:
    host = PluginHost()
    host.scan()
    settings = with_shares(Sourced(from_options({"model": "demo", **options}), {}), keys, host)
    assert settings.config.wants("scheduler") == scheduler


def test_without_the_plugin_the_default_stays() -> None:
    host = PluginHost(switches=Switches.build({}, disable=["scheduler:fair"]))
    host.scan()
    settings = with_shares(Sourced(from_options({"model": "demo"}), {}), ("a", "b"), host)
    assert settings.config.wants("scheduler") == "auto"
