"""Choosing one implementation: parse what the user wrote, take every candidate through the stages, keep every reason.

An explicit name is used or refused, never replaced. `a,b` is the only way to ask for a fallback. `auto` considers all.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from lmkit.api import (
    Choice,
    ConfigError,
    PluginError,
    Ref,
    Refusal,
    Refused,
    SelectionError,
    SelectRequest,
    Spec,
    Tier,
    nearest,
)
from lmkit.contracts.errors import is_interrupt, said_by
from lmkit.kinds import BY_NAME
from lmkit.plugins.catalog import catalog, install
from lmkit.plugins.codes import CODES
from lmkit.plugins.host import Entry, PluginHost
from lmkit.plugins.options import options_type
from lmkit.plugins.refs import ask, load_ref, missing_module
from lmkit.plugins.stages import claim_of, data_refusals

ITEM = re.compile(r"^(?:(?P<dist>[A-Za-z0-9][\w.-]*)/)?(?P<name>\w[\w-]*)$")


@dataclass(frozen=True, slots=True)
class Wanted:
    """One item of the user's selection; `name` "auto" means no wish."""

    name: str
    dist: str | None = None

    def __str__(self) -> str:
        return f"{self.dist}/{self.name}" if self.dist else self.name


def parse_selection(text: str) -> tuple[Wanted, ...]:
    """`auto` (which is ()), `a`, `a,b`, `dist/a`. Raises ConfigError."""
    items = []
    for part in text.split(","):
        match = ITEM.match(part.strip())
        if match is None:
            raise ConfigError(
                f"cannot read selection {text!r}: {part.strip()!r} is not [dist/]name",
                fix="for example: auto, NAME, 'a,b', 'dist/NAME'",
            )
        items.append(Wanted(match["name"], match["dist"]))
    if any(w.name == "auto" for w in items):
        if len(items) > 1:
            raise ConfigError(f"cannot read selection {text!r}: 'auto' cannot be part of a list of fallbacks")
        return ()
    return tuple(items)


@dataclass(frozen=True, slots=True)
class Candidate:
    """One candidate after the stages. `stage` is the last one passed, or the first that refused."""

    name: str
    dist: str | None
    version: str | None
    stage: int
    reasons: tuple[Refusal, ...]
    spec: Spec | None = None
    official: bool = False

    @property
    def ok(self) -> bool:
        return not self.reasons

    def refused(self, kind: str) -> Refused:
        return Refused(kind, self.name, self.dist, self.stage, self.reasons)


@dataclass(frozen=True, slots=True)
class Outcome:
    """The whole story of one selection: for `select`, and for `explain`."""

    request: SelectRequest
    wanted: tuple[Wanted, ...]  # () = auto
    candidates: tuple[Candidate, ...]  # in the order of preference, refused ones last
    chosen: Candidate | None
    warnings: tuple[str, ...] = ()

    @property
    def survivors(self) -> tuple[Candidate, ...]:
        return tuple(c for c in self.candidates if c.ok)

    @property
    def refused(self) -> tuple[Refused, ...]:
        return tuple(c.refused(self.request.kind) for c in self.candidates if not c.ok)

    def choice(self, candidate: Candidate | None = None, why: str = "") -> Choice:
        """The chosen (or another surviving) candidate as a Choice."""
        picked = candidate or self.chosen
        assert picked is not None
        assert picked.spec is not None
        assert picked.spec.origin is not None
        spec, origin = picked.spec, picked.spec.origin
        claim, kind = claim_of(spec, self.request), BY_NAME[self.request.kind]
        default = "explicit" if self.wanted else "auto" if len(self.candidates) > 1 else "only candidate"
        return Choice(
            kind=self.request.kind,
            component=self.request.component,
            name=picked.name,
            target=spec.target,
            dist=origin.dist,
            version=origin.version,
            module=origin.module,
            adapter=kind.adapter if spec.interface < kind.interface else "",
            why=why or (claim.why if claim and not self.wanted else default),
            refused=self.refused,
        )


