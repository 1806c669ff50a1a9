"""What the checks of clients share. They run in environments of clients, which have nothing of lmkit."""

from __future__ import annotations

import os
from typing import Any

import pytest


@pytest.fixture(scope="session")
def url() -> str:
    """Where `lmkit serve demo` listens."""
    return os.environ["LMKIT_URL"]


@pytest.fixture(scope="session")
def embed_url() -> str:
    """Where `lmkit serve demo --task embed` listens."""
    return os.environ["LMKIT_EMBED_URL"]


@pytest.fixture
def weather() -> dict[str, Any]:
    """A function that the demo model calls when it is asked for the weather in a city."""
    parameters = {
        "type": "object",
        "properties": {"city": {"type": "string", "description": "the city"}},
        "required": ["city"],
    }
    return {"name": "get_weather", "description": "Get the current weather in a city", "parameters": parameters}
