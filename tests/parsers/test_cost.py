"""A token costs little in every format, alone and in deltas of a hundred."""

from __future__ import annotations

import pytest
from lmkit.plugins.host import PluginHost
from lmkit.plugins.switches import Switches
from lmkit_bench.parsers import measure_parsers

SECONDS = 20e-6


@pytest.mark.full
def test_microseconds_per_token() -> None:
    measured = list(measure_parsers(PluginHost(switches=Switches()), rounds=3))
    assert measured
    slow = {m.name: m.seconds for m in measured if any(min(s) > SECONDS for s in m.seconds.values())}
    assert not slow