def evaluate(
    host: PluginHost, requests: Sequence[SelectRequest], wanted: Wanted, *, explicit: bool, imports: bool = False
) -> Candidate:
    """Take one candidate through the stages; it must serve all `requests` (the KV groups of one component)."""
    kind = requests[0].kind
    entry, refusal = host.find(kind, wanted.name, wanted.dist)
    if entry is None or refusal is not None:
        return _candidate(wanted, entry, CODES[refusal.code][0] if refusal else 1, [refusal] if refusal else [])
    if (broken := host.open(entry)) is not None:
        return _candidate(wanted, entry, entry.stage, [broken])
    spec = entry.spec
    assert spec is not None
    found: dict[Refusal, int] = {}
    for request in requests:
        for stage, reason in data_refusals(spec, request, host.installed_version, explicit):
            found.setdefault(reason, stage)
    if found:
        return _candidate(wanted, entry, min(found.values()), list(found))
    for request in requests:
        if reasons := _own_check(spec, request):
            return _candidate(wanted, entry, 9, reasons)
    if unbuilt := _build_refusal(spec, imports):
        return _candidate(wanted, entry, 10, [unbuilt])
    return _candidate(wanted, entry, 10, [])


def consider(
    host: PluginHost,
    request: SelectRequest | Sequence[SelectRequest],
    user: str = "auto",
    *,
    prefers: Sequence[str] = (),
    only: Callable[[Spec], bool] | None = None,
    imports: bool = False,
) -> Outcome:
    """Evaluate every candidate and pick; raises only for a selection that cannot be parsed.

    `auto` orders what passes by `prefers` (the platform's measured order of names), then the claims of parsers, then
    tier, then official before third-party, then name. `only` drops entries that are of no concern to it (kernels of
    another op). With `imports`, stage 10 imports the implementation; without, it only looks whether its module exists:
    nothing heavy is loaded.
    """
    requests = (request,) if isinstance(request, SelectRequest) else tuple(request)
    first = requests[0]
    wanted = parse_selection(user)
    if wanted:
        candidates = [evaluate(host, requests, w, explicit=True, imports=imports) for w in wanted]
        chosen = next((c for c in candidates if c.ok), None)
        return Outcome(first, wanted, tuple(candidates), chosen)

    candidates = []
    for entry in host.entries(first.kind):
        if entry.state == "shadowed":
            continue
        item = Wanted(entry.name, entry.dist if entry.state == "ambiguous" else None)
        if entry.state == "ambiguous":
            candidates.append(_candidate(item, entry, 1, [entry.reason] if entry.reason else []))
            continue
        candidate = evaluate(host, requests, item, explicit=False, imports=False)
        if candidate.spec is None or only is None or only(candidate.spec):
            candidates.append(candidate)

    def rank(c: Candidate) -> tuple[Any, ...]:
        tier = c.spec.tier if c.spec and c.ok else Tier.REFERENCE  # a refused one may not even be loaded
        preference = prefers.index(c.name) if c.name in prefers else len(prefers)
        claim = claim_of(c.spec, first)
        rank, length = (claim.rank, claim.length) if claim else (0, 0)
        return (not c.ok, preference, rank, -tier, -length, not c.official, c.name, c.dist or "")

    candidates.sort(key=rank)
    warnings: list[str] = []
    if imports:
        candidates, warnings = _build_in_order(candidates)
    chosen = next((c for c in candidates if c.ok), None)
    return Outcome(first, (), tuple(candidates), chosen, tuple(warnings))


