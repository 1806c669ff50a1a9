"""Clean environments, quickly: a fresh venv sees our third-party packages and only the lmkit dists it is given."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import venv
import zipfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import chdir
from importlib import import_module, metadata
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


class Wheels:
    """Editable wheels of the repository's dists, each built once: what pip would unpack into an environment."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.built: dict[str, Path] = {}

    def of(self, path: str) -> Path:
        """The wheel of the dist in the folder `path`."""
        if path not in self.built:
            backend = tomllib.loads((ROOT / path / "pyproject.toml").read_text())["build-system"]["build-backend"]
            target = self.folder / path.replace("/", "-")
            target.mkdir()
            code = f"import {backend} as b; b.build_editable({str(target)!r})"
            if backend == "flit_core.buildapi":  # of pure Python, quickly
                with chdir(ROOT / path):
                    import_module(backend).build_editable(str(target))
            else:
                subprocess.run([sys.executable, "-c", code], cwd=ROOT / path, check=True, capture_output=True)
            self.built[path] = next(target.glob("*.whl"))
        return self.built[path]


class Env:
    """A virtual environment with some lmkit dists."""

    def __init__(self, path: Path, third_party: Path, wheels: Wheels) -> None:
        # No pip of its own: with it would come an old setuptools, before the one in `third_party`.
        venv.create(path, symlinks=True)
        self.bin = path / "bin"
        self.site = next(path.glob("lib/python*/site-packages"))
        self.wheels = wheels
        (self.site / "third_party.pth").write_text(f"{third_party}\n")

    def install(self, paths: Iterable[str]) -> None:
        """Dists of the repository, by their folders in it."""
        for path in paths:
            with zipfile.ZipFile(self.wheels.of(path)) as wheel:
                wheel.extractall(self.site)
        for dist in metadata.distributions(path=[str(self.site)]):
            for script in dist.entry_points.select(group="console_scripts"):
                file = self.bin / script.name
                call = f"import sys\nfrom {script.module} import {script.attr}\nsys.exit({script.attr}())\n"
                file.write_text(f"#!{self.bin / 'python'}\n{call}")
                file.chmod(0o755)

    def pip_install(self, path: Path) -> None:
        """A project of somebody else, as its author would."""
        pip = [sys.executable, "-m", "pip", "--python", str(self.bin / "python"), "install", "-q", "--no-deps"]
        options = ["--no-build-isolation", "--no-index", "-e", str(path)]
        done = subprocess.run([*pip, *options], cwd=ROOT, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr

    def run(self, *command: str, timeout: float = 120) -> subprocess.CompletedProcess[str]:
        """Run a command of the environment ("lmkit", "python") from a neutral folder."""
        env = {k: v for k, v in os.environ.items() if not k.startswith(("LMKIT_", "PYTHON"))}
        env |= {"COLUMNS": "200", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        full = [str(self.bin / command[0]), *command[1:]]
        return subprocess.run(full, cwd=self.bin, env=env, capture_output=True, text=True, timeout=timeout)


@pytest.fixture(scope="session")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Wheels:
    pytest.importorskip("flit_core", reason="clean environments are built with flit_core")
    return Wheels(tmp_path_factory.mktemp("wheels"))


@pytest.fixture(scope="session")
def third_party(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of links to everything installed here but lmkit's own dists."""
    folder = tmp_path_factory.mktemp("third_party")
    purelib = sysconfig.get_path("purelib")
    for site in dict.fromkeys([purelib, *(p for p in sys.path if p.endswith("site-packages"))]):
        for entry in Path(site).iterdir():
            if not entry.name.startswith(("lmkit", "__editable__", "pip")) and entry.suffix != ".pth":
                link = folder / entry.name
                if not link.exists():
                    link.symlink_to(entry)
    return folder


@pytest.fixture
def make_env(tmp_path: Path, third_party: Path, wheels: Wheels) -> Iterator[Callable[[Iterable[str]], Env]]:
    """make_env(paths) -> Env with those dists of the repository."""
    made: list[Path] = []

    def make(paths: Iterable[str]) -> Env:
        path = tmp_path / f"env{len(made)}"
        made.append(path)
        env = Env(path, third_party, wheels)
        env.install(paths)
        return env

    yield make
    for path in made:
        shutil.rmtree(path, ignore_errors=True)
