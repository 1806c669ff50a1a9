"""lmkit from the checkout, without installing it: a folder for PYTHONPATH with a link to each package and its metadata.

Nothing is built and nothing written into the checkout, so it needs neither pip nor a network; plugins are found as
where they are installed, by the entry points of their dists. Wheels carried along stand in for what is missing.
"""

from __future__ import annotations

import os
import re
import tomllib
import zipfile
from importlib import metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
WHEELS = ROOT / "bench" / "wheels"


def projects() -> dict[Path, dict[str, Any]]:
    """The [project] tables of all dists of the checkout, by folder."""
    files = [ROOT / "core/pyproject.toml", ROOT / "tests/kit/pyproject.toml", *ROOT.glob("plugins/*/*/pyproject.toml")]
    return {file.parent: tomllib.loads(file.read_text())["project"] for file in sorted(files)}


def normal(name: str) -> str:
    """A dist's name as all compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def make(folder: Path, wheels: Path = WHEELS) -> list[str]:
    """Fills `folder`; the names of wheels that were unpacked. What the interpreter has is never replaced."""
    folder.mkdir(parents=True, exist_ok=True)
    for where, project in projects().items():
        for package in (where / "src").iterdir():
            if (package / "__init__.py").exists() and not (link := folder / package.name).exists():
                os.symlink(package, link)
        about = folder / f"{project['name'].replace('-', '_')}-{project['version']}.dist-info"
        about.mkdir(exist_ok=True)
        needs = "".join(f"Requires-Dist: {need}\n" for need in project.get("dependencies", ()))
        (about / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n{needs}"
        )
        groups = {**project.get("entry-points", {}), "console_scripts": project.get("scripts", {})}
        texts = [f"[{group}]\n" + "".join(f"{k} = {v}\n" for k, v in named.items()) for group, named in groups.items()]
        (about / "entry_points.txt").write_text("\n".join(texts))
    return [unpack(wheel, folder) for wheel in sorted(wheels.glob("*.whl")) if not installed(wheel)]


def installed(wheel: Path) -> bool:
    """Whether the interpreter has any version of it."""
    try:
        metadata.version(normal(wheel.name.split("-")[0]))
    except metadata.PackageNotFoundError:
        return False
    return True


def unpack(wheel: Path, folder: Path) -> str:
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    return wheel.name
