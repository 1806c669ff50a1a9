"""Choosing the tool and reasoning formats of a checkpoint: by what its chat templates say, and by what they show."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from lmkit.api import LmkitError, ParserRequest, ResolvedPlan, Tier
from lmkit.files import content_of, read_object
from lmkit.plugins.host import PluginHost
from lmkit.plugins.refs import load_ref
from lmkit.plugins.select import Outcome, consider

_READBACK = "lmkit.text.readback:Readback.of"  # of a higher layer, and imported only where there is a template


class ParserChooser:
    """What `auto` takes is confirmed by rendering an example with the template and reading it back."""

    def __init__(
        self, host: PluginHost, plan: ResolvedPlan, templates: Mapping[str, str], path: Path, *, imports: bool = False
    ) -> None:
        """`plan`: as far as what renders."""
        self._host, self._plan, self._imports = host, plan, imports
        self.templates, self._path = templates, path
        self._readback: Any = None

    def choose(self, request: ParserRequest) -> Outcome:
        outcome = consider(self._host, request, imports=self._imports)
        readers = self._readers(request.kind, outcome)
        chosen = outcome.chosen.name if outcome.chosen else None
        if readers is None or readers == (chosen,):
            return outcome
        return consider(self._host, replace(request, readers=readers), imports=self._imports)

    def _readers(self, kind: str, outcome: Outcome) -> tuple[str, ...] | None:
        if not self.templates:
            return None
        if self._readback is None:
            self._readback = load_ref(_READBACK)(self._plan, self.templates, special_tokens(self._path))
        able = {c.name for c in outcome.candidates if all(r.code == "model" for r in c.reasons)}
        names = [name for name in self._host.names(kind) if name in able]
        found = self._readback.readers(kind, outcome.chosen and outcome.chosen.name, names, self._load(kind))
        if found is None:
            return None
        shared = [n for n in found if self._host.load(kind, n).tier == Tier.REFERENCE]
        return (*shared, *(n for n in found if n not in shared))

    def _load(self, kind: str) -> Any:
        def load(name: str) -> Any:
            target = load_ref(self._host.load(kind, name).target)
            return target() if isinstance(target, type) else target

        return load


def special_tokens(path: Path) -> dict[str, str]:
    """Those that chat templates name: "bos_token" -> "<s>". {} where they cannot be read."""
    try:
        config = read_object(path / "tokenizer_config.json")
    except LmkitError:
        return {}
    return {key: text for key, value in config.items() if key.endswith("_token") and (text := content_of(value))}
