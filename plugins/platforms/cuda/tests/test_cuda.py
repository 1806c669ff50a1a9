"""The platform object: conformance, which runs whole where there is a GPU, and defaults."""

from __future__ import annotations

import pytest
from lmkit_platform_cuda.platform import CudaPlatform
from lmkit_platform_cuda.probe import describe
from lmkit_testing import PlatformConformance

GIB = 1 << 30


class TestCuda(PlatformConformance):
    plugin = "platform:cuda"


def test_defaults_and_ranks() -> None:
    platform = CudaPlatform()
    assert platform.defaults(None, describe("9.0", 80 * GIB)) == {"sched.max_tokens": 8192}  # type: ignore[arg-type]
    assert platform.defaults(None, describe("7.5", 16 * GIB)) == {"sched.max_tokens": 2048}  # type: ignore[arg-type]
    assert platform.collectives(0, 1).size == 1
    with pytest.raises(ValueError, match="one rank"):
        platform.collectives(0, 2)
