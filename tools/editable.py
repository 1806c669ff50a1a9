"""Builds editable wheels of dists of this repository: python tools/editable.py WHEELS FOLDER...

Installed with `pip install --no-deps WHEELS/*.whl` they do what `pip install -e FOLDER...` does. All are built by one
process: pip starts three for each, a second of work that a hundred dists make minutes.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from flit_core import buildapi


def main(wheels: str, *folders: str) -> None:
    """Writes one wheel per folder into `wheels`."""
    Path(wheels).mkdir(parents=True, exist_ok=True)
    into = str(Path(wheels).resolve())
    root = Path.cwd()
    for folder in folders:
        os.chdir(root / folder)
        buildapi.build_editable(into)


if __name__ == "__main__":
    main(*sys.argv[1:])
