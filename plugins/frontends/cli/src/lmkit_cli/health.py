"""Health of the installed plugins: every check of the contract that needs no device, as findings with a remedy."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

import msgspec
from lmkit.api import DoctorCheck, PluginError
from lmkit.kinds import BY_NAME, KINDS
from lmkit.plugins.catalog import CORE_DIST
from lmkit.plugins.host import Entry, PluginHost
from lmkit.plugins.options import options_type
from lmkit.plugins.refs import load_ref
from lmkit.plugins.stages import requirements
from packaging.requirements import InvalidRequirement, Requirement

Level = Literal["info", "warning", "error"]
HEAVY = ("torch", "numpy", "triton", "transformers", "tokenizers", "pydantic", "fastapi")  # not in a hooks module
IMPORT_SECONDS = 0.5  # for a hooks module, beyond lmkit.api
ENDLESS_SECONDS = 10.0  # after which it is taken for one that never ends
PUBLIC = (
    *("lmkit.api", "lmkit.checkpoint", "lmkit.files", "lmkit.memory", "lmkit.prompts"),
    *("lmkit_http", "lmkit_killable", "lmkit_layers", "lmkit_testing"),
)
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
    findings = [Finding("warning", "switch", "plugins", text) for text in host.warnings]
    budgets = import_budgets(sorted({e.module for e in host.entries() if e.state == "ok"}))
    for entry in host.entries():
        if budgets.get(entry.module, ([], 0.0))[0] is None:  # not to be imported here
            findings.append(_endless(entry))
            host.leave_out(entry, findings[-1].message)
            continue
        findings += _state(entry, host)
        if entry.state == "ok":
            findings += _loaded(entry, host, imports)
            findings += _budget(entry, budgets)
    findings += _unlisted_specs(host)
    for dist in sorted({e.dist for e in host.entries()}):
        findings += _dist(dist, host)
    findings += _shared_files(host)
    findings += _own_checks(host)
    order = {"error": 0, "warning": 1, "info": 2}
    return sorted(dict.fromkeys(findings), key=lambda f: (order[f.level], f.subject, f.code))


def _state(entry: Entry, host: PluginHost) -> Iterator[Finding]:
    if entry.state == "ok":
        host.open(entry)
    if entry.state == "ok" or entry.reason is None:
        return
    level: Level = {"disabled": "info", "shadowed": "warning"}.get(entry.state, "error")  # type: ignore[assignment]
    reason = entry.reason
    text = f"{entry.state}: needs {reason.needed}, has {reason.offered}"
    yield Finding(level, reason.code if entry.state != "shadowed" else "shadowed", entry.key, text, reason.fix)


def _loaded(entry: Entry, host: PluginHost, imports: bool) -> Iterator[Finding]:
    for text in entry.warnings:
        yield Finding("warning", "unknown-hook", entry.key, text, "check the spelling, or upgrade lmkit-core")
    for text in private_imports(entry.module):
        yield Finding("error", "private-import", entry.key, text, f"import from {', '.join(PUBLIC)} only")
    spec = entry.spec
    if spec is None:
        return
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
            yield Finding("error", "target-import", entry.key, f"{name}: {e}", "reinstall the plugin")


def _endless(entry: Entry) -> Finding:
    text = f"importing {entry.module}, or asking it what it registers, has not ended after {ENDLESS_SECONDS:g} s"
    return Finding("error", "endless", entry.key, text, f"uninstall {entry.dist}, or disable {entry.key}")


def _budget(entry: Entry, budgets: dict[str, tuple[list[str] | None, float]]) -> Iterator[Finding]:
    heavy, seconds = budgets.get(entry.module, ([], 0.0))
    if heavy:
        text = f"importing {entry.module} imports {', '.join(heavy)}"
        yield Finding("error", "import-budget", entry.key, text, "import heavy modules in the target only")
    if seconds > IMPORT_SECONDS:
        text = f"importing {entry.module} takes {seconds:.2f} s, more than {IMPORT_SECONDS} s"
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
    for text in found.requires or ():
        try:
            requirement = Requirement(text)
        except InvalidRequirement:
            yield Finding("warning", "bad-requirement", dist, f"{text!r} is not a requirement", "fix its metadata")
            continue
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


def _own_checks(host: PluginHost) -> Iterator[Finding]:
    """Checks that plugins bring along (`lmkit_doctor_checks`)."""
    try:
        checks = host.gather("lmkit_doctor_checks")
    except PluginError as e:
        yield Finding("error", "broken", "plugins", str(e), "lmkit plugins list")
        return
    for module, check in checks:
        if not isinstance(check, DoctorCheck):
            yield Finding("error", "broken", module, f"lmkit_doctor_checks returned {check!r}")
            continue
        level: Level = check.level
        try:
            problem = load_ref(check.target, module)()
        except KeyboardInterrupt:
            raise
        except BaseException as e:
            level = "error"
            problem = f"the check raised {type(e).__name__}: {e}"
        if problem:
            yield Finding(level, f"{module.split('.')[0]}.{check.name}", module, str(problem))


# Run in a fresh interpreter: one fork per module, so that each starts with lmkit.api imported and nothing else. A
# module, or a registration hook of it, that does not come to an end is killed; so is everything when the parent, who
# holds the other end of standard input, is gone.
MEASURE = """
import json, os, select, signal, sys, time
from importlib import import_module
import lmkit.api

heavy, hooks, limit, *modules = sys.argv[1:]
before = set(sys.modules)

def measure(module):
    start = time.perf_counter()
    imported = import_module(module)
    seconds = time.perf_counter() - start
    found = [m for m in heavy.split(",") if m in sys.modules and m not in before]
    os.write(1, f"BUDGET {json.dumps([module, found, seconds])}\\n".encode())
    for hook in hooks.split(","):
        for specs in [getattr(imported, hook, list)()]:
            list(specs or ())

for module in modules:
    pid = os.fork()
    if not pid:
        try:
            measure(module)
        except BaseException:
            os._exit(1)
        os._exit(0)
    end = time.monotonic() + float(limit)
    pause = 0.001
    while os.waitpid(pid, os.WNOHANG) == (0, 0):
        orphaned = select.select([0], [], [], pause)[0]
        pause = min(2 * pause, 0.05)
        if orphaned or time.monotonic() > end:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            if orphaned:
                sys.exit(1)
            os.write(1, f"BUDGET {json.dumps([module, None, float(limit)])}\\n".encode())
            break
"""


def import_budgets(modules: Sequence[str], limit: float | None = None) -> dict[str, tuple[list[str] | None, float]]:
    """Per module, what importing it costs: the heavy modules it pulled in, and seconds beyond lmkit.api.

    A module that cannot be imported costs nothing here: it is `broken`, which is reported elsewhere. None in place of
    the heavy modules: importing it, or asking it what it registers, took longer than `limit` seconds and was ended.
    """
    limit = ENDLESS_SECONDS if limit is None else limit
    if not modules:
        return {}
    environment = {"PYTHONPATH": ":".join(p for p in sys.path if p)}
    arguments = [",".join(HEAVY), ",".join(kind.hook for kind in KINDS), str(limit), *modules]
    with subprocess.Popen(
        [sys.executable, "-c", MEASURE, *arguments],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        lines = process.stdout.readlines()
    measured = [json.loads(line[7:]) for line in lines if line.startswith("BUDGET ")]
    return dict.fromkeys(modules, ([], 0.0)) | {module: (heavy, seconds) for module, heavy, seconds in measured}


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
