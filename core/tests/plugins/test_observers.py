"""Observer hooks see engines and requests through a real client; tokenizers and templates come from plugins."""

from __future__ import annotations

from types import ModuleType

import pytest
from lmkit.api import EngineRequest, SamplingParams, TokenEvent, hookimpl
from lmkit.engine.messages import EngineFacts
from lmkit.engine.observers import Observers
from lmkit.hookspecs import EngineInfo, RequestStats
from lmkit_testing.host import OpenHost
from lmkit_testing.serving import no_plan


@pytest.fixture
def seen(lmkit_host: OpenHost) -> list[object]:
    """What a plugin in `lmkit_host` was told."""
    told: list[object] = []
    module = ModuleType("watcher")

    @hookimpl
    def lmkit_engine_started(info: EngineInfo) -> None:
        told.append(info.model)

    @hookimpl
    def lmkit_request_finished(stats: RequestStats) -> None:
        told.append(stats)

    @hookimpl
    def lmkit_engine_stopping(info: EngineInfo) -> None:
        raise RuntimeError("a plugin's problem, not the engine's")

    for hook in (lmkit_engine_started, lmkit_request_finished, lmkit_engine_stopping):
        setattr(module, hook.__name__, hook)
    lmkit_host.add(module)
    return told


def test_a_request_is_reported_once(lmkit_host: OpenHost, seen: list[object]) -> None:
    observers = Observers(lmkit_host, no_plan(), EngineFacts("toy", 10, 100, 5))
    observers.started()
    watch = observers.watch(EngineRequest("r1", [1, 2, 3], SamplingParams(max_tokens=4)))
    assert watch is not None
    watch.see(TokenEvent("r1", [7], num_cached=2))
    watch.see(TokenEvent("r1", [8, 9], finish="length"))
    observers.stopping()
    model, stats = seen
    assert model == "toy"
    assert isinstance(stats, RequestStats)
    assert (stats.id, stats.finish, stats.num_prompt_tokens, stats.num_cached_tokens, stats.num_output_tokens) == (
        "r1", "length", 3, 2, 3,
    )  # fmt: skip
    assert stats.first_token is not None
    assert 0 <= stats.first_token <= stats.total


def test_an_extension_added_late_takes_part(lmkit_host: OpenHost) -> None:
    assert not lmkit_host.implements("lmkit_engine_started")
    module = ModuleType("late")
    module.lmkit_engine_started = hookimpl(lambda info: None, specname="lmkit_engine_started")  # type: ignore[attr-defined]
    lmkit_host.add(module)
    assert lmkit_host.implements("lmkit_engine_started")


def test_nobody_watches_when_nobody_wants_to_know(lmkit_host: OpenHost) -> None:
    observers = Observers(lmkit_host, no_plan(), EngineFacts("toy", 10, 100, 5))
    assert observers.watch(EngineRequest("r1", [1], SamplingParams(max_tokens=4))) is None
