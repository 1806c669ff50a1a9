"""Why something was chosen: the resolver's story as data."""

from __future__ import annotations

from typing import Any

import msgspec
from lmkit.api import Derived, DeviceInfo, ErrorInfo, LmkitError, OpRequest, Refusal, SelectRequest
from lmkit.config import EngineConfig
from lmkit.contracts.errors import UnknownName
from lmkit.kinds import BY_NAME
from lmkit.plugins.catalog import catalog, install
from lmkit.plugins.host import PluginHost
from lmkit.plugins.resolve import Resolver
from lmkit.plugins.select import Candidate, Outcome

from lmkit_cli.estimate import Estimate
from lmkit_cli.readiness import unready

TOPICS = tuple(BY_NAME)


class CandidateReport(msgspec.Struct, frozen=True):
    """One candidate. `verdict`: "selected", "usable" (passed, but another is preferred) or "refused"."""

    name: str
    verdict: str
    dist: str | None = None
    version: str | None = None
    tier: str = ""
    stage: int = 0
    reasons: tuple[Refusal, ...] = ()


class TopicReport(msgspec.Struct, frozen=True):
    """One selection, or a kind for which none could be made (`error`)."""

    kind: str
    component: str = ""
    request: dict[str, Any] = {}
    wanted: tuple[str, ...] = ()  # what the user named; empty = auto
    candidates: tuple[CandidateReport, ...] = ()
    not_installed: dict[str, str] = {}  # official name -> pip command
    instead: str = ""  # what is done where no candidate is chosen, and none is needed
    error: ErrorInfo | None = None
    after: str = ""  # the earlier selection whose error this is


class Explanation(msgspec.Struct, frozen=True):
    """Answer of `explain`, the same for a terminal, for `--json` and for tests."""

    model: str
    device: DeviceInfo | None
    topics: tuple[TopicReport, ...]
    derived: tuple[Derived, ...] = ()
    warnings: tuple[str, ...] = ()
    memory: Estimate | None = None  # what `lmkit plan` prints; None: something is not decided, or does not fit

    def topic(self, kind: str, component: str | None = None) -> TopicReport:
        return next(t for t in self.topics if t.kind == kind and component in (None, t.component))


def explain(config: EngineConfig, host: PluginHost, *, topic: str | None = None, why: str | None = None) -> Explanation:
    """Resolve as far as possible and tell the story; of one kind with `topic`, of one candidate with `why`.

    Raises UnknownName for a topic that is no kind, and for a candidate that no topic has. Everything that fails on
    the way is part of the answer.
    """
    if topic is not None and topic not in TOPICS:
        raise UnknownName("topic", topic, TOPICS)
    resolver = Resolver(config, host, tolerant=True)
    resolver.run()
    budget, refused = _readiness(resolver)
    resolver.errors |= refused
    topics = []
    for kind in TOPICS if topic is None else (topic,):
        reports = [_topic(o, host) for o in resolver.outcomes if o.request.kind == kind]
        error, root = resolver.errors.get(kind), resolver.roots.get(kind, "")
        if not reports and (error is not None or topic is not None):
            reports = [_undecided(kind, host, error, root)]
        elif error is not None:
            reports = _refused(reports, error)
        topics += reports
    if topic is None:  # steps that choose no plugin, and that nothing which follows has told of
        told = set(resolver.roots.values()) | set(resolver.roots) | set(TOPICS)
        topics += [TopicReport(kind=s, error=e.info()) for s, e in resolver.errors.items() if s not in told]
    if why is not None:
        known = {name for r in topics for c in r.candidates for name in (c.name, f"{c.dist}/{c.name}")}
        known |= {name for r in topics for name in r.not_installed}
        if why not in known:
            raise UnknownName("candidate", why, {name for name in known if "/" not in name})
        topics = [_narrow(r, why) for r in topics]
    device = resolver.known.device
    derived = resolver.plan().derived if device else ()
    warnings = resolver.plan().warnings if device else tuple(host.warnings)
    warnings += tuple(f"this would not start: {error.message}" for error in refused.values())
    if topic is not None:
        derived, budget = (), None
    return Explanation(config.model.model, device, tuple(topics), derived, warnings, budget)


