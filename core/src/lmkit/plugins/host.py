"""PluginHost: the table of installed plugins, and their loading one at a time, each in isolation.

Nothing a plugin does at import or registration can stop the process or another plugin: it gets a state instead.

    ok            usable as far as known; loaded when it is first considered
    disabled      switched off, by what stands in `reason`
    incompatible  made for another core (from dist metadata) or another interface number
    broken        its import or registration raised, or it broke the contract
    ambiguous     several enabled dists use this kind and name, and it is not lmkit's own; `dist/name` settles it
    shadowed      the same dist is installed twice and this copy is behind another on sys.path
"""

from __future__ import annotations

import importlib.metadata as metadata
import logging
import time
import traceback
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from importlib import import_module
from itertools import islice
from types import ModuleType
from typing import Any

import pluggy
from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

import lmkit
from lmkit.api import ConfigError, LmkitError, Origin, PluginError, Refusal, Spec, nearest
from lmkit.config import read_environment
from lmkit.contracts.errors import is_interrupt, said_by
from lmkit.hookspecs import LmkitSpecs, hooks
from lmkit.kinds import BY_NAME, EXTENSION, GROUPS
from lmkit.plugins.catalog import CORE_DIST, install_command
from lmkit.plugins.entry import Entry, State
from lmkit.plugins.limits import limited
from lmkit.plugins.switches import Switches

log = logging.getLogger("lmkit.plugins")
MAX_ITEMS = 10_000  # that one call of a hook may yield

PREFIX = "lmkit."
_CHOSEN = ("platform", "model")  # kinds that the resolver finds by itself
_DOCTOR_CHECKS, _RESOLVE_CHECKPOINT = "lmkit_doctor_checks", "lmkit_resolve_checkpoint"
COMMANDS = "lmkit.command"  # a front end reads this group


