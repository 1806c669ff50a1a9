"""Conformance common to all kinds. The suites of single kinds are subclasses; a plugin's test names the plugin:

class TestMine(AttentionConformance):
    plugin = "attention:mybackend"
    skip = {"test_what": "the reason, which is printed"}
"""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from collections.abc import Mapping
from typing import Any, ClassVar

import pytest

from lmkit.api import ModelSpec, Spec
from lmkit.hookspecs import REGISTRATION
from lmkit.plugins.doctor import IMPORT_SECONDS, import_budget, private_imports
from lmkit.plugins.host import Entry, PluginHost
from lmkit.plugins.options import options_type, parse_options
from lmkit.plugins.refs import load_ref
from lmkit.plugins.switches import Switches


def find_plugin(plugin: str) -> tuple[PluginHost, Entry, Spec]:
    """Host, entry and spec of "kind:name"; the host has no switches. Raises PluginError with the reason."""
    host = PluginHost(switches=Switches(strict=False))
    kind, _, name = plugin.partition(":")
    spec = host.load(kind, name)
    entry, _ = host.find(kind, name)
    assert entry is not None
    return host, entry, spec


class PluginConformance:
    """What every plugin must do. Subclasses for a kind add tests generated from what the spec declares."""

    plugin: ClassVar[str] = ""  # "kind:name"
    skip: ClassVar[Mapping[str, str]] = {}  # test name -> reason
    torch_free_target: ClassVar[bool] = False  # True: importing the target must not load torch

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
    def found(cls) -> tuple[PluginHost, Entry, Spec]:
        return find_plugin(cls.plugin)

    @pytest.fixture(scope="class")
    @classmethod
    def host(cls, found: tuple[PluginHost, Entry, Spec]) -> PluginHost:
        return found[0]

    @pytest.fixture(scope="class")
    @classmethod
    def entry(cls, found: tuple[PluginHost, Entry, Spec]) -> Entry:
        return found[1]

    @pytest.fixture(scope="class")
    @classmethod
    def spec(cls, found: tuple[PluginHost, Entry, Spec]) -> Any:
        return found[2]

    @pytest.fixture
    def target(self, spec: Spec) -> Any:
        """The implementation; skips, saying so, where what the plugin requires is not installed."""
        host = PluginHost(switches=Switches())
        if missing := [
            r for r in spec.requires if host.installed_version(r.split(">")[0].split("=")[0].strip()) is None
        ]:
            pytest.skip(f"needs {', '.join(missing)}")
        return load_ref(spec.target, spec.name)

    def test_hooks_module_is_light(self, entry: Entry) -> None:
        heavy, seconds = import_budget(entry.module)
        assert not heavy, f"importing {entry.module} imports {heavy}"
        assert seconds < IMPORT_SECONDS, f"importing {entry.module} takes {seconds:.2f} s"

    def test_registration_is_pure(self, host: PluginHost, entry: Entry) -> None:
        """Calling the hook twice gives equal specs."""
        hook = REGISTRATION[entry.kind]
        module = next(p for p in host.get_plugins() if getattr(p, "__name__", "") == entry.module)
        first, second = (list(getattr(module, hook)()) for _ in range(2))
        assert first == second

    def test_entry_points_match_specs(self, host: PluginHost, entry: Entry) -> None:
        """Every spec has its entry points, and every entry point its spec."""
        names = {e.name for e in host.entries(entry.kind) if e.module == entry.module}
        specs = host.specs_of(entry)
        declared = {n for s in specs for n in (s.architectures if isinstance(s, ModelSpec) else (s.name,))}
        assert names == declared

    def test_hooks_are_known(self, entry: Entry) -> None:
        assert not entry.warnings

    def test_core_range_is_stated(self, entry: Entry) -> None:
        assert entry.dist == "lmkit-core" or entry.core_range, f"{entry.dist} states no range of lmkit-core"

    def test_refs_resolve(self, spec: Spec, target: Any) -> None:
        assert target is not None
        for name in ("options", "check", "probe", "describe", "communicator"):
            if ref := getattr(spec, name, None):
                assert load_ref(ref, spec.name) is not None

    def test_spec_is_plain_data(self, spec: Spec) -> None:
        """Frozen, hashable by parts, shown by repr: no class object or callable inside."""
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

    def test_imports_only_the_public_surface(self, entry: Entry) -> None:
        assert not private_imports(entry.module)

    def test_works_alone(self, host: PluginHost, entry: Entry) -> None:
        """With every other plugin disabled, in a fresh process, it still loads."""
        others = sorted({e.dist for e in host.entries()} - {entry.dist})
        code = (
            "from lmkit.plugins.host import PluginHost\nfrom lmkit.plugins.switches import Pattern, Switches\n"
            f"off = tuple(Pattern(d, 'test') for d in {others!r})\n"
            f"print(PluginHost(switches=Switches(disable=off)).load({entry.kind!r}, {entry.name!r}).name)"
        )
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 0, done.stderr
