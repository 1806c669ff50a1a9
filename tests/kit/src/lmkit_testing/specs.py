"""Conformance common to all kinds. The suites of single kinds are subclasses; a plugin's test names the plugin:

class TestMine(AttentionConformance):
    plugin = "attention:mybackend"
    skip = {"test_what": "the reason, which is printed"}
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import Any, ClassVar

import pytest
from lmkit.api import ModelSpec, PluginError, Spec
from lmkit.kinds import BY_NAME
from lmkit.plugins.host import Entry, PluginHost
from lmkit.plugins.options import options_type, parse_options
from lmkit.plugins.refs import load_ref
from lmkit.plugins.stages import requirements
from lmkit.plugins.switches import Switches
from lmkit_cli.health import IMPORT_SECONDS, import_budgets, private_imports

from lmkit_testing.clock import least
from lmkit_testing.once import once
from lmkit_testing.signatures import wrong_signatures

UNDER_TEST: list[type[ExtensionConformance]] = []  # every class of a kit, in the order in which they were read


@cache
def _clean_host(path: tuple[str, ...]) -> PluginHost:
    return PluginHost(switches=Switches())


def clean_host() -> PluginHost:
    """What is installed, looked at once and without switches."""
    return _clean_host(tuple(sys.path))


def find_plugin(plugin: str) -> tuple[PluginHost, Entry, Spec]:
    """Host, entry and spec of "kind:name"; the host has no switches. Raises PluginError with the reason."""
    host = clean_host()
    entry = loaded_entry(host, plugin)
    kind, _, name = plugin.partition(":")
    return host, entry, host.load(kind, name)


def loaded_entry(host: PluginHost, plugin: str) -> Entry:
    """The entry of "kind:name", imported. Raises PluginError with the reason when it cannot be used."""
    kind, _, name = plugin.partition(":")
    entry, refusal = host.find(kind, name)
    refusal = refusal or (host.open(entry) if entry else None)
    if entry is None or refusal is not None:
        raise PluginError(f"{plugin} cannot be used: {refusal}", fix=refusal.fix if refusal else "")
    return entry


def plugins_under_test() -> Iterator[tuple[type[ExtensionConformance], Entry]]:
    """The classes of kits that this run has read, each with the entry of its plugin, where that can be used."""
    for kit in UNDER_TEST:
        try:
            yield kit, loaded_entry(clean_host(), kit.plugin)
        except PluginError:  # the test of that class says so
            continue


BUDGETS: dict[str, tuple[list[str], float]] = {}


def budget(module: str) -> tuple[list[str], float]:
    """What importing `module` costs, measured once, together with all that the run will ask for."""
    if module not in BUDGETS:
        wanted = {module}
        for kit, entry in plugins_under_test():
            wanted.add(entry.module)
            if getattr(kit, "torch_free_target", False):
                wanted.add(clean_host().load(entry.kind, entry.name).target.partition(":")[0])
        BUDGETS.update(once(import_budgets, sorted(wanted - BUDGETS.keys())))
    return BUDGETS[module]


# Run in a fresh process: one fork for each dist, which begins with nothing imported but the host.
LOAD_ALONE = """
import json, os, sys, traceback
from lmkit.plugins.host import PluginHost
from lmkit.plugins.switches import Pattern, Switches

everybody, dists = json.loads(sys.argv[1])

def load(dist):
    off = tuple(Pattern(other, "test") for other in everybody if other != dist)
    host = PluginHost(switches=Switches(disable=off))
    entries = [entry for entry in host.entries() if entry.dist == dist]
    assert entries, "it has no plugins"
    for entry in entries:
        assert host.open(entry) is None, (entry.key, entry.reason)

for dist in dists:
    pid = os.fork()
    if not pid:
        try:
            load(dist)
        except BaseException:
            traceback.print_exc()
            sys.stderr.flush()
            os._exit(1)
        os._exit(0)
    _, status = os.waitpid(pid, 0)
    print("ALONE", json.dumps([dist, status]), flush=True)
