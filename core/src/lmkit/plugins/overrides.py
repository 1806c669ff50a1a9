"""Values of the user laid over a checkpoint's config.json."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from lmkit.api import ConfigError

MAX_CHARACTERS = 1 << 16


def parse_overrides(text: str) -> Mapping[str, Any]:
    """A JSON object. Raises ConfigError."""
    try:
        value = json.loads(text) if len(text) <= MAX_CHARACTERS else None
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise ConfigError(
            f"--hf-overrides: {text!r:.80} is not a JSON object", fix="""for example '{"sliding_window": null}'"""
        )
    return value


def overlay(config: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """`config` with `changes`: objects are merged, null removes a key, everything else replaces."""
    result = dict(config)
    for key, value in changes.items():
        if value is None:
            result.pop(key, None)
        elif isinstance(value, Mapping) and isinstance(result.get(key), Mapping):
            result[key] = overlay(result[key], value)
        else:
            result[key] = value
    return result
