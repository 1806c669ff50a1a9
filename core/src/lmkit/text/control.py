"""Control tokens that a client spells in its text stay text.

A rendered prompt is one string, in which `<|im_end|>` of the template and `<|im_end|>` typed by a user look the same.
So before rendering a MARK is put behind the first character of every control token in a request's texts. The template
carries it along, and tokenizing (JsonTokenizer.encode_marked) takes it out again, after the tokenizer had its chance
to find control tokens. What a template compares is the marked text; only texts with control tokens are concerned.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Any

MARK = "\ufdd0"  # a noncharacter: no text needs it


def marker(control_tokens: Iterable[str]) -> Callable[[Any], Any]:
    """A function that marks every text in a JSON value, keys included."""
    names = sorted((t for t in control_tokens if len(t) > 1), key=len, reverse=True)
    if not names:
        return lambda value: value
    pattern = re.compile("|".join(map(re.escape, names)))

    def mark(value: Any) -> Any:
        if isinstance(value, str):
            while pattern.search(value):  # again where one overlaps another
                value = pattern.sub(lambda found: found[0][0] + MARK + found[0][1:], value)
            return value
        if isinstance(value, dict):
            return {mark(k): mark(v) for k, v in value.items()}
        return [mark(v) for v in value] if isinstance(value, list) else value

    return mark


def shown(text: str) -> str:
    """A marked text as people should see it."""
    return text.replace(MARK, "")
