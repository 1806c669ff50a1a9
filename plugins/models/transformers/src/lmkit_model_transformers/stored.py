"""Where checkpoints store the parameters of a model of transformers: the library's own conversions, undone.

Experts are parameters of one module in its code and single matrices in most checkpoints.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import PrefixChange, revert_weight_conversion

NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)|^\d+(?=\.)")
LETTERS = "abcdefgh"  # placeholders for the numbers of a name, in order


@dataclass(frozen=True, slots=True)
class Stored:
    """`rules`: name in the checkpoint, name in TransformersModel, part of it, with placeholders as in WeightRule.
    `parts`: parameter of TransformersModel -> its parts in the order in which they lie in memory."""

    rules: tuple[tuple[str, str, str | None], ...]
    parts: tuple[tuple[str, tuple[str, ...]], ...]


def stored_weights(whole: Any, prefix: str) -> Stored:
    """Raises ValueError when a conversion is more than a new name or a division into equal rows."""
    changes = [c for c in get_model_conversion_mapping(whole, add_legacy=False) if not isinstance(c, PrefixChange)]
    whole._weight_conversions = changes
    rules: dict[tuple[str, str, str | None], None] = {}  # a set in order
    parts: dict[str, tuple[str, ...]] = {}
    taken: set[str] = set()
    for name, parameter in whole.named_parameters():
        target = f"body.{name.removeprefix(f'{prefix}.')}" if name.startswith(f"{prefix}.") else f"whole.{name}"
        sources = _pieces(whole, name, parameter) if changes else [name]
        if not taken.isdisjoint(sources):
            raise ValueError(f"{name} shares {sources[0]} with others")
        taken.update(sources)
        if len(sources) == 1:
            rules[_rule(sources[0], target, None)] = None
            continue
        each = len(sources) // len(parameter)  # pieces of one expert
        names = [f"{i // each}.{i % each}" for i in range(len(sources))]
        parts[target] = tuple(names)
        for source, part in zip(sources, names, strict=True):
            rules[_rule(source, target, part)] = None
    return Stored(tuple(rules), tuple(parts.items()))


def _pieces(whole: Any, name: str, parameter: Tensor) -> list[str]:
    """The tensors that together are one parameter, in the order of its rows."""
    stored: dict[str, Tensor] = revert_weight_conversion(whole, {name: parameter.data.to("meta")})
    if len(stored) == 1:
        ((source, tensor),) = stored.items()
        if tensor.shape != parameter.shape:
            raise ValueError(f"{source} is stored with another shape")
        return [source]
    stack = (len(parameter), 2, 1)  # the rows of each piece shrunk to one, numbered
    numbers = torch.arange(2.0 * len(parameter), device="cpu").view(stack)
    stored = revert_weight_conversion(whole, {name: numbers})
    order: Sequence[str] = sorted(stored, key=lambda source: float(stored[source].flatten()[0]))
    together = torch.cat([stored[source].flatten() for source in order])
    if parameter.dim() != 3 or not torch.equal(together, numbers.flatten()):
        raise ValueError(f"{name} is stored in another order of rows")
    return list(order)


def _rule(source: str, target: str, part: str | None) -> tuple[str, str, str | None]:
    """One rule for all layers and experts, where the numbers of the names agree."""
    numbers = NUMBER.findall(target)
    if part is None:
        return (
            (_template(source), _template(target), None)
            if NUMBER.findall(source) == numbers
            else (source, target, None)
        )
    expert, _, piece = part.partition(".")
    if NUMBER.findall(source) != [*numbers, expert]:
        return source, target, part
    return _template(source), _template(target), f"{{{LETTERS[len(numbers)]}}}.{piece}"


def _template(name: str) -> str:
    letters = iter(LETTERS)
    return NUMBER.sub(lambda _: f"{{{next(letters)}}}", name)
