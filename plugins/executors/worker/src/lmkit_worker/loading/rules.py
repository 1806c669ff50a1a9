"""Matching checkpoint tensors with WeightRules. Torch-free."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from lmkit.api import PluginError, WeightRule

PLACEHOLDERS = {"p": "[A-Za-z_][A-Za-z0-9_]*", "any": ".+"}
HEAD = "lm_head."  # begins targets of a decoder's language-model head
_PLACEHOLDER = re.compile(r"\{(\w+)\}")


def compile_pattern(pattern: str) -> re.Pattern[str]:
    """ "a.{i}.b.{p}": {p} is the tensor's own name (letters, digits, _), {any} any text, other placeholders numbers."""
    parts = _PLACEHOLDER.split(pattern)  # text, name, text, name, ..., text
    regex = [re.escape(parts[0])]
    for name, text in zip(parts[1::2], parts[2::2], strict=True):
        regex.append(f"(?P<{name}>{PLACEHOLDERS.get(name, '[0-9]+')})")
        regex.append(re.escape(text))
    return re.compile("".join(regex))


@dataclass(frozen=True, slots=True)
class Match:
    """Where one checkpoint tensor goes."""

    rule: WeightRule
    target: str  # parameter name in the model; of one that is ignored, where it would go
    part: str | int | None = None


class Rules:
    """A table of rules, compiled once. The first rule that matches a name wins."""

    def __init__(self, rules: Sequence[WeightRule]) -> None:
        self._rules = [(compile_pattern(r.source), r) for r in rules]
        self._prefix = _prefix(rules)
        self._targets = [(compile_pattern(r.target), r) for r in rules if not r.ignore]
        for regex, rule in self._rules:
            unknown = set(_PLACEHOLDER.findall(rule.target)) - set(regex.groupindex)
            if unknown:
                raise PluginError(
                    f"weight rule {rule.source!r}: its target uses {sorted(unknown)}, which it does not bind"
                )

    def match(self, name: str) -> Match | None:
        """The rule and target of a tensor; None: no rule is for it, under this name or one of `_names`."""
        return next((match for known in self._names(name) if (match := self._match(known)) is not None), None)

    def named(self, name: str) -> str:
        """The name by which a rule knows the tensor, or its own."""
        return next((known for known in self._names(name) if self._match(known) is not None), name)

    def _names(self, name: str) -> Iterator[str]:
        """The names that transformers takes too: without the base model's prefix, and with it twice or on the head."""
        yield name
        if self._prefix and name.startswith(self._prefix):
            yield name.removeprefix(self._prefix)
        elif self._prefix:
            yield self._prefix + name

    def _match(self, name: str) -> Match | None:
        for regex, rule in self._rules:
            if m := regex.fullmatch(name):
                names = m.groupdict()
                part = rule.part.format(**names) if isinstance(rule.part, str) else rule.part
                return Match(rule, rule.target.format(**names), part)
        return None

    def sources(self, target: str, part: str | int | None) -> list[tuple[str, WeightRule]]:
        """Checkpoint names that could fill `part` of the parameter `target`, for messages."""
        found = []
        for regex, rule in self._targets:
            of_target, of_part = regex.fullmatch(target), _part_numbers(rule, part)
            if of_target is None or of_part is None:
                continue
            names = {**of_target.groupdict(), **of_part}
            if set(_PLACEHOLDER.findall(rule.source)) <= set(names):
                found.append((rule.source.format(**names), rule))
        return found


def _prefix(rules: Sequence[WeightRule]) -> str:
    """The prefix of all names but those of the head ("model."); "" where there is none."""
    body = [rule.source for rule in rules if not rule.ignore and not rule.target.startswith(HEAD)]
    begins = {source.partition(".")[0] if "." in source else "" for source in body}
    begin = begins.pop() if len(begins) == 1 else ""
    return f"{begin}." if begin and "{" not in begin else ""


def _part_numbers(rule: WeightRule, part: str | int | None) -> dict[str, str] | None:
    """The numbers with which `rule` fills `part`; None: it does not."""
    if rule.part in (part, "*"):
        return {}
    if not isinstance(rule.part, str) or not isinstance(part, str):
        return None
    if rule.part.startswith("*."):
        return {} if part.endswith(rule.part[1:]) else None
    match = compile_pattern(rule.part).fullmatch(part)
    return match.groupdict() if match else None
