from importlib import import_module

import pytest
import torch
from lmkit.api import CapacityError, Unavailable
from lmkit_platform_npu.hooks import driver, lmkit_benchmarks, probe
from lmkit_platform_npu.platform import Memory
from lmkit_testing import AttentionConformance, LinearConformance, PlatformConformance


class TestPlatform(PlatformConformance):
    plugin = "platform:npu"


class TestAttention(AttentionConformance):
    plugin = "attention:npu"


class TestLinear(LinearConformance):
    plugin = "op:linear_npu"


def test_what_is_measured_runs():
    """`lmkit bench kernels` makes the cases of the hook, runs each and counts its bytes."""
    (benchmark,) = lmkit_benchmarks()
    module, _, name = benchmark.target.partition(":")
    made = list(getattr(import_module(module), name)())
    assert made
    for case in made:
        assert case.bytes > 0
        assert case.run() is not None


def test_memory_is_counted_and_comes_back():
    memory = Memory(100)
    tensor = memory.take((20,), torch.int32)
    with pytest.raises(CapacityError, match="20 are free"):
        memory.take((10,), torch.int32)
    del tensor
    assert memory.used == 0


def test_a_device_that_is_away_says_why(monkeypatch):
    monkeypatch.setenv("LMKIT_NPU", "0")
    assert isinstance(probe(), Unavailable)
    assert "switched off" in driver()