"""
ALONE: dict[str, str] = {}


def alone(dist: str) -> str:
    """What goes wrong where the plugins of one dist are loaded in a fresh process, with all others disabled; ""
    where nothing does. Tried once, together with all dists that the run will ask for."""
    if dist not in ALONE:
        ALONE.update(
            once(load_alone, sorted({dist, *(entry.dist for _, entry in plugins_under_test())} - ALONE.keys()))
        )
    return ALONE[dist]


def load_alone(dists: Sequence[str]) -> dict[str, str]:
    """The same of each of several dists."""
    everybody = sorted({entry.dist for entry in clean_host().entries()})
    command = [sys.executable, "-c", LOAD_ALONE, json.dumps([everybody, dists])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False, env=environment)
    said = (line.removeprefix("ALONE ") for line in done.stdout.splitlines() if line.startswith("ALONE "))
    found = dict(map(json.loads, said))
    return {each: "" if found.get(each) == 0 else f"{each} does not load alone:\n{done.stderr}" for each in dists}


class ExtensionConformance:
    """What every module of hooks must do; all that is asked of an extension."""

    plugin: ClassVar[str] = ""  # "kind:name"
    skip: ClassVar[Mapping[str, str]] = {}  # test name -> reason

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if cls.plugin:
            UNDER_TEST.append(cls)

    @pytest.fixture(autouse=True)
    def _skips(self, request: pytest.FixtureRequest) -> None:
        if not self.plugin:
            pytest.skip("a base class: set `plugin`")
        name = request.node.name
        for key in (name, name.partition("[")[0]):
            if key in self.skip:
                pytest.skip(self.skip[key])

    @pytest.fixture(scope="class")
    @classmethod
    def host(cls) -> PluginHost:
        return clean_host()

    @pytest.fixture(scope="class")
    @classmethod
    def entry(cls, host: PluginHost) -> Entry:
        return loaded_entry(host, cls.plugin)

    def test_hooks_module_is_light(self, entry: Entry) -> None:
        heavy, seconds = budget(entry.module)
        assert not heavy, f"importing {entry.module} imports {heavy}"
        if seconds >= IMPORT_SECONDS:
            seconds = least(lambda: import_budgets([entry.module])[entry.module][1], IMPORT_SECONDS)
        assert seconds < IMPORT_SECONDS, f"importing {entry.module} takes {seconds:.2f} s"

    def test_hooks_are_known(self, host: PluginHost, entry: Entry) -> None:
        assert not entry.warnings
        assert host.get_hookcallers(host.get_plugin(entry.module)), f"{entry.module} implements no hook"

    def test_nothing_is_printed(self, host: PluginHost, entry: Entry) -> None:
        """Standard output is the command's, whose answer may be JSON."""
        assert not host.printed(entry.module), f"{entry.module} prints when it is imported or registers"

    def test_every_hook_is_called(self, host: PluginHost, entry: Entry) -> None:
        """Each hook has the entry point without which nobody calls it."""
        assert not (uncalled := host.uncalled_hooks(entry)), f"{entry.module}: (hook, missing group) {uncalled}"

    def test_core_range_is_stated(self, entry: Entry) -> None:
        assert entry.dist == "lmkit-core" or entry.core_range, f"{entry.dist} states no range of lmkit-core"

    def test_imports_only_the_public_surface(self, entry: Entry) -> None:
        assert not private_imports(entry.module)

    def test_works_alone(self, entry: Entry) -> None:
        """With every other plugin disabled, in a fresh process, it still loads."""
        assert not (problem := alone(entry.dist)), problem


class PluginConformance(ExtensionConformance):
    """What every plugin with a spec must do. Subclasses for a kind add tests made from what the spec declares."""

    torch_free_target: ClassVar[bool] = False  # True: importing the target must not load torch

    @pytest.fixture(scope="class")
    @classmethod
    def spec(cls, host: PluginHost, entry: Entry) -> Any:
        return host.load(entry.kind, entry.name)

    @pytest.fixture
    def target(self, spec: Spec, host: PluginHost, entry: Entry) -> Any:
        """The implementation, through the adapter where it is of the interface before; skips, saying so, where what
        the plugin requires is not installed."""
        if missing := [refusal.needed for refusal in requirements(spec, host.installed_version)]:
            pytest.skip(f"needs {', '.join(missing)}")
        kind, found = BY_NAME[entry.kind], load_ref(spec.target, spec.name)
        return load_ref(kind.adapter)(found) if kind.adapter and spec.interface < kind.interface else found

    def test_registration_is_pure(self, host: PluginHost, entry: Entry) -> None:
        """Calling the hook twice gives equal specs."""
        hook = BY_NAME[entry.kind].hook
        first, second = (list(getattr(host.get_plugin(entry.module), hook)()) for _ in range(2))
        assert first == second

    def test_entry_points_match_specs(self, host: PluginHost, entry: Entry) -> None:
        """Every spec has its entry points, and every entry point its spec."""
        names = {e.name for e in host.entries(entry.kind) if e.module == entry.module}
        specs = host.specs_of(entry)
        declared = {n for s in specs for n in (s.architectures if isinstance(s, ModelSpec) else (s.name,))}
        assert names == declared

    def test_refs_resolve(self, spec: Spec, target: Any) -> None:
        assert target is not None
        for name in ("options", "check", "probe", "describe"):
            if ref := getattr(spec, name, None):
                assert load_ref(ref, spec.name) is not None

    def test_signatures_are_those_of_the_protocol(self, spec: Spec, entry: Entry, target: Any) -> None:
        """What is called of it can be called as its kind writes it."""
        options = parse_options(entry.kind, spec, {})
        assert not (wrong := wrong_signatures(spec, entry.kind, target, options)), "\n".join(wrong)

    def test_target_is_torch_free(self, spec: Spec, target: Any) -> None:
        if not self.torch_free_target:
            pytest.skip("a target of this kind may import torch")
        module = spec.target.partition(":")[0]
        heavy, _ = budget(module)
        assert heavy is not None, f"importing {module} does not end"
        assert "torch" not in heavy

    def test_spec_is_plain_data(self, spec: Spec) -> None:
        """Frozen, shown by repr: no class object or callable inside."""
        assert dataclasses.is_dataclass(spec)
        for field in dataclasses.fields(spec):
            value = getattr(spec, field.name)
            assert not callable(value), f"{field.name} is a callable; name it as text"

    def test_options_round_trip(self, spec: Spec, entry: Entry) -> None:
        if options_type(spec) is None:
            pytest.skip("has no options")
        defaults = parse_options(entry.kind, spec, {})
        assert parse_options(entry.kind, spec, defaults) == defaults
        assert parse_options(entry.kind, spec, json.loads(json.dumps(defaults))) == defaults
