"""Health of the installed plugins: every check of the contract that needs no device, as findings with a remedy."""

from __future__ import annotations

import ast
import re
import sysconfig
import traceback
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

import lmkit
import msgspec
import pluggy
from lmkit.api import PluginError
from lmkit.config.environment import plugin_seconds
from lmkit.kinds import BY_NAME, EXTENSION
from lmkit.plugins.catalog import CORE_DIST
from lmkit.plugins.host import Entry, PluginHost
from lmkit.plugins.options import options_type
from lmkit.plugins.refs import load_ref
from lmkit.plugins.stages import requirements
from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

from lmkit_cli.apart import CHECKS, IMPORTING, Report, examine_apart

Level = Literal["info", "warning", "error"]
IMPORT_SECONDS = 0.5  # for a hooks module, beyond lmkit.api
PUBLIC = (
    *("lmkit.api", "lmkit.checkpoint", "lmkit.files", "lmkit.memory", "lmkit.prompts"),
    *("lmkit_http", "lmkit_killable", "lmkit_layers", "lmkit_testing"),
)
ENDINGS = ("endless", "ends-the-process")  # codes of plugins that cannot be imported, asked or probed here
PINNED = {"torch", "triton", "transformers", "numpy"}  # a pin on one of these can break a working environment


class Finding(msgspec.Struct, frozen=True):
    """One thing that is wrong, or worth knowing. `subject` is "kind:name" or a dist."""

    level: Level
    code: str
    subject: str
    message: str
    fix: str = ""


def examine(host: PluginHost, *, imports: bool = False) -> list[Finding]:
    """All findings, worst first. With `imports`, `target`, `check` and `options` are imported too (may load torch)."""
    host.scan()
    findings = [Finding("warning", "table", "plugins", text) for text in host.warnings if not _is_conflict(text, host)]
    third_party_dialects = any(e.kind == "dialect" and e.state == "ok" and not e.official for e in host.entries())
    modules = sorted({e.module for e in host.entries() if e.state == "ok"})
    reports = examine_apart(modules, plugin_seconds(), dialects=third_party_dialects)
    ended = {r.module: r for r in reports if r.ended}  # not to be imported here
    costs = {r.module: r for r in reports if r.doing == IMPORTING}
    for entry in host.entries():
        if entry.state == "ok" and (report := ended.get(entry.module)):
            findings.append(_ended(entry, report))
            host.leave_out(entry, findings[-1].message)
            continue
        findings += _state(entry, host)
        if entry.state == "ok":
            findings += _loaded(entry, host, imports)
            findings += _budget(entry, costs.get(entry.module))
    findings += _unlisted_specs(host)
    for dist in sorted({e.dist for e in host.entries()}):
        findings += _dist(dist, host)
    findings += _shared_files(host)
    findings += _own_checks(reports, host)
    findings += _routes(reports, host)
    findings += _commands()
    order = {"error": 0, "warning": 1, "info": 2}
    return sorted(dict.fromkeys(findings), key=lambda f: (order[f.level], f.subject, f.code))


def _is_conflict(text: str, host: PluginHost) -> bool:
    """Whether a warning is about a name of several dists, of which each has a finding of its own."""
    return any(e.state == "ambiguous" and text.startswith(f"{e.key} is a name of") for e in host.entries())


def _state(entry: Entry, host: PluginHost) -> Iterator[Finding]:
    if entry.state == "ok":
        host.open(entry)
    if entry.state == "ok" or entry.reason is None:
        return
    settled = entry.state == "ambiguous" and any(e.state == "ok" for e in host.entries(entry.kind, entry.name))
    levels: dict[str, Level] = {"disabled": "info", "shadowed": "warning"}
    level: Level = "warning" if settled else levels.get(entry.state, "error")
    reason = entry.reason
    text = f"needs {reason.needed}, has {reason.offered}"
    if entry.state != reason.code:
        text = f"{entry.state}: {text}"
    fix = _fix(entry.module, entry.trace, host) if entry.state == "broken" else reason.fix
    yield Finding(level, reason.code if entry.state != "shadowed" else "shadowed", entry.key, text, fix)


