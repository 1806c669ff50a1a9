"""Who is blamed for deaths of engines, for how long, and what it is known by."""

from __future__ import annotations

from dataclasses import replace

import pytest
from lmkit.api import EngineRequest, Grammar, SamplingParams
from lmkit.engine.streams import EventStream
from lmkit_python import suspects
from lmkit_python.suspects import Suspects, content_hash


def stream(id: str, prompt: int = 1, **params: object) -> EventStream:
    made: dict = {"max_tokens": 8, **params}
    return EventStream(None, EngineRequest(id, [prompt, 2, 3], SamplingParams(**made)))  # type: ignore[arg-type]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [0.0]
    monkeypatch.setattr(suspects, "monotonic", lambda: now[0])
    return now


def test_what_a_request_is_known_by() -> None:
    base = stream("a", seed=1).request
    for same in (stream("b", seed=2).request, stream("c").request):
        assert content_hash(same) == content_hash(base)
    other = [
        stream("a", prompt=5).request, stream("a", temperature=0.5).request,
        stream("a", grammar=Grammar("regex", "a")).request, stream("a", max_tokens=9).request,
    ]  # fmt: skip
    assert len({content_hash(r) for r in [base, *other]}) == 5
    assert content_hash(base) == content_hash(EngineRequest("x", base.token_ids, replace(base.params, seed=None), 7))


def test_two_deaths_are_needed_and_both_are_forgotten(clock: list[float], caplog: pytest.LogCaptureFixture) -> None:
    found = Suspects()
    bad, good = stream("bad"), stream("good", prompt=9)
    assert found.blame([bad, good, stream("bad2")], None) == []  # several choices of one content are one
    assert found.point(bad.request) == 0
    found.clear(good.request)
    assert found.blame([bad, good], None) == [bad]
    assert "bad" in caplog.text
    assert found.refusal(stream("other id", seed=5).request).code == "quarantined"  # type: ignore[union-attr]
    assert found.refusal(good.request) is None
    clock[0] += suspects.QUARANTINE_SECONDS + 1
    assert found.refusal(bad.request) is None
    assert found.blame([good], None) == []
    clock[0] += suspects.HEALTHY_SECONDS + 1
    assert found.point(good.request) is None
    assert found.blame([good], None) == []  # the first death again


def test_the_one_that_was_tried_alone_is_the_cause(clock: list[float]) -> None:
    found = Suspects()
    both = [stream("a"), stream("b", prompt=7)]
    found.blame(both, None)
    assert found.blame(both, both[1]) == [both[1]]
    assert found.refusal(both[0].request) is None


def test_a_death_from_outside_counts_less(clock: list[float]) -> None:
    found, one = Suspects(), stream("a")
    assert found.blame([one], None, killed=True) == []
    assert found.blame([one], one, killed=True) == []
    assert found.blame([one], one, killed=True) == [one]


def test_what_is_remembered_is_bounded(clock: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suspects, "MOST", 10)
    found = Suspects()
    for i in range(50):
        found.blame([stream(str(i), prompt=i)], None)
        found.refusal(stream("x").request)
    assert len(found._seen) <= 10
