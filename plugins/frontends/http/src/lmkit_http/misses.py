"""Why a prompt was not found in the prefix cache, or not further: it is compared with those before it."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec
import numpy as np

from lmkit_http.history import Life


class Cache(msgspec.Struct, omit_defaults=True):
    """How much of a prompt was found, and why not more. `reason` is a word for programs, `text` a sentence."""

    cached_tokens: int
    reason: str
    text: str
    position: int | None = None  # where the prompt parts from the one that it resembles most
    other: str | None = None  # the engine's request that it was compared with


def cache_of(life: Life, earlier: Iterable[Life], block_size: int, enabled: bool = True) -> Cache:
    """`earlier`: those that were asked before it, and that whoever is told may know of.

    What it says follows from the prompts that are remembered: nothing is asked of the engine.
    """
    found, num = life.usage.cached_tokens, len(life.prompt)
    size = max(1, block_size)
    whole = (num - 1) // size * size  # one token at least is computed, and blocks are found whole
    if not enabled:
        return Cache(found, "off", "the prefix cache is off")
    if not life.searched:
        return Cache(found, "not-searched", "prompt_logprobs and vectors need every position computed")
    if life.usage.started is None and not life.first:
        return Cache(found, "not-started", "it has computed nothing yet")
    if found >= whole:
        if not whole:
            return Cache(found, "short", f"the prompt fills no block of {size} tokens before its last token")
        return Cache(found, "all", "all whole blocks before the last token were found")
    earlier = list(earlier)
    same, here = _most_alike(life, (o for o in earlier if (o.adapter, o.salt) == (life.adapter, life.salt)))
    other, there = _most_alike(life, (o for o in earlier if (o.adapter, o.salt) != (life.adapter, life.salt)))
    if same is not None and here // size * size > found:
        if not same.first or same.first > life.began:
            text = f"request {same.id} begins with the same {here} tokens, but had not computed them yet"
            return Cache(found, "not-yet", text, here, same.id)
        gone = "but they are gone: its blocks were reused, or its engine was replaced"
        text = f"request {same.id} computed the same {here} tokens, {gone}"
        return Cache(found, "evicted", text, here, same.id)
    if other is not None and there // size * size > found:
        apart = "adapter" if other.adapter != life.adapter else "tenant or cache_salt"
        text = f"request {other.id} begins with the same {there} tokens, but for another {apart}"
        return Cache(found, f"other-{apart.split(' ')[0]}", text, there, other.id)
    if same is not None and here:
        text = f"it parts from request {same.id}, the most alike of those remembered, at position {here}"
        return Cache(found, "diverges", text, here, same.id)
    return Cache(found, "never-seen", "no request that is remembered begins like it")


def _most_alike(life: Life, others: Iterable[Life]) -> tuple[Life | None, int]:
    """The one with the longest common beginning, and how many tokens that has."""
    best, most = None, 0
    mine = np.frombuffer(life.prompt, np.uint32)
    for other in others:
        its = np.frombuffer(other.prompt, np.uint32)
        end = min(len(mine), len(its))
        if end <= most or (most and its[most] != mine[most]):  # it cannot be longer
            continue
        differ = mine[:end] != its[:end]
        num = int(differ.argmax()) if differ.any() else end
        if num > most:
            best, most = other, num
    return best, most


__all__ = ["Cache", "cache_of"]
