"""Matching checkpoint tensors with WeightRules. Torch-free."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from lmkit.api import PluginError, WeightRule

_PLACEHOLDER = re.compile(r"\{(\w+)\}")


def compile_pattern(pattern: str) -> re.Pattern[str]:
    """ "a.{i}.b.{p}": {p} is the tensor's own name (letters, digits, _), any other placeholder a number."""
    parts = _PLACEHOLDER.split(pattern)  # text, name, text, name, ..., text
    regex = [re.escape(parts[0])]
    for name, text in zip(parts[1::2], parts[2::2], strict=True):
        regex.append(f"(?P<{name}>{r'[A-Za-z_][A-Za-z0-9_]*' if name == 'p' else r'[0-9]+'})")
        regex.append(re.escape(text))
    return re.compile("".join(regex))


@dataclass(frozen=True, slots=True)
class Match:
    """Where one checkpoint tensor goes."""

    rule: WeightRule
    target: str  # parameter name in the model; "" when ignored


class Rules:
    """A table of rules, compiled once. The first rule that matches a name wins."""

    def __init__(self, rules: Sequence[WeightRule]) -> None:
        self._rules = [(compile_pattern(r.source), r) for r in rules]
        self._targets = [(compile_pattern(r.target), r) for r in rules if not r.ignore]
        for regex, rule in self._rules:
            unknown = set(_PLACEHOLDER.findall(rule.target)) - set(regex.groupindex)
            if unknown:
                raise PluginError(
                    f"weight rule {rule.source!r}: its target uses {sorted(unknown)}, which it does not bind"
                )

    def match(self, name: str) -> Match | None:
        for regex, rule in self._rules:
            if m := regex.fullmatch(name):
                return Match(rule, "" if rule.ignore else rule.target.format(**m.groupdict()))
        return None

    def sources(self, target: str, part: str | int | None) -> list[tuple[str, WeightRule]]:
        """Checkpoint names that could fill `part` of the parameter `target`, for messages."""
        found = []
        for regex, rule in self._targets:
            m = regex.fullmatch(target)
            if m and rule.part == part and set(_PLACEHOLDER.findall(rule.source)) <= set(m.groupdict()):
                found.append((rule.source.format(**m.groupdict()), rule))
        return found
