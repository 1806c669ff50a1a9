"""What sentence-transformers writes beside a checkpoint: modules.json and a folder for each module. Torch-free.

https://www.sbert.net/docs/package_reference/sentence_transformer/models.html
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lmkit.api import CheckpointError

MODULES = "modules.json"
MAX_MODULES = 16
MAX_BYTES = 1 << 20


def read_modules(directory: Path) -> tuple[Mapping[str, Any], ...]:
    """{"type": "Pooling", "path": "1_Pooling", "config": {...}} of each module, in order; () without the file.

    Raises CheckpointError naming the file.
    """
    file = directory / MODULES
    if not file.is_file():
        return ()
    listed = _read(file)
    if not isinstance(listed, list) or len(listed) > MAX_MODULES:
        raise CheckpointError(f"{file} does not hold a list of at most {MAX_MODULES} modules")
    return tuple(_module(file, entry) for entry in listed)


def module_paths(directory: Path) -> list[str]:
    """The folders of the modules, for a download."""
    return [str(m["path"]) for m in read_modules(directory) if m["path"]]


def _module(file: Path, entry: Any) -> Mapping[str, Any]:
    kind, path = (entry.get("type"), entry.get("path")) if isinstance(entry, dict) else (None, None)
    if not isinstance(kind, str) or not isinstance(path, str) or path.startswith(("/", "~")) or ".." in path:
        raise CheckpointError(f"{file}: a module needs a type and a path within the checkpoint, got {entry!r:.80}")
    kind = kind.rsplit(".", 1)[-1]
    folder = file.parent / path
    names = sorted(folder.glob("sentence_*_config.json")) if kind == "Transformer" else [folder / "config.json"]
    found = next((name for name in names if name.is_file()), None)
    config = _read(found) if found is not None else {}
    if not isinstance(config, dict):
        raise CheckpointError(f"{found} does not hold a JSON object")
    return {"type": kind, "path": path, "config": config}


def _read(file: Path) -> Any:
    try:
        if file.stat().st_size > MAX_BYTES:
            raise CheckpointError(f"{file} is larger than {MAX_BYTES} bytes")
        return json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as e:
        raise CheckpointError(f"{file} cannot be read: {e}") from e