class PluginHost(pluggy.PluginManager):
    """Scans once, loads lazily. `path` replaces sys.path as the place where dists are looked for."""

    def __init__(self, *, path: Sequence[str] | None = None, switches: Switches | None = None) -> None:
        super().__init__("lmkit")
        self.add_hookspecs(LmkitSpecs)
        self.switches = Switches.build(read_environment().switches) if switches is None else switches
        self.warnings: list[str] = []
        self._path = None if path is None else list(path)
        self._entries: list[Entry] | None = None
        self._failed: dict[str, BaseException] = {}  # by module
        self._specs: dict[tuple[str, str], list[Spec]] = {}  # (module, kind) -> what its hook returned
        self._printed: dict[str, list[str]] = {}  # by module
        self._extensions_loaded = False
        self._active = {"lmkit.builtin"}  # modules whose behaviour hooks are called
        self.register(import_module("lmkit.builtin"), name="lmkit.builtin")

    # ------------------------------------------------------------------------------------------------- the table

    def scan(self) -> list[Entry]:
        """Read entry points of all installed dists, once; apply the switches. Imports no plugin."""
        if self._entries is not None:
            return self._entries
        entries = sorted(self._read(), key=lambda e: (GROUPS.index(e.kind), e.name, e.dist))
        self._apply_switches(entries)
        for entry in entries:
            if entry.state == "ok" and (refusal := _core_refusal(entry)):
                self._set(entry, "incompatible", 3, refusal)
        self._settle_conflicts([e for e in entries if e.state in ("ok", "incompatible")])
        self._entries = entries
        return entries

    def _settle_conflicts(self, entries: Sequence[Entry]) -> None:
        """A name of several dists is that of lmkit's own; where there is none, or at will, `dist/name` says which."""
        rivals: dict[str, list[Entry]] = {}
        for entry in entries:
            rivals.setdefault(entry.key, []).append(entry)
        for key, found in rivals.items():
            own = [e for e in found if e.official]
            others = [e for e in found if len(own) != 1 or e is not own[0]] if len(found) > 1 else []
            dists, names = ", ".join(e.dist for e in found), " or ".join(f"{e.dist}/{e.name}" for e in others)
            for entry in others:
                entry.state, entry.stage = "ambiguous", 1
                fix = f"write {names}, or disable one"
                entry.reason = Refusal("name-conflict", "one dist per name", dists, fix)
            if others:
                used = f"that of {own[0].dist} is used" if len(own) == 1 else "none is used"
                self.warnings.append(f"{key} is a name of several dists ({dists}); {used}: write {names} for another")

    def entries(self, kind: str | None = None, name: str | None = None) -> list[Entry]:
        """Entries of the table, in its order, of any state."""
        return [e for e in self.scan() if kind in (None, e.kind) and name in (None, e.name)]

    def names(self, kind: str) -> list[str]:
        """Names of `kind` that are not disabled or shadowed, sorted, each once."""
        return sorted({e.name for e in self.entries(kind) if e.state not in ("disabled", "shadowed")})

    def find(self, kind: str, name: str, dist: str | None = None) -> tuple[Entry | None, Refusal | None]:
        """Stages 1 to 3 for a name, or "dist/name": its entry, and the refusal of these stages if there is one."""
        own, _, name = name.rpartition("/")
        dist = dist or own
        dist = canonicalize_name(dist) if dist else None
        found = [e for e in self.entries(kind, name) if e.state != "shadowed" and dist in (None, e.dist)]
        if not found:
            return None, self._not_installed(kind, name, dist)
        enabled = [e for e in found if e.state != "disabled"]
        if not enabled:
            return found[0], found[0].reason
        entry = next((e for e in enabled if e.state != "ambiguous"), enabled[0])
        if dist is not None and len(enabled) == 1 and entry.state == "ambiguous":
            return entry, _core_refusal(entry)  # the qualified name settles the conflict
        return entry, entry.reason

    def load(self, kind: str, name: str, dist: str | None = None) -> Spec:
        """The spec of one plugin; imports exactly its module. Raises PluginError with the reason when it cannot."""
        entry, refusal = self.find(kind, name, dist)
        if entry is not None and refusal is None:
            refusal = self.open(entry)
        if refusal is not None or entry is None or entry.spec is None:
            raise PluginError(f"{kind} {name!r} cannot be used: {refusal}", fix=refusal.fix if refusal else "")
        return entry.spec

    def installed_version(self, dist: str) -> str | None:
        """Version of any installed dist, from its metadata."""
        found = next(self.distributions(name=dist), None)
        return found.version if found else None

    def distributions(self, name: str) -> Iterator[metadata.Distribution]:
        """Installed dists of a name, those of the host's own path first."""
        if self._path is not None:
            yield from metadata.distributions(name=name, path=self._path)
        yield from metadata.distributions(name=name)

    # ----------------------------------------------------------------------------------------------- loading

    def open(self, entry: Entry) -> Refusal | None:
        """Import and register the module of `entry`, check what it returns. The refusal, or None when it is usable."""
        if not entry.loaded:
            entry.loaded = True
            start = time.perf_counter()
            try:
                self._open(entry)
            except BaseException as e:
                if is_interrupt(e):
                    raise
                entry.trace = traceback.format_exc()
                offered = str(e) if isinstance(e, PluginError) else said_by(e)
                self._set(entry, "broken", 4, Refusal("broken", "a working plugin", offered, "lmkit plugins doctor"), e)
            entry.seconds = time.perf_counter() - start
        return entry.reason if entry.state in ("broken", "incompatible") else None

    def _open(self, entry: Entry) -> None:
        module = self._import(entry)
        self._register(module)
        entry.warnings.extend(self._pending(module))
        if entry.kind == EXTENSION:
            return
        specs = self._call_registration(module, entry.kind)
        if specs is None:
            raise PluginError(_no_hook(module, BY_NAME[entry.kind].hook))
        for spec in specs:
            if entry.name in getattr(spec, "architectures", (spec.name,)):
                break
        else:
            names = ", ".join(n for s in specs for n in getattr(s, "architectures", (s.name,))) or "nothing"
            raise PluginError(f"the entry point is named {entry.name!r}, but {entry.module} returns {names}")
        entry.spec = replace(spec, origin=Origin(entry.dist, entry.version, entry.module))
        kind = BY_NAME[entry.kind]
        current, adapted = kind.interface, bool(kind.adapter) and spec.interface == kind.interface - 1
        if spec.interface != current and not adapted:
            fix = "upgrade the plugin" if spec.interface < current else f"upgrade {CORE_DIST}"
            refusal = Refusal("interface-unsupported", f"{entry.kind} interface {current}", str(spec.interface), fix)
            self._set(entry, "incompatible", 3, refusal)

    def _import(self, entry: Entry) -> ModuleType:
        """The module of an entry. What failed once is not tried, nor waited for, again."""
        if (error := self._failed.get(entry.module)) is not None:
            raise error
        what = f"{entry.key} of {entry.dist}: importing {entry.module}"
        try:
            return limited(
                what, partial(import_module, entry.module), self._without(entry.module),
                printed=self._printed.setdefault(entry.module, []),
            )  # fmt: skip
        except BaseException as e:
            self._failed[entry.module] = e
            raise

    def _register(self, module: ModuleType) -> None:
        """Register a module once; if it does not fit the hook specs, leave no trace of it and raise PluginError."""
        if self.is_registered(module):
            return
        try:
            self.register(module, name=module.__name__)
        except (pluggy.PluginValidationError, ValueError) as e:
            if self.is_registered(module):  # older versions of pluggy register before they check
                self.unregister(module)
            raise PluginError(str(e)) from e

    def _call_registration(self, module: ModuleType, kind: str) -> list[Spec] | None:
        """What the registration hook of `module` returns, checked; None when it does not implement the hook."""
        key = (module.__name__, kind)
        if key not in self._specs:
            hook, spec_type = BY_NAME[kind].hook, BY_NAME[kind].spec
            if not any(impl.plugin is module for impl in getattr(self.hook, hook).get_hookimpls()):
                return None
            specs = self._call_alone(hook, module, {}, collect=True)
            for spec in specs:
                if type(spec) is not spec_type:
                    raise PluginError(f"{hook} of {module.__name__} returned {spec!r}, not a {spec_type.__name__}")
            self._specs[key] = specs
        return self._specs[key]

    def printed(self, module: str) -> str:
        """The beginning of what a module wrote to standard output when it was imported and registered."""
        return "".join(self._printed.get(module, ()))

    def uncalled_hooks(self, entry: Entry) -> list[tuple[str, str]]:
        """(hook, entry-point group it needs) of what the module of a loaded entry implements and nobody ever calls.

        Registration hooks are called in modules that an entry point of their kind names; behaviour hooks in extensions
        and in modules of what was chosen, which is too late to find a checkpoint.
        """
        module = self.get_plugin(entry.module)
        kinds = {e.kind for e in self.entries() if e.module == entry.module and e.state != "shadowed"}
        chosen = any(BY_NAME[kind].ask is not None or kind in _CHOSEN for kind in kinds - {EXTENSION})
        registers = {kind.hook: kind for kind in BY_NAME.values()}
        uncalled = []
        for caller in self.get_hookcallers(module) or () if module is not None else ():
            if (kind := registers.get(caller.name)) is not None:
                if kind.name not in kinds:
                    uncalled.append((caller.name, kind.group))
            elif caller.has_spec() and EXTENSION not in kinds and caller.name != _DOCTOR_CHECKS:
                too_late = caller.name == _RESOLVE_CHECKPOINT
                uncalled += [(caller.name, f"{PREFIX}{EXTENSION}")] if too_late or not chosen else []
        return sorted(uncalled)

    def specs_of(self, entry: Entry) -> list[Spec]:
        """Everything the module of a loaded entry registered for its kind."""
        return self._specs.get((entry.module, entry.kind), [])

    def leave_out(self, entry: Entry, why: str) -> None:
        """Take an entry for broken without importing it."""
        entry.loaded = True
        self._set(entry, "broken", 4, Refusal("broken", "a working plugin", why, f"uninstall {entry.dist}"))

    # ---------------------------------------------------------------------------------------- behaviour hooks

    def load_extensions(self) -> None:
        """Import the extensions (the only eager kind), at the first behaviour hook that is called."""
        if not self._extensions_loaded:
            self._extensions_loaded = True
            for entry in reversed(self.entries(EXTENSION)):  # pluggy calls the last one first: now in order of names
                if entry.state != "ok":
                    continue
                if refusal := self.open(entry):
                    self.warnings.append(f"extension {entry.name} ({entry.dist}) is off: {refusal.offered}")
                else:
                    self.activate(entry.module)

    def activate(self, module: str) -> None:
        """Let the behaviour hooks of a module take part: extensions, and the modules of what was selected."""
        self._active.add(module)

    def first(self, hook: str, gives: type = object, **kwargs: Any) -> Any:
        """The first result of a `firstresult` behaviour hook that is not None. It must be a `gives`.

        A plugin's own typed errors pass through; any other exception becomes a PluginError that names the plugin.
        """
        self.load_extensions()
        for plugin in self._implementers(hook):
            result = self._guarded(hook, plugin, kwargs)
            if not isinstance(result, gives | None):
                said = f"{self._owner(plugin.__name__)}: {hook} of {plugin.__name__} gave {result!r:.80}"
                raise PluginError(f"{said}, no {gives.__name__}", fix=self._without(plugin.__name__))
            if result is not None:
                return result
        return None

    def gather(self, hook: str, **kwargs: Any) -> list[tuple[str, Any]]:
        """(module name, item) of everything that implementations of an iterable behaviour hook return."""
        self.load_extensions()
        items: list[tuple[str, Any]] = []
        for plugin in self._implementers(hook):
            items.extend((plugin.__name__, item) for item in self._guarded(hook, plugin, kwargs, collect=True))
        return items

    def notify(self, hook: str, **kwargs: Any) -> None:
        """Call an observer hook: exceptions are logged, never raised."""
        self.load_extensions()
        for plugin in self._implementers(hook):
            try:
                self._call_alone(hook, plugin, kwargs)
            except BaseException as e:
                if is_interrupt(e):
                    raise
                log.exception("%s of %s failed", hook, plugin.__name__)

    def implements(self, hook: str) -> bool:
        """True if anybody implements a hook: lets the caller skip preparing its arguments."""
        self.load_extensions()
        return bool(self._implementers(hook))

    def _implementers(self, hook: str) -> list[ModuleType]:
        """Active modules that implement `hook`, in call order."""
        impls = reversed(getattr(self.hook, hook).get_hookimpls())
        return [impl.plugin for impl in impls if impl.plugin_name in self._active]

    def _guarded(self, hook: str, plugin: ModuleType, kwargs: Mapping[str, Any], collect: bool = False) -> Any:
        try:
            return self._call_alone(hook, plugin, kwargs, collect)
        except LmkitError:
            raise
        except BaseException as e:
            if is_interrupt(e):
                raise
            said = f"{self._owner(plugin.__name__)}: {hook} of {plugin.__name__} raised {said_by(e)}"
            raise PluginError(said, fix=self._without(plugin.__name__)) from e

    def _call_alone(self, hook: str, plugin: ModuleType, kwargs: Mapping[str, Any], collect: bool = False) -> Any:
        """Call one plugin's implementation only, so that provenance is known and one failure stops no other.

        With `collect` its results are iterables (often generators), which run in here too, up to MAX_ITEMS.
        """
        others = [p for p in self.get_plugins() if p is not plugin]

        def ask() -> Any:
            result = self.subset_hook_caller(hook, others)(**kwargs)
            return [item for items in result for item in islice(items, MAX_ITEMS + 1)] if collect else result

        printed = self._printed.setdefault(plugin.__name__, [])
        found = limited(f"{hook} of {plugin.__name__}", ask, self._without(plugin.__name__), printed=printed)
        if collect and len(found) > MAX_ITEMS:
            raise PluginError(f"{hook} of {plugin.__name__} yields more than {MAX_ITEMS} items")
        return found

    def _owner(self, module: str) -> str:
        """How errors name the plugin that a module belongs to."""
        entries = [e for e in self._entries or () if e.module == module]
        return f"{entries[0].kind} {entries[0].name!r} ({entries[0].dist} {entries[0].version})" if entries else module

    def without(self, module: str) -> str:
        """How to start without a module."""
        return self._without(module)

    def _without(self, module: str) -> str:
        """How to start without a module."""
        key = next((e.key for e in self._entries or () if e.module == module), module)
        return f"LMKIT_PLUGINS_DISABLE={key} starts without it"

    # -------------------------------------------------------------------------------------------------- pluggy

    def parse_hookimpl_opts(self, plugin: object, name: str) -> Any:
        """Only names that start with `lmkit_` can be hooks; wrappers are refused: they would hide other plugins."""
        if not name.startswith("lmkit_"):
            return None
        options = super().parse_hookimpl_opts(plugin, name)
        if options and (options["wrapper"] or options["hookwrapper"]):
            raise ValueError(f"{name}: hook wrappers are not supported")
        return options

    def _pending(self, module: ModuleType) -> list[str]:
        """Warnings for hooks of `module` that this core does not know."""
        unknown = [h.name for h in self.get_hookcallers(module) or () if not h.has_spec()]
        return [
            f"implements {name}, unknown to {CORE_DIST} {lmkit.__version__} (newer plugin? typo?)"
            + (f"; did you mean {like}?" if (like := nearest(name, hooks())) else "")
            for name in unknown
        ]

    # -------------------------------------------------------------------------------------------------- helpers

    def _read(self) -> Iterator[Entry]:
        seen: dict[str, str] = {}
        for dist in metadata.distributions() if self._path is None else metadata.distributions(path=self._path):
            try:
                entries = list(self._entries_of(dist))
            except Exception as e:  # damaged metadata: whatever the parsers raise, the other dists still count
                where = f"{dist.locate_file('')} ({type(e).__name__}: {e})"
                self.warnings.append(f"a dist with plugins has damaged metadata and is ignored: {where}")
                continue
            if not entries:
                continue
            dist_name, here = entries[0].dist, f"{entries[0].location} {entries[0].version}"
            if seen.get(dist_name) == here:
                continue  # the same directory twice on sys.path
            first = seen.setdefault(dist_name, here)
            for entry in entries:
                if first != here:
                    entry.state = "shadowed"
                    entry.reason = Refusal("name-conflict", f"{dist_name} installed once", f"also in {first}")
                yield entry

    def _entries_of(self, dist: metadata.Distribution) -> Iterator[Entry]:
        """The plugin entries of one dist; reads no more than the entry points of a dist that has none."""
        if PREFIX not in (dist.read_text("entry_points.txt") or ""):
            return
        points = [point for point in dist.entry_points if point.group.startswith(PREFIX) and point.group != COMMANDS]
        if not points:
            return
        about = dist.metadata  # parsed anew each time it is asked for
        name, version = canonicalize_name(about["Name"]), about["Version"]
        location, core_range = str(dist.locate_file("")), _core_range(about.get_all("Requires-Dist"))
        for point in points:
            kind = point.group.removeprefix(PREFIX)
            if kind not in GROUPS:
                self.warnings.append(f"{name}: unknown entry-point group {point.group} (newer plugin? typo?)")
                continue
            yield Entry(kind, point.name, point.value, name, version, location, core_range)

    def _apply_switches(self, entries: list[Entry]) -> None:
        disable, only = self.switches.unmatched(entries)
        for pattern in disable:
            self.warnings.append(f"{pattern.source}: {pattern.text!r} matches no plugin")
        if only:
            like = nearest(only[0].text, {e.key for e in entries} | {e.dist for e in entries})
            raise ConfigError(
                f"{only[0].source}: {only[0].text!r} matches no plugin",
                fix=f"did you mean {like!r}?" if like else "lmkit plugins list",
            )
        for i, source in self.switches.off(entries).items():
            if entries[i].state != "shadowed":
                entries[i].state, entries[i].stage = "disabled", 2
                entries[i].reason = Refusal(
                    "disabled", "an enabled plugin", f"disabled by {source}", f"change {source}"
                )

    def _set(self, entry: Entry, state: State, stage: int, reason: Refusal, cause: BaseException | None = None) -> None:
        if self.switches.strict:
            raise PluginError(f"{entry.key} ({entry.dist}) is {state}: {reason}") from cause
        entry.state, entry.stage, entry.reason = state, stage, reason

    def _not_installed(self, kind: str, name: str, dist: str | None) -> Refusal:
        command = install_command(kind, name)
        names = self.names(kind)
        like = nearest(name, names)
        offered = f"installed: {', '.join(names) or 'none'}"
        fix = command or (f"did you mean {like!r}?" if like else f"install a plugin for {kind} {name!r}")
        return Refusal("not-installed", f"{dist}/{name}" if dist else name, offered, fix)


