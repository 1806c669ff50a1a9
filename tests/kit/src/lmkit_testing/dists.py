"""Dists made of a few text files: what the host sees of a plugin, without pip."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path


def write_dist(
    folder: Path,
    name: str,
    entry_points: Mapping[str, Mapping[str, str]] | None = None,
    modules: Mapping[str, str] | None = None,
    *,
    version: str = "0.1.0",
    requires: Sequence[str] = ("lmkit-core>=0.1,<0.3",),
    summary: str = "",
) -> Path:
    """Write an importable dist into `folder` (to be put on sys.path); returns `folder`.

    `entry_points` is {group without "lmkit.": {name: module}}, `modules` {"pkg.mod": source}; packages get an empty
    `__init__.py`.
    """
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    lines = [
        "Metadata-Version: 2.1",
        f"Name: {name}",
        f"Version: {version}",
        *([f"Summary: {summary}"] if summary else []),
        *(f"Requires-Dist: {r}" for r in requires),
    ]
    (info / "METADATA").write_text("\n".join(lines) + "\n")
    text = ""
    for group, points in (entry_points or {}).items():
        text += f"[lmkit.{group}]\n" + "".join(f"{key} = {value}\n" for key, value in points.items()) + "\n"
    (info / "entry_points.txt").write_text(text)
    written = []
    for module, source in (modules or {}).items():
        path = folder.joinpath(*module.split("."))
        for parent in path.relative_to(folder).parents:
            if parent != Path("."):
                (folder / parent).mkdir(exist_ok=True)
                (folder / parent / "__init__.py").touch()
        path.with_suffix(".py").write_text(source)
        written.append(str(path.with_suffix(".py").relative_to(folder)))
    (info / "RECORD").write_text("".join(f"{path},,\n" for path in written))
    return folder
