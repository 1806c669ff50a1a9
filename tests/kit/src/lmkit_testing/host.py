"""Fixtures around the plugin host: `lmkit_host` (discovery blocked), `fake_device`, `dist_dir`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from lmkit.api import Choice, DeviceInfo, SelectRequest
from lmkit.plugins.host import PluginHost
from lmkit.plugins.platforms import Description
from lmkit.plugins.select import Outcome, consider, failure
from lmkit.plugins.switches import Switches

from lmkit_testing.dists import write_dist


@pytest.fixture
def lmkit_host() -> PluginHost:
    """A host that sees no installed plugin; `host.add(module)` registers one."""
    return PluginHost(path=[], switches=Switches())


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
