"""What tool parsers and reasoning parsers share: how `auto` finds the format that a checkpoint's model writes."""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase

from lmkit.contracts.refusal import Refusal
from lmkit.contracts.specs import SelectRequest, Spec, Tier
from lmkit.kinds.base import Claim, Known, Refusals, listed


@dataclass(frozen=True, slots=True, kw_only=True)
class ParserSpec(Spec):
    """What both kinds of parsers register."""

    models: tuple[str, ...] = ()  # globs matched against architecture and model name
    markers: tuple[str, ...] = ()  # texts in a chat template that give the format away


@dataclass(frozen=True, slots=True, kw_only=True)
class ParserRequest(SelectRequest):
    """kind is "tool_parser" or "reasoning_parser"; `auto` matches globs and template markers."""

    model: str
    architecture: str
    chat_template: str = ""
    readers: tuple[str, ...] | None = None  # parsers that read what the template shows; None: it shows nothing

    def facts(self) -> dict[str, object]:
        return {"architecture": self.architecture}


def ask(kind: str, known: Known) -> list[ParserRequest]:
    model, architecture = known.checkpoint.name, known.checkpoint.architecture
    template = "\n".join(known.templates.values())
    return [ParserRequest(kind=kind, model=model, architecture=architecture, chat_template=template)]


def claim(spec: ParserSpec, request: ParserRequest) -> Claim | None:
    """A template says what its model writes, so markers in it come before the name of an architecture.

    Rank 0: both; 1: a marker; 2: the architecture or name; 3: a marker of a format that many families share (tier
    REFERENCE); 4: the architecture, although the parser's markers are missing in the template; from 5 on: it reads
    what the template shows of a call or of reasoning. A parser that does not read that has no claim.
    """
    marker = max((m for m in spec.markers if m in request.chat_template), key=len, default="")
    names = (request.architecture, request.model)
    named = [(s, len(glob)) for s in names for glob in spec.models if fnmatchcase(s, glob)]
    length = max((size for _, size in named), default=0)
    readers = request.readers
    if readers is not None and spec.name not in readers:
        return None
    if marker:
        rank = 0 if named else 3 if spec.tier == Tier.REFERENCE else 1
        return Claim(rank, f"auto: the chat template has {marker!r}", length)
    if named:
        return Claim(4 if spec.markers and request.chat_template else 2, f"auto: the model is {named[0][0]}", length)
    return Claim(5 + readers.index(spec.name), "auto: it reads what the chat template shows") if readers else None


def auto_refusals(spec: ParserSpec, request: ParserRequest) -> Refusals:
    """For `auto` only: a parser named by the user is used for any model."""
    fix = f"name {spec.name} to use it anyway"
    if request.readers is not None and spec.name not in request.readers:
        what = "calls" if request.kind == "tool_parser" else "reasoning"
        needed = f"one that reads the {what} of the chat template, as {request.readers[0]}"
        yield Refusal("template", needed, spec.name, fix)
    elif claim(spec, request) is None:
        claims = listed((*spec.models, *spec.markers))
        yield Refusal("model", claims, f"{request.model} ({request.architecture})", fix)