def _loaded(entry: Entry, host: PluginHost, imports: bool) -> Iterator[Finding]:
    for text in entry.warnings:
        yield Finding("warning", "unknown-hook", entry.key, text, "check the spelling, or upgrade lmkit-core")
    if printed := host.printed(entry.module):
        text = f"prints when it is imported or registers ({printed.strip()!r:.60}): standard output is the command's"
        yield Finding("error", "prints", entry.key, text, "use logging, or print to sys.stderr when it is used")
    for hook, group in host.uncalled_hooks(entry):
        text = f"implements {hook}, which is never called: {entry.module} has no entry point of the group {group}"
        fix = f'add to its pyproject.toml: [project.entry-points."{group}"] {entry.name} = "{entry.module}"'
        yield Finding("error", "uncalled-hook", entry.key, text, fix)
    if entry.kind == EXTENSION and not host.get_hookcallers(host.get_plugin(entry.module)):
        text = f"{entry.module} implements no hook, so it does nothing"
        yield Finding("warning", "no-hook", entry.key, text, "mark its hooks with @hookimpl (of lmkit.api)")
    for text in private_imports(entry.module):
        yield Finding("error", "private-import", entry.key, text, f"import from {', '.join(PUBLIC)} only")
    spec = entry.spec
    if spec is None:
        return
    if spec.interface < (current := BY_NAME[entry.kind].interface):
        text = f"is of interface {spec.interface}, and works through an adapter that interface {current + 1} ends"
        yield Finding("info", "interface-before", entry.key, text, f"write it for interface {current}: CHANGELOG.md")
    for refusal in requirements(spec, host.installed_version):
        text = f"needs {refusal.needed}, has {refusal.offered}"
        yield Finding("info", refusal.code, entry.key, text, refusal.fix)
    if not imports:
        return
    missing = list(requirements(spec, host.installed_version))
    for name in ("target", "check", "options", "probe", "describe"):
        ref = getattr(spec, name, None)
        if ref is None or (name == "target" and missing):
            continue
        try:
            load_ref(ref, spec.name)
            if name == "options":
                options_type(spec)
        except PluginError as e:
            trace = "".join(traceback.format_exception(e.__cause__ or e))
            yield Finding("error", "target-import", entry.key, f"{name}: {e}", _fix(entry.module, trace, host))


def _ended(entry: Entry, report: Report) -> Finding:
    code = ENDINGS["not ended" not in report.ended]
    text = f"{report.doing} {report.ended}" if report.doing != IMPORTING else f"importing {entry.module} {report.ended}"
    fix = f"uninstall {entry.dist}, or start without it: LMKIT_PLUGINS_DISABLE={entry.key}"
    return Finding("error", code, entry.key, text, fix)


def _budget(entry: Entry, cost: Report | None) -> Iterator[Finding]:
    if cost and cost.heavy:
        text = f"importing {entry.module} imports {', '.join(cost.heavy)}"
        yield Finding("error", "import-budget", entry.key, text, "import heavy modules in the target only")
    if cost and cost.seconds > IMPORT_SECONDS:
        text = f"importing {entry.module} takes {cost.seconds:.2f} s, more than {IMPORT_SECONDS} s"
        yield Finding("warning", "import-slow", entry.key, text, "do the work when it is needed")


def _unlisted_specs(host: PluginHost) -> Iterator[Finding]:
    listed = {(e.kind, e.module, e.name) for e in host.entries()}
    for entry in host.entries():
        for spec in host.specs_of(entry) if entry.kind in BY_NAME else ():
            for name in getattr(spec, "architectures", (spec.name,)):
                if (entry.kind, entry.module, name) not in listed:
                    text = f"{entry.module} returns {name!r}, which has no entry point"
                    yield Finding("warning", "no-entry-point", f"{entry.kind}:{name}", text, f"add it to {entry.dist}")


