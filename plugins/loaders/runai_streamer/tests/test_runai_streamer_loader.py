"""The kit of loaders, with the library itself."""

from __future__ import annotations

import pytest
from lmkit_testing.loaders import LoaderConformance

pytest.importorskip("runai_model_streamer")


class TestLoader(LoaderConformance):
    plugin = "loader:runai_streamer"
