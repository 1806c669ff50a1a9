"""The platform: buffers, events, graphs, memory."""

from __future__ import annotations

from conformance import ELSEWHERE, tested
from lmkit_testing import PlatformConformance

TestPlatform = type(
    "TestPlatform",
    (PlatformConformance,),
    {**ELSEWHERE, "__module__": __name__, "plugin": f"platform:{tested().platform}"},
)