def _dist(dist: str, host: PluginHost) -> Iterator[Finding]:
    found = next(iter(host.distributions(name=dist)), None)
    if found is None or dist == CORE_DIST:
        return
    ranges = [e.core_range for e in host.entries() if e.dist == dist]
    if not any(ranges):
        text = f"states no range of {CORE_DIST}"
        yield Finding("warning", "no-core-range", dist, text, f'add "{CORE_DIST}>=0.1,<0.3" to its dependencies')
    specs = [e.spec for e in host.entries() if e.dist == dist and e.spec is not None]
    reported = {canonicalize_name(Requirement(text).name) for spec in specs for text in spec.requires}
    for text in found.requires or ():
        try:
            requirement = Requirement(text)
        except InvalidRequirement:
            yield Finding("warning", "bad-requirement", dist, f"{text!r} is not a requirement", "fix its metadata")
            continue
        name = canonicalize_name(requirement.name)
        needed = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
        version = host.installed_version(name)
        missing = version is None or not requirement.specifier.contains(version, prereleases=True)
        if needed and missing and name not in reported and name != CORE_DIST:
            here = "not installed" if version is None else f"here in version {version}"
            said = f"requires {text}, which is {here}"
            yield Finding("warning", "dependency", dist, said, f'pip install "{requirement}"')
        if requirement.name in PINNED and any(s.operator in ("==", "===") for s in requirement.specifier):
            yield Finding(
                "warning", "exact-pin", dist, f"pins {text}", "use a floor (>=): a pin replaces working builds"
            )


def _shared_files(host: PluginHost) -> Iterator[Finding]:
    """Files that two dists claim: one overwrote the other."""
    owners: dict[str, set[str]] = defaultdict(set)
    for dist in sorted({e.dist for e in host.entries()}):
        found = next(iter(host.distributions(name=dist)), None)
        for file in (found.files or ()) if found else ():
            if file.suffix == ".py":
                owners[str(found.locate_file(file)) if found else ""].add(dist)
    for path, dists in sorted(owners.items()):
        if len(dists) > 1:
            text = f"{path} belongs to {' and '.join(sorted(dists))}"
            yield Finding("error", "shared-file", sorted(dists)[0], text, "uninstall one and reinstall the other")


def _commands() -> Iterator[Finding]:
    """Commands of dists that are never run, because another one has their name."""
    from lmkit_cli.root import COMMANDS

    first: dict[str, str] = dict.fromkeys(COMMANDS, "lmkit-cli")
    for entry in metadata.entry_points(group="lmkit.command"):
        dist = entry.dist.name if entry.dist else "?"
        if (owner := first.setdefault(entry.name, dist)) != dist:
            text = f"the command of {dist} is not run: {owner} has one of that name"
            yield Finding("warning", "shadowed", f"command:{entry.name}", text, f"uninstall {dist}, or rename it there")


def _own_checks(reports: Iterable[Report], host: PluginHost) -> Iterator[Finding]:
    """Probes of platforms, and the checks that plugins bring along (`lmkit_doctor_checks`)."""
    for r in reports:
        what, _, name = r.doing.rpartition(" ")
        if r.problem and r.doing == CHECKS:
            yield Finding("error", "broken", r.module, r.problem, _fix(r.module, "", host))
        elif r.problem:
            level: Level = "warning" if r.level == "warning" else "error"
            yield Finding(level, f"{r.module.split('.')[0]}.{name}", r.module, r.problem)
        elif r.trace and (what in ("the probe of", "the check", "the routes of") or r.doing == CHECKS):
            subject = {"the probe of": f"platform:{name}", "the routes of": f"dialect:{name}"}.get(what, r.module)
            code = f"{r.module.split('.')[0]}.{name}" if what == "the check" else "broken"
            yield Finding(
                "error", code, subject, f"{r.doing} raised {last_line(r.trace)}", _fix(r.module, r.trace, host)
            )


