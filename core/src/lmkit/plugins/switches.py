"""Which plugins may be used: decided on the entry-point table, before anything is imported."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Protocol

from lmkit.config.environment import is_on
from lmkit.plugins.entry import Entry


class Named(Protocol):
    """What a pattern looks at: an entry point, as "kind:name", or a command, and its dist."""

    @property
    def key(self) -> str: ...
    @property
    def dist(self) -> str: ...


@dataclass(frozen=True, slots=True)
class Pattern:
    """`kind:name`, a dist name, or a glob of either; `source` says who set it."""

    text: str
    source: str

    def matches(self, entry: Named) -> bool:
        return fnmatchcase(entry.key, self.text) or fnmatchcase(entry.dist, self.text)


@dataclass(frozen=True, slots=True)
class Switches:
    """`disable` turns entries off; `only` allows, within each kind it names, nothing else."""

    disable: tuple[Pattern, ...] = ()
    only: tuple[Pattern, ...] = ()
    official_only: bool = False  # --no-plugins: the dists of the catalog
    strict: bool = False  # LMKIT_STRICT_PLUGINS: raise instead of recording a state

    @classmethod
    def build(
        cls,
        environ: Mapping[str, str],
        *,
        disable: Iterable[str] = (),
        only: Iterable[str] = (),
        official_only: bool = False,
    ) -> Switches:
        """From environment variables, and from `lmkit.toml [plugins]` or flags, whose patterns are added to them."""

        def patterns(variable: str, more: Iterable[str], key: str) -> tuple[Pattern, ...]:
            named = [Pattern(p, variable) for p in environ.get(variable, "").replace(",", " ").split()]
            return (*named, *(Pattern(p, key) for p in more))

        return cls(
            disable=patterns("LMKIT_PLUGINS_DISABLE", disable, "plugins.disable"),
            only=patterns("LMKIT_PLUGINS_ONLY", only, "plugins.only"),
            official_only=official_only,
            strict=is_on("LMKIT_STRICT_PLUGINS", environ),
        )

    def unmatched(self, entries: Sequence[Entry]) -> tuple[list[Pattern], list[Pattern]]:
        """Patterns of `disable` and of `only` that match no entry."""
        return tuple([p for p in ps if not any(map(p.matches, entries))] for ps in (self.disable, self.only))  # type: ignore[return-value]

    def off(self, entries: Sequence[Entry]) -> dict[int, str]:
        """Index of each entry that is switched off -> what did it."""
        result: dict[int, str] = {}
        for pattern in self.only:
            kinds = {e.kind for e in entries if pattern.matches(e)}
            for i, entry in enumerate(entries):
                if entry.kind in kinds and not any(p.matches(entry) for p in self.only):
                    result[i] = pattern.source
        for i, entry in enumerate(entries):
            if self.official_only and not entry.official:
                result[i] = "--no-plugins"
            for pattern in self.disable:
                if pattern.matches(entry):
                    result[i] = pattern.source
        return result
