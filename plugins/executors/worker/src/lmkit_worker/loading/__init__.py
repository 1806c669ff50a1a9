"""Reading the weights of checkpoints and of adapters."""

from __future__ import annotations

from importlib import import_module
from typing import Any

_HOME = {"load_model": "load", "SafetensorsLoader": "safetensors"}

__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    try:
        module = _HOME[name]
    except KeyError:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}") from None
    return getattr(import_module(f"{__name__}.{module}"), name)
