"""The kernels compiled for GPUs that are not here: registers, spills, shared memory, blocks, opcodes."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("triton", reason="triton is not installed")

from lmkit_testing.triton_budget import SHARED, within_budget


@pytest.mark.slow
@pytest.mark.parametrize("arch", SHARED)
def test_within_budget(arch: str) -> None:
    within_budget(Path(__file__).parent, [arch])
