"""Writes what follows from the plugins' pyproject files: the core's catalog of official plugins.

python tools/sync.py           write
python tools/sync.py --check   exit 1 if something is stale
"""

from __future__ import annotations

import json
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CATALOG = ROOT / "core" / "src" / "lmkit" / "plugins" / "catalog.json"


def catalog(root: Path = ROOT) -> str:
    """{kind: {name: dist}} over all plugins of the repository, as JSON text."""
    kinds: dict[str, dict[str, str]] = {}
    for path in sorted(root.glob("plugins/*/*/pyproject.toml")):
        project = tomllib.loads(path.read_text())["project"]
        for group, names in project.get("entry-points", {}).items():
            if group.startswith("lmkit."):
                kinds.setdefault(group.removeprefix("lmkit."), {}).update(dict.fromkeys(names, project["name"]))
    ordered = {kind: dict(sorted(names.items())) for kind, names in sorted(kinds.items())}
    return json.dumps(ordered, indent=2) + "\n"


def main(arguments: list[str]) -> int:
    text = catalog()
    if arguments == ["--check"]:
        if CATALOG.read_text() == text:
            return 0
        print(f"{CATALOG.relative_to(ROOT)} is stale: run python tools/sync.py")
        return 1
    CATALOG.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
