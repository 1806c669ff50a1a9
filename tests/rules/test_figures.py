"""The figures of the house, bounded: dependencies, circles and names; and the page that describes it."""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))
import house  # noqa: E402

sys.path.remove(str(ROOT / "tools"))
PACKAGES = house.packages()
NEUTRAL = [path for name in ("lmkit", "lmkit_layers", "lmkit_worker") for path in sorted(PACKAGES[name].rglob("*.py"))]


def test_the_core_needs_few_libraries() -> None:
    assert house.dependencies() <= house.DEPENDENCIES


@pytest.mark.parametrize("name", sorted(PACKAGES))
def test_no_circles_of_modules(name: str) -> None:
    """Annotations, and imports within functions, are imports."""
    assert not house.circles(house.imports(PACKAGES[name]))


def test_no_circles_of_packages() -> None:
    assert not house.circles(house.by_package(house.imports(house.CORE)))


def test_a_circle_is_found(tmp_path: Path) -> None:
    package = tmp_path / "p"
    package.mkdir()
    (package / "__init__.py").write_text("from p.a import A\n")
    (package / "a.py").write_text("from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from p.b import B\n")
    (package / "b.py").write_text("def f():\n    from p.c import C\n")
    (package / "c.py").write_text("import p.a\n")
    assert house.circles(house.imports(package)) == [["p.a", "p.b", "p.c"]]


def test_the_core_and_what_runs_models_name_no_device_model_or_format() -> None:
    assert not house.named(NEUTRAL)


def test_a_name_is_that_of_one_thing() -> None:
    """No two public classes of the core and of what runs models have the same name, but a protocol and what implements
    it."""
    places: dict[str, list[str]] = {}
    for path in NEUTRAL:
        for node in ast.parse(path.read_text()).body:
            bases = {ast.unparse(base) for base in getattr(node, "bases", ())}
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_") and "Protocol" not in bases:
                places.setdefault(node.name, []).append(str(path.relative_to(ROOT)))
    assert not {name: found for name, found in places.items() if len(found) > 1}


def test_docstrings_are_sentences() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for folder in PACKAGES.values()
        for path in folder.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef))
        and (ast.get_docstring(node) or "").startswith("Of ")
    ]
    assert not found


def test_files_that_the_page_names_exist() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text()
    roots = [ROOT, ROOT / "tools", house.CORE, ROOT / "plugins", ROOT / "docs", *PACKAGES.values()]
    named = set(re.findall(r"`((?:[\w-]+/)+[\w.-]*|[\w-]+\.(?:py|md|json|txt))`", text))
    assert len(named) > 20
    named -= {"config.json"}  # a checkpoint's
    assert not {name for name in named if not any((root / name).exists() for root in roots)}
