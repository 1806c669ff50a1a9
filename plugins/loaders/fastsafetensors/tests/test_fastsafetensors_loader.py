"""The kit of loaders, with the library itself."""

from __future__ import annotations

import pytest
from lmkit_testing.loaders import LoaderConformance

pytest.importorskip("fastsafetensors")


class TestLoader(LoaderConformance):
    plugin = "loader:fastsafetensors"
