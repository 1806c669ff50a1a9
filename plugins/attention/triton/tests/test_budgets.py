"""The kernels compiled for GPUs that are not here: registers, spills, shared memory, blocks, opcodes."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("triton", reason="triton is not installed")

from lmkit_testing.triton_budget import within_budget


@pytest.mark.slow
def test_within_budget() -> None:
    within_budget(Path(__file__).parent)
