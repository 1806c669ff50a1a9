"""The examples of plugins as whoever copies them has them: wheels, built and unpacked beside what is installed."""

from __future__ import annotations

import os
import sys
import tomllib
import zipfile
from collections.abc import Iterator
from contextlib import chdir
from dataclasses import dataclass
from importlib import invalidate_caches
from pathlib import Path
from typing import Any

import pytest
from flit_core import buildapi

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = sorted(path.parent for path in ROOT.glob("examples/plugins/*/pyproject.toml"))


@dataclass(frozen=True)
class Example:
    """One dist of examples/plugins."""

    folder: Path

    @property
    def project(self) -> dict[str, Any]:
        return tomllib.loads((self.folder / "pyproject.toml").read_text())

    @property
    def plugins(self) -> list[str]:
        """What it registers, as the command line names it: kind:name."""
        groups = self.project["project"]["entry-points"]
        return [f"{group.removeprefix('lmkit.')}:{name}" for group, points in groups.items() for name in points]

    @property
    def module(self) -> str:
        return str(self.project["tool"]["flit"]["module"]["name"])


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for each example, from its wheel; what pip does with a wheel of pure Python, without the network."""
    wheels, folder = tmp_path_factory.mktemp("wheels"), tmp_path_factory.mktemp("site")
    for path in FOLDERS:
        with chdir(path):
            name = buildapi.build_wheel(str(wheels))
        with zipfile.ZipFile(wheels / name) as wheel:
            wheel.extractall(folder / path.name)
    return folder


@pytest.fixture(scope="module")
def installed(site: Path) -> Iterator[Path]:
    """They are there for this process; what is imported of them is forgotten afterwards."""
    folders = [str(site / path.name) for path in FOLDERS]
    sys.path[:0] = folders
    invalidate_caches()
    yield site
    sys.path[:] = [path for path in sys.path if path not in folders]
    modules = {Example(path).module for path in FOLDERS}
    for name in [name for name in sys.modules if name.partition(".")[0] in modules]:
        del sys.modules[name]
    invalidate_caches()


def environment(site: Path, *examples: Example) -> dict[str, str]:
    """Of a child that has those examples."""
    folders = [str(site / example.folder.name) for example in examples]
    others = [path for path in sys.path if path and not path.startswith(str(site))]
    return {**os.environ, "PYTHONPATH": os.pathsep.join([*folders, *others])}
