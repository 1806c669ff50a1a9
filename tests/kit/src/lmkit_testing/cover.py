"""Which configurations of models stand for all others in a quick run: a few that together have whatever any declares.

What a configuration declares is what `describe` says of it: its values (of numbers only whether they are 0, 1 or
something else), what its layers ask of attention, and the state they keep. Names of tensors do not count.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from typing import Any

from lmkit.api import ModelInfo

NAMES = ("names", "sources", "parts", "name", "text", "linears")  # keys of values that are names of tensors

Trait = tuple[Hashable, ...]


def traits(info: ModelInfo) -> frozenset[Trait]:
    """What a configuration declares, as values that other configurations may have too."""
    found = set(_flat("config", info.config))
    for need, _ in info.kv_groups():
        found.update(_flat("attention", dataclasses.asdict(need)))
    found.update(("state", tensor.name, tensor.dtype) for layer in info.layers for tensor in layer.state)
    return frozenset(found)


def _flat(path: str, value: object) -> Iterator[Trait]:
    if isinstance(value, Mapping):
        for key, entry in value.items():
            if key not in NAMES:
                yield from _flat(f"{path}.{key}", entry)
    elif isinstance(value, (list, tuple)):
        yield path, "entries", len(set(map(repr, value))) > 1
        for entry in value:
            yield from _flat(f"{path}[]", entry)
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        yield path, "number", value > 0, value == 1
    else:
        yield path, value if isinstance(value, (str, bool, type(None))) else repr(value)


def covering(declared: Mapping[Any, Collection[Trait]]) -> Sequence[Any]:
    """A few keys that have every trait that any has: always the next with most that are missing, by order of keys."""
    missing = set[Trait]().union(*declared.values())
    chosen = []
    while missing:
        best = max(sorted(declared), key=lambda key: len(missing.intersection(declared[key])))
        missing.difference_update(declared[best])
        chosen.append(best)
    return chosen