def _no_hook(module: ModuleType, hook: str) -> str:
    """Why a module registers nothing, with what its author may have meant."""
    text = f"{module.__name__} does not implement {hook}"
    if callable(getattr(module, hook, None)):
        return f"{text}: its function of that name is not marked with @hookimpl (of lmkit.api)"
    functions = [name for name in vars(module) if name.startswith("lmkit_") and name not in hooks()]
    if like := nearest(hook, functions):
        return f"{text}; it has a function {like}: is that a misspelling?"
    return text


def _core_range(requires: Iterable[str] | None) -> str | None:
    """The specifier of a dist's requirement on the core, or None when it states none."""
    for text in requires or ():
        try:
            requirement = Requirement(text)
        except InvalidRequirement:
            continue
        if canonicalize_name(requirement.name) == CORE_DIST and (
            requirement.marker is None or requirement.marker.evaluate({"extra": ""})
        ):
            return str(requirement.specifier)
    return None


def _core_refusal(entry: Entry) -> Refusal | None:
    """Stage 3: does the range of cores the dist was made for contain this one? pip checks it only at install time."""
    if not entry.core_range:
        return None
    core = Version(lmkit.__version__)
    failed = [s for s in Requirement(f"x{entry.core_range}").specifier if not s.contains(core, prereleases=True)]
    if not failed:
        return None
    lower = {">=", ">", "~=", "=="}
    too_old = any(s.operator in lower and core < Version(s.version.removesuffix(".*")) for s in failed)
    fix = f"upgrade {CORE_DIST if too_old else entry.dist}"
    return Refusal(
        "core-too-old" if too_old else "core-too-new", f"{CORE_DIST}{entry.core_range}", lmkit.__version__, fix
    )