def _routes(reports: Sequence[Report], host: PluginHost) -> Iterator[Finding]:
    """Routes of third-party dialects that somebody else answers."""
    spoken = [r for r in reports if r.routes]
    if not spoken:
        return
    from lmkit_http.dialects import server_routes, taken_by  # whoever has routes has imported it

    official = {e.module for e in host.entries("dialect") if e.official}
    taken = server_routes()
    taken += [(route, r.mark, _dialect(r)) for r in spoken if r.module in official for route in r.routes]
    first: dict[tuple[str, str | None], str] = {}  # route and mark of third-party dialects -> who
    for r in (r for r in spoken if r.module not in official):
        without = f"uninstall it, or start without it: LMKIT_PLUGINS_DISABLE={_dialect(r)}"
        for route in r.routes:
            if (owner := taken_by(route, r.mark, taken)) is not None:
                text = f"wants {route}, which {owner} answers: it stays with lmkit's own"
                yield Finding("error", "route-taken", _dialect(r), text, f"choose another path; or {without}")
            elif (owner := first.setdefault((route, r.mark), _dialect(r))) != _dialect(r):
                text = f"wants {route}, which {owner} answers too: the server does not start with both"
                yield Finding("error", "route-taken", _dialect(r), text, without)


def _dialect(report: Report) -> str:
    return f"dialect:{report.doing.rpartition(' ')[2]}"


def last_line(trace: str) -> str:
    """What was raised: the last line of a traceback."""
    return trace.strip().rpartition("\n")[2]


def place_in(trace: str) -> str:
    """ "file:line" of the plugin's own line that a traceback ends in, or ""."""
    folders = [Path(str(module.__file__)).parent for module in (lmkit, pluggy)] + [Path(__file__).parent]
    python = Path(sysconfig.get_path("stdlib"))
    found = ""
    for file, line in re.findall(r'File "([^"<]+)", line (\d+)', trace):
        path = Path(file)
        library = path.is_relative_to(python) and "site-packages" not in path.parts
        if not library and not any(path.is_relative_to(folder) for folder in folders):
            found = f"{file}:{line}"
    return found


def _fix(module: str, trace: str, host: PluginHost) -> str:
    """For an author, and for whoever only has it installed."""
    keys = [e.key for e in host.entries() if e.module == module]
    without = f"start without it: LMKIT_PLUGINS_DISABLE={','.join(keys) or module}"
    return f"correct {place}; or {without}" if (place := place_in(trace)) else without


def import_budgets(modules: Sequence[str]) -> dict[str, tuple[list[str], float]]:
    """Per module, what importing it costs: the heavy modules it pulled in, and seconds beyond lmkit.api.

    A module that cannot be imported costs nothing here: it is `broken`, which is reported elsewhere.
    """
    reports = examine_apart(modules, plugin_seconds())
    measured = {r.module: (r.heavy, r.seconds) for r in reports if r.doing == IMPORTING and not (r.trace or r.ended)}
    return dict.fromkeys(modules, ([], 0.0)) | measured


def private_imports(module: str) -> list[str]:
    """ "file:line imports lmkit.x" for each import of a private lmkit module in the package that holds `module`."""
    package = find_spec(module.partition(".")[0])
    if package is None or package.name == "lmkit":
        return []  # the core may import itself
    folders = [Path(p) for p in package.submodule_search_locations or ()]
    files = [f for folder in folders for f in sorted(folder.rglob("*.py"))] or [Path(package.origin or "")]
    found = []
    for file in files:
        for node in ast.walk(ast.parse(file.read_text())):
            if not isinstance(node, (ast.Import, ast.ImportFrom)):
                continue
            names: list[str] = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif not node.level and node.module == "lmkit":
                names = [f"lmkit.{alias.name}" for alias in node.names]
            elif not node.level and node.module:
                names = [node.module]
            found += [
                f"{file.name}:{node.lineno} imports {n}"
                for n in names
                if n.startswith("lmkit.") and n not in PUBLIC and not n.startswith(tuple(f"{p}." for p in PUBLIC))
            ]
    return found


def count(findings: Iterable[Finding]) -> Counter[str]:
    return Counter(f.level for f in findings)
