"""The classes that the conformance tests of model plugins consist of."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path

from lmkit_testing import ArchitectureConformance

PLUGINS = Path(__file__).parents[2] / "plugins" / "models"


def conformance_classes() -> Iterator[type[ArchitectureConformance]]:
    """Those of architectures, in the order of their files."""
    for path in sorted(PLUGINS.glob("*/tests/test_*_conformance.py")):
        spec = importlib.util.spec_from_file_location(f"{path.stem}_of_{path.parts[-3]}", path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        tests = [value for name, value in vars(module).items() if name.startswith("Test") and isinstance(value, type)]
        yield from (kit for kit in tests if issubclass(kit, ArchitectureConformance))
