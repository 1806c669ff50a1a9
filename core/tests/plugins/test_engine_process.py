"""The engine process takes plugins from the plan: it never looks for any, and none that was switched off gets in."""

from __future__ import annotations

import importlib.metadata
import sys
import time
from types import ModuleType

import pytest
import torch  # noqa: F401 - it looks for plugins of its own when it is imported
from lmkit.api import EngineRequest, Grammar, SamplingParams, TokenizerSpec, hookimpl
from lmkit.config import from_options
from lmkit.engine.build import build_engine
from lmkit.plugins.host import PluginHost
from lmkit.plugins.resolve import resolve
from lmkit.plugins.switches import Switches
from lmkit.text.side import TextSide, load_tokenizer
from lmkit_testing.host import OpenHost
from lmkit_tokenizer_json.apart import open_tokenizer

SMALL = {"model": "demo", "kv_memory": "8MiB", "max_length": 256}


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
    """A module that reads the tokenizer better than the core does, and counts."""
    module = ModuleType("test_supplier")
    module.calls = 0

    def opened(folder, *, eos_token_ids=()):
        module.calls += 1
        return open_tokenizer(folder, eos_token_ids=eos_token_ids)

    @hookimpl
    def lmkit_tokenizers():
        target = f"{module.__name__}:opened"
        return [TokenizerSpec(name="better", summary="Better", target=target, files=("tokenizer.json",))]

    module.opened, module.lmkit_tokenizers = opened, lmkit_tokenizers
    module.__spec__ = importlib.machinery.ModuleSpec(module.__name__, None)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return module


def no_discovery(monkeypatch) -> None:
    """From here on, whoever makes a host or asks what is installed fails."""

    def discovery(*_, **__):
        raise AssertionError("the engine looks for plugins")

    monkeypatch.setattr(importlib.metadata, "distributions", discovery)
    monkeypatch.setattr(PluginHost, "__init__", discovery)


def test_a_constrained_request_makes_the_engine_look_for_no_plugins(monkeypatch):
    config = from_options(SMALL)
    resolved, checkpoint, _ = resolve(config, PluginHost())
    assert resolved.choice("tokenizer").name == "json"
    no_discovery(monkeypatch)
    engine = build_engine(config, resolved, checkpoint)
    try:
        assert constrained_answer(engine)
    finally:
        engine.close()


def test_what_is_switched_off_for_a_host_stays_off_in_the_engine(monkeypatch, supplier):
    """The engine reads the tokenizer with what the plan names: the better one where it is on, else the core's."""
    for disabled, name in (((), "better"), (("tokenizer:better",), "json")):
        switches = Switches.build({"LMKIT_PLUGINS_DISABLE": ",".join(disabled)})
        host = OpenHost(switches=switches)
        host.add(supplier) if not disabled else None
        config, before = from_options(SMALL), supplier.calls
        resolved, checkpoint, _ = resolve(config, host)
        assert resolved.choice("tokenizer").name == name
        with monkeypatch.context() as patch:
            no_discovery(patch)
            load_tokenizer(checkpoint, resolved, config)
            TextSide.open(checkpoint, resolved, config)
        assert supplier.calls - before == (0 if disabled else 2)
