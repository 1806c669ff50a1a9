"""The library's names."""

from __future__ import annotations

import subprocess
import sys

import lmkit_decoders
import pytest


def test_names_are_imported_on_first_use() -> None:
    for name in lmkit_decoders.__all__:
        assert getattr(lmkit_decoders, name)
    with pytest.raises(AttributeError, match="no attribute 'Nonsense'"):
        _ = lmkit_decoders.Nonsense


def test_what_describes_a_model_needs_no_torch() -> None:
    """An architecture is described in the parent process, which has not loaded torch."""
    modules = "describe, family, mixers, multimodal, places, reader, weights"
    code = f"import sys; from lmkit_decoders import {modules}; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "False"