def failure(host: PluginHost, outcome: Outcome, auto: Callable[[], Outcome] | None = None) -> SelectionError:
    """The error of an outcome without a choice: reasons per candidate, and the names that would have worked.

    `auto` considers what the user did not name.
    """
    kind = outcome.request.kind
    where = f" for {outcome.request.component!r}" if outcome.request.component else ""
    lines = [f"{c.name}: " + "; ".join(f"{r.code} (needs {r.needed}, has {r.offered})" for r in c.reasons)
             for c in outcome.candidates]  # fmt: skip
    fixes = [r.fix for c in outcome.candidates for r in c.reasons if r.fix]
    if outcome.wanted:
        asked = ",".join(map(str, outcome.wanted))
        message = f"{kind} {asked!r} cannot be used{where}: " + " | ".join(lines)
        if kind == "model":  # its names are architectures: no other runs this checkpoint
            like = nearest(str(outcome.wanted[0]), host.names(kind))
            fixes += [f"nearest: {like}"] if like else []
        elif auto and (works := [c.name for c in auto().survivors]):
            fixes.append(f"these would work: {', '.join(works)}")
    else:
        message = f"no {kind} plugin can be used{where}: " + (" | ".join(lines) or "none is installed")
    if not lines and not fixes:
        dists = sorted(set(catalog().get(kind, {}).values()))
        fixes.append(" or ".join(map(install, dists)) if dists else f"install a plugin for {kind}")
    return SelectionError(message, outcome.refused, fix="; or ".join(dict.fromkeys(fixes)))


def _candidate(wanted: Wanted, entry: Entry | None, stage: int, reasons: list[Refusal]) -> Candidate:
    if entry is None:
        return Candidate(wanted.name, wanted.dist, None, stage, tuple(reasons))
    return Candidate(entry.name, entry.dist, entry.version, stage, tuple(reasons), entry.spec, entry.official)


def _own_check(spec: Spec, request: SelectRequest) -> list[Refusal]:
    """Stage 9: the plugin's own check. Its codes get the plugin's name as a prefix."""
    if spec.check is None:
        return []
    try:
        reasons = ask(spec.check, _reasons, spec.check, request)
    except BaseException as e:
        if is_interrupt(e):
            raise
        return [Refusal("check-failed", f"{spec.check} to answer", said_by(e.__cause__ or e))]
    prefix = f"{spec.name}."
    return [r if r.code.startswith(prefix) else Refusal(prefix + r.code, r.needed, r.offered, r.fix) for r in reasons]


def _reasons(check: Ref, request: SelectRequest) -> list[Refusal]:
    reasons = list(load_ref(check)(request) or ())
    if wrong := [r for r in reasons if not isinstance(r, Refusal)]:
        raise TypeError(f"it gave {wrong[0]!r:.80}, no Refusal")
    return reasons


def _build_refusal(spec: Spec, imports: bool) -> Refusal | None:
    """Stage 10: the implementation exists and, with `imports`, can be imported; its options can."""
    for ref, load in ((spec.options, options_type), (spec.target if imports else None, lambda s: load_ref(s.target))):
        try:
            load(spec) if ref else None
        except PluginError as e:
            return Refusal("target-import", str(ref), said_by(e.__cause__ or e))
    if reason := missing_module(spec.target):
        return Refusal("target-import", spec.target, reason)
    return None


def _build_in_order(candidates: list[Candidate]) -> tuple[list[Candidate], list[str]]:
    """Import the winner's implementation; while that fails, go to the next candidate, with a warning naming both."""
    result, warnings = list(candidates), []
    for i, candidate in enumerate(candidates):
        if not candidate.ok or candidate.spec is None:
            continue
        reason = _build_refusal(candidate.spec, imports=True)
        if reason is None:
            break
        result[i] = replace(candidate, stage=10, reasons=(reason,))
        following = next((c.name for c in candidates[i + 1 :] if c.ok), None)
        instead = f"using {following!r} instead" if following else "nothing is left"
        warnings.append(f"{candidate.name!r} cannot be imported ({reason.offered}); {instead}")
    result.sort(key=lambda c: not c.ok)
    return result, warnings
