"""Why an implementation was not chosen: data, never a sentence alone."""

from __future__ import annotations

import msgspec


class Refusal(msgspec.Struct, frozen=True):
    """One reason. `needed` and `offered` are short values; `fix` is what the user can do about it.

    `lmkit.plugins.codes` lists the codes of the core. Codes of a plugin's own check carry the plugin's name:
    "flashinfer.cuda-driver".
    """

    code: str
    needed: str
    offered: str
    fix: str = ""

    def __str__(self) -> str:
        text = f"{self.code}: needs {self.needed}, has {self.offered}"
        return f"{text} -> {self.fix}" if self.fix else text


class Refused(msgspec.Struct, frozen=True):
    """A candidate that was asked and refused, with every reason found."""

    kind: str
    name: str
    dist: str | None
    stage: int
    reasons: tuple[Refusal, ...]
