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
    large, small = (platform.defaults(None, describe(*of)) for of in (("9.0", 80 * GIB), ("7.5", 16 * GIB)))  # type: ignore[arg-type]
    assert large == {"sched.max_tokens": 8192, "sched.max_rows": 256, "parallel.depth": 2}
    assert small == {"sched.max_tokens": 2048, "sched.max_rows": 64, "parallel.depth": 2}
    assert platform.collectives(0, 1).size == 1
    assert platform.runtime.collectives == "nccl"
    with pytest.raises(ValueError, match="to find each other"):
        platform.collectives(0, 2)
