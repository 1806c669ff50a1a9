"""Every file of tests runs in some session of nox: where pytest looks for it, and with the libraries that it needs."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DISTS = {  # of libraries whose dist has another name; a library that several dists bring is there with any
    "flashinfer": "flashinfer-python", "opentelemetry": "opentelemetry-sdk",
    "PIL": "pillow", "triton": "torch", "zmq": "pyzmq",
}  # fmt: skip


def installed() -> str:
    """What sessions install: the files of requirements and the sessions themselves, as text."""
    files = [*sorted(ROOT.glob("requirements*.txt")), ROOT / "noxfile.py"]
    lines = [file.read_text() for file in files]
    for file in [
        ROOT / "core/pyproject.toml",
        *ROOT.glob("plugins/*/*/pyproject.toml"),
        ROOT / "tests/kit/pyproject.toml",
    ]:
        lines += tomllib.loads(file.read_text())["project"].get("dependencies", [])  # come with each dist of lmkit
    return "\n".join(lines).lower()


def needed_by(file: Path) -> set[str]:
    """Libraries without which the whole file is skipped."""
    names = set()
    for node in ast.parse(file.read_text()).body:
        call = getattr(node, "value", None)
        while isinstance(call, ast.Attribute):
            call = call.value
        if isinstance(call, ast.Call) and getattr(call.func, "attr", "") == "importorskip":
            name = call.args[0]
            if isinstance(name, ast.Constant):
                names.add(str(name.value).partition(".")[0])
    return names


TESTS = sorted(
    file for file in ROOT.rglob("test_*.py")
    if not {".git", ".nox", ".venv", "build"} & set(file.relative_to(ROOT).parts) and "templates" not in file.parts
)  # fmt: skip


@pytest.mark.parametrize("file", TESTS, ids=lambda file: str(file.relative_to(ROOT)))
def test_a_session_installs_what_a_file_of_tests_needs(file: Path) -> None:
    text = installed()
    for library in needed_by(file) - set(sys.stdlib_module_names):
        if library.startswith("lmkit_"):  # by its folder
            continue
        dist = DISTS.get(library, library).replace("_", "-").lower()
        assert re.search(rf"(?<![\w-]){re.escape(dist)}(?![\w-])", text), f"no session installs {dist}: {file.name}"


def test_pytest_looks_where_tests_are() -> None:
    options = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pytest"]["ini_options"]
    looked = [*options["testpaths"], "examples/plugins"]  # these are run by the session `examples`
    outside = [str(file.relative_to(ROOT)) for file in TESTS if not any(file.is_relative_to(ROOT / p) for p in looked)]
    assert not outside
