"""Clean environments, quickly: a fresh venv sees our third-party packages and only the lmkit dists it is given."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


class Env:
    """A virtual environment with some lmkit dists."""

    def __init__(self, path: Path, third_party: Path) -> None:
        # No pip of its own: with it would come an old setuptools, before the one in `third_party`.
        venv.create(path, symlinks=True)
        self.bin = path / "bin"
        site = next(path.glob("lib/python*/site-packages"))
        (site / "third_party.pth").write_text(f"{third_party}\n")

    def install(self, paths: Iterable[str | Path]) -> None:
        targets = [arg for p in paths for arg in ("-e", str(p))]
        pip = [
            sys.executable,
            "-m",
            "pip",
            "--python",
            str(self.bin / "python"),
            "install",
            "-q",
            "--no-deps",
            "--no-build-isolation",
            "--no-index",
        ]
        done = subprocess.run([*pip, *targets], cwd=ROOT, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr

    def run(self, *command: str, timeout: float = 120) -> subprocess.CompletedProcess[str]:
        """Run a command of the environment ("lmkit", "python") from a neutral folder."""
        env = {k: v for k, v in os.environ.items() if not k.startswith(("LMKIT_", "PYTHON"))}
        env |= {"COLUMNS": "200", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        full = [str(self.bin / command[0]), *command[1:]]
        return subprocess.run(full, cwd=self.bin, env=env, capture_output=True, text=True, timeout=timeout)


@pytest.fixture(scope="session")
def third_party(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of links to everything installed here but lmkit's own dists."""
    pytest.importorskip("flit_core", reason="clean environments are built with flit_core")
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
def make_env(tmp_path: Path, third_party: Path) -> Iterable[Callable[[Iterable[str | Path]], Env]]:
    """make_env(paths) -> Env with those projects installed."""
    made: list[Path] = []

    def make(paths: Iterable[str | Path]) -> Env:
        path = tmp_path / f"env{len(made)}"
        made.append(path)
        env = Env(path, third_party)
        env.install(paths)
        return env

    yield make
    for path in made:
        shutil.rmtree(path, ignore_errors=True)
