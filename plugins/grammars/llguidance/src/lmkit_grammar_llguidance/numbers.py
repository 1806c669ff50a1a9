"""Numbers of a schema that llguidance would round: it computes with doubles, which have no whole numbers between
9007199254740992 and 9007199254740994, and fewer further on.

Ids and limits of 64 bits are of this size. A value that is listed is kept exactly or refused. A bound becomes the
nearest double within the range, where that takes less than a millionth of the range away, and is refused elsewhere.
Whole numbers beyond 64 bits with a sign are not written where there are bounds.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from lmkit.api import GrammarError

EXACT = 2**53  # all whole numbers up to here are doubles
_LARGEST = 2**63 - 1024  # a double that the library reads as a whole number
_LOW, _HIGH = ("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")
_MAX_LOSS = 2**-20  # of a range


def with_exact_numbers(schema: Any) -> Any:
    """The schema, as Rewriter makes it, with bounds that are doubles. Raises GrammarError."""
    if not isinstance(schema, Mapping):
        return schema
    made = dict(schema)
    for key in ("const", "enum"):
        if key in made and (value := inexact(made[key])) is not None:
            raise GrammarError(f"{key}: {value} cannot be told from its neighbours, it is beyond 2^53")
    for key in ("properties", "patternProperties", "$defs"):
        if key in made:
            made[key] = {name: with_exact_numbers(part) for name, part in made[key].items()}
    for key in ("allOf", "anyOf", "prefixItems"):
        if key in made:
            made[key] = [with_exact_numbers(part) for part in made[key]]
    for key in ("items", "additionalProperties"):
        if key in made:
            made[key] = with_exact_numbers(made[key])
    return _with_bounds(made) if any(abs(made.get(key, 0)) > EXACT - 1 for key in (*_LOW, *_HIGH)) else made


def inexact(value: Any) -> Any:
    """The first number in a value that no double is; None where there is none."""
    if isinstance(value, list):
        return next((found for item in value if (found := inexact(item)) is not None), None)
    if isinstance(value, dict):
        return inexact([*value.values()])
    if isinstance(value, int) and not isinstance(value, bool) and not _is_double(value):
        return value
    return None


def _is_double(value: float) -> bool:
    try:
        return float(value) == value
    except OverflowError:
        return False


def _with_bounds(schema: dict[str, Any]) -> dict[str, Any]:
    bounds = {key: schema[key] for key in (*_LOW, *_HIGH) if key in schema}
    made = {key: value for key, value in schema.items() if key not in bounds}
    is_whole = "number" not in schema.get("type", ("number",))
    lows, highs = [], []  # (bound, whether it is excluded)
    for key, value in bounds.items():
        is_excluded = key.startswith("exclusive")
        if is_whole and key in _LOW:
            lows.append((math.floor(value) + 1 if is_excluded else math.ceil(value), False))
        elif is_whole:
            highs.append((math.ceil(value) - 1 if is_excluded else math.floor(value), False))
        else:
            (lows if key in _LOW else highs).append((value, is_excluded))
    low = max(lows, default=None)
    high = min(highs, key=lambda bound: (bound[0], not bound[1]), default=None)
    if low and high and low[0] > high[0]:
        raise GrammarError(f"nothing satisfies it: {_said(bounds)}")
    width = high[0] - low[0] if low and high else math.inf
    for bound, side, keys in ((low, 1, _LOW), (high, -1, _HIGH)):
        if bound is None:
            continue
        within = _within(bound[0], side, is_whole)
        too_long = is_whole and abs(bound[0]) > _LARGEST
        if within is None or (not too_long and abs(within - bound[0]) > width * _MAX_LOSS):
            raise GrammarError(f"{_said(bounds)}: numbers beyond 2^53 cannot be told from their neighbours here")
        made[keys[bound[1]]] = within
    if "minimum" in made and "maximum" in made and made["minimum"] > made["maximum"]:
        raise GrammarError(f"{_said(bounds)}: whole numbers beyond 64 bits are not supported")
    return made


def _within(value: float, side: int, is_whole: bool) -> float | None:
    """The nearest double not below `value` (`side` 1) or not above it (-1); None where the library has none."""
    if is_whole and abs(value) > _LARGEST:
        return None if value * side > 0 else -side * _LARGEST
    try:
        nearest = float(value)
    except OverflowError:
        return None
    if (nearest - value if isinstance(value, float) else int(nearest) - value) * side < 0:
        nearest = math.nextafter(nearest, side * math.inf)
    return int(nearest) if nearest.is_integer() else nearest


def _said(bounds: Mapping[str, Any]) -> str:
    return ", ".join(f"{key} {value}" for key, value in bounds.items())
