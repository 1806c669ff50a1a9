"""The engine process takes plugins from the plan: it never looks for any, and none that was switched off gets in."""

from __future__ import annotations

import importlib.metadata
import sys
import time
from types import ModuleType

import pytest
from lmkit.api import EngineRequest, Grammar, PluginError, SamplingParams, hookimpl
from lmkit.config import from_options
from lmkit.engine.build import build_engine
from lmkit.plugins.host import PluginHost
from lmkit.plugins.resolve import TOKENIZER_PLUGINS, resolve
from lmkit.plugins.switches import Switches
from lmkit.text.side import load_tokenizer


def constrained_answer(engine) -> list[int]:
    """Of the first constrained request, which needs the vocabulary."""
    params = SamplingParams(grammar=Grammar("choice", '["a"]'), max_tokens=4, temperature=0.0)
    engine.core.add(EngineRequest("r", [1, 2, 3], params))
    tokens, end = [], time.monotonic() + 120
    while engine.core.has_work() and time.monotonic() < end:
        for event in engine.core.step():
            assert event.error is None, event.error
            tokens += event.tokens
        time.sleep(0.001)
    return tokens


@pytest.fixture
def supplier(monkeypatch):
    """A module that supplies the tokenizer, and counts."""
    module = ModuleType("test_supplier")
    module.calls = 0

    @hookimpl
    def lmkit_load_tokenizer(checkpoint):
        module.calls += 1
        return load_tokenizer(checkpoint, resolve(from_options({"model": "demo"}), PluginHost())[0], from_options({}))

    module.lmkit_load_tokenizer = lmkit_load_tokenizer
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return module


def test_a_constrained_request_makes_the_engine_look_for_no_plugins(monkeypatch):
    config = from_options({"model": "demo", "kv_memory": "8MiB", "max_length": 256})
    resolved, checkpoint, _ = resolve(config, PluginHost())

    def discovery(*_, **__):
        raise AssertionError("the engine looks for plugins")

    monkeypatch.setattr(importlib.metadata, "distributions", discovery)
    monkeypatch.setattr(PluginHost, "scan", discovery)
    monkeypatch.setattr(PluginHost, "load_extensions", lambda self: self._extensions_loaded or discovery())
    engine = build_engine(config, resolved, checkpoint)
    try:
        assert constrained_answer(engine)
    finally:
        engine.close()


def test_the_plan_names_who_may_bring_the_tokenizer(supplier):
    config = from_options({"model": "demo"})
    host = PluginHost(switches=Switches())
    host.add(supplier)
    plan, checkpoint, _ = resolve(config, host)
    assert supplier.__name__ in plan.value(TOKENIZER_PLUGINS)
    before = supplier.calls
    assert load_tokenizer(checkpoint, plan, config, PluginHost.of([supplier.__name__])) is not None
    assert supplier.calls == before + 1
    without, _, _ = resolve(config, PluginHost(switches=Switches()))
    assert supplier.__name__ not in (without.value(TOKENIZER_PLUGINS) or ())


def test_a_named_module_that_is_gone_is_a_typed_error():
    with pytest.raises(PluginError, match="nowhere_at_all"):
        PluginHost.of(["nowhere_at_all"])