def _readiness(resolver: Resolver) -> tuple[Estimate | None, dict[str, LmkitError]]:
    """The memory of `lmkit plan`, or why it and `serve` refuse; nothing where something is undecided."""
    known = resolver.known
    if resolver.errors or known.device is None:
        return None, {}
    return unready(resolver.config, resolver.plan(), known.checkpoint, known.info)


def _topic(outcome: Outcome, host: PluginHost) -> TopicReport:
    return TopicReport(
        kind=outcome.request.kind,
        component=outcome.request.component,
        request=_request(outcome.request),
        wanted=tuple(map(str, outcome.wanted)),
        candidates=tuple(_candidate(c, outcome) for c in outcome.candidates),
        not_installed=_not_installed(outcome.request.kind, host),
        instead=_instead(outcome),
    )


def _instead(outcome: Outcome) -> str:
    """Experts need no kernel of their own."""
    request = outcome.request
    if isinstance(request, OpRequest) and request.op == "moe" and outcome.chosen is None and not outcome.wanted:
        return f"none: each expert runs on the kernel of linear:{request.format}"
    return ""


def _refused(reports: list[TopicReport], error: LmkitError) -> list[TopicReport]:
    """Nothing is selected of a kind whose step failed after the selection: the last report says why."""
    shown = []
    for report in reports:
        rows = tuple(
            msgspec.structs.replace(c, verdict="usable") if c.verdict == "selected" else c for c in report.candidates
        )
        shown.append(msgspec.structs.replace(report, candidates=rows))
    if shown[-1] != reports[-1]:  # else its candidates say it
        shown[-1] = msgspec.structs.replace(shown[-1], error=error.info())
    return shown


def _undecided(kind: str, host: PluginHost, error: LmkitError | None, root: str) -> TopicReport:
    """No selection was made: say why, and what is installed and could be."""
    rows = []
    for name in host.names(kind):
        entry, refusal = host.find(kind, name)
        reasons = (refusal,) if refusal else ()
        dist, version = (entry.dist, entry.version) if entry else (None, None)
        rows.append(CandidateReport(name, "refused" if reasons else "usable", dist, version, reasons=reasons))
    return TopicReport(
        kind=kind,
        candidates=tuple(rows),
        not_installed=_not_installed(kind, host),
        error=error.info() if error is not None else None,
        after=root,
    )


def _candidate(c: Candidate, outcome: Outcome) -> CandidateReport:
    verdict = "selected" if c is outcome.chosen else "usable" if c.ok else "refused"
    tier = c.spec.tier.name.lower() if c.spec else ""
    return CandidateReport(c.name, verdict, c.dist, c.version, tier, c.stage, c.reasons)


def _not_installed(kind: str, host: PluginHost) -> dict[str, str]:
    known = {e.name for e in host.entries(kind)}
    return {name: install(dist) for name, dist in catalog().get(kind, {}).items() if name not in known}


def _narrow(report: TopicReport, why: str) -> TopicReport:
    """Only the candidate asked about and the one selected."""
    kept = tuple(c for c in report.candidates if why in (c.name, f"{c.dist}/{c.name}") or c.verdict == "selected")
    missing = {name: command for name, command in report.not_installed.items() if name == why}
    return msgspec.structs.replace(report, candidates=kept, not_installed=missing)


def _request(request: SelectRequest) -> dict[str, Any]:
    """The fields of a request that say something, as plain data."""
    device = request.device
    shown: dict[str, Any] = request.facts()
    if device is not None:
        shown["device"] = device_text(device)
    return shown


def device_text(device: DeviceInfo) -> str:
    """ "NAME cc 7.5 (Tesla T4)"."""
    capability = f" cc {device.capability[0]}.{device.capability[1]}" if device.capability else ""
    name = f" ({device.name})" if device.name else ""
    return f"{device.platform}{capability}{name}{', described' if device.described else ''}"
