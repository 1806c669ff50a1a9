"""Fixtures around the plugin host: `lmkit_host` (discovery blocked), `fake_device`, `dist_dir`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from lmkit.api import Choice, DeviceInfo, SelectRequest
from lmkit.kinds import BY_NAME, EXTENSION
from lmkit.plugins.host import Entry, PluginHost
from lmkit.plugins.platforms import Description
from lmkit.plugins.select import Outcome, consider, failure
from lmkit.plugins.switches import Switches

from lmkit_testing.dists import write_dist


class OpenHost(PluginHost):
    """A host to which modules are added that no dist has."""

    def __init__(self, **how: Any) -> None:
        super().__init__(**how)
        self._modules: dict[str, ModuleType] = {}  # not imported

    def add(self, module: ModuleType, *, dist: str = "test", version: str = "0.0.0") -> list[Entry]:
        """Register a module as if its dist were installed, with one entry per spec it returns."""
        entries = self.scan()
        self._modules[module.__name__] = module
        self._register(module)
        added = [
            Entry(kind, name, module.__name__, dist, version, "", None)
            for kind in BY_NAME
            for spec in self._call_registration(module, kind) or ()
            for name in getattr(spec, "architectures", (spec.name,))
        ]
        if not added:
            name = module.__name__.rsplit(".", 1)[-1]
            added.append(Entry(EXTENSION, name, module.__name__, dist, version, "", None))
            self.activate(module.__name__)
        entries.extend(added)
        for entry in added:
            self.open(entry)
        return added

    def _import(self, entry: Entry) -> ModuleType:
        return self._modules.get(entry.module) or super()._import(entry)


@pytest.fixture
def lmkit_host() -> OpenHost:
    """A host that sees no installed plugin; `host.add(module)` registers one."""
    return OpenHost(path=[], switches=Switches())


@pytest.fixture
def fake_device() -> Callable[..., DeviceInfo]:
    """fake_device("name", cc=(9, 0), mem="80GiB", dtypes=(...)) -> DeviceInfo."""
    return make_device


def make_device(
    platform: str,
    cc: tuple[int, int] | None = None,
    mem: str = "16GiB",
    dtypes: tuple[str, ...] = ("bfloat16", "float16", "float32"),
) -> DeviceInfo:
    """A device that is only described, for requests in tests."""
    total = Description.parse(f"{platform}:{mem}").total_memory
    return DeviceInfo(
        platform=platform, device_type=platform, name=f"fake {platform}", capability=cc, total_memory=total,
        free_memory=total, dtypes=dtypes, described=True,
    )  # fmt: skip


class DistDir:
    """A folder on sys.path to which tests add dists; `host()` sees those and nothing else."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def add(self, name: str, *args: Any, **kwargs: Any) -> None:
        write_dist(self.path, name, *args, **kwargs)

    def host(self, **switches: Any) -> PluginHost:
        return PluginHost(path=[str(self.path)], switches=Switches(**switches))


@pytest.fixture
def dist_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[DistDir]:
    """A DistDir; modules imported from it are forgotten afterwards."""
    folder = tmp_path / "dists"
    folder.mkdir()
    monkeypatch.syspath_prepend(str(folder))
    before = set(sys.modules)
    yield DistDir(folder)
    for name in set(sys.modules) - before:
        if str(folder) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


def codes(outcome: Outcome) -> dict[str, set[str]]:
    """Refusal codes by candidate name: what tests should assert on."""
    return {c.name: {r.code for r in c.reasons} for c in outcome.candidates if not c.ok}


def select(
    host: PluginHost, request: SelectRequest | Sequence[SelectRequest], user: str = "auto", **how: Any
) -> Choice:
    """The choice for `request`. Raises SelectionError with all refusals when no candidate passes."""
    outcome = consider(host, request, user, **how)
    if outcome.chosen is None:
        raise failure(host, outcome, lambda: consider(host, request, **how))
    return outcome.choice()
