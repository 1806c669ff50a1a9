"""The figures of the house: lines, dependencies, circles of modules, sizes, names. `nox -s house` prints them.

tests/rules bound the dependencies, circles and names. Lines and sizes are reported, not bounded: a bound on lines moves
code to where there is room instead of where a reader looks for it.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import textwrap
import tomllib
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CORE = ROOT / "core" / "src" / "lmkit"
NUM_LARGEST = 10  # functions and modules that are listed
DEPENDENCIES = {"pluggy", "msgspec", "packaging", "numpy", "lmkit-tokenizer-json", "lmkit-worker", "lmkit-python"}
NAMES = re.compile(
    r"torch\.cuda|is_cuda|is_rocm|\bcuda\b|\brocm\b|nvidia|flashinfer|\bllama\b|\bqwen\b|\bmistral\b|\bhermes\b|\bgptq\b"
    r"|\bawq\b|\bmamba\b|\btransformers\b",
    re.IGNORECASE,
)


def packages(root: Path = ROOT) -> dict[str, Path]:
    """Every package of the repository: its name -> its folder."""
    sources = [*root.glob("core/src/*"), *root.glob("plugins/*/*/src/*"), *root.glob("tests/kit/src/*")]
    return {path.name: path for path in sources if (path / "__init__.py").exists()}


def lines(folder: Path = CORE) -> dict[str, int]:
    """Lines of Python by package of `folder`; single modules stand under their own names."""
    found: dict[str, int] = {}
    for path in folder.rglob("*.py"):
        part = path.relative_to(folder).parts[0].removesuffix(".py")
        found[part] = found.get(part, 0) + path.read_text().count("\n")
    return dict(sorted(found.items(), key=lambda item: -item[1]))


def dependencies(pyproject: Path = ROOT / "core" / "pyproject.toml") -> set[str]:
    """Names of what `pip install lmkit-core` brings."""
    project = tomllib.loads(pyproject.read_text())["project"]
    return {re.split(r"[<>=!~\[; ]", dep, maxsplit=1)[0].lower() for dep in project["dependencies"]}


def largest(paths: Iterable[Path]) -> tuple[list[tuple[int, str]], list[tuple[int, str]]]:
    """The NUM_LARGEST functions and the NUM_LARGEST modules, each as (lines, where), the largest first."""
    functions, modules = [], []
    for path in paths:
        text = path.read_text()
        modules.append((text.count("\n"), str(path.relative_to(ROOT))))
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                num_lines = (node.end_lineno or 0) - node.lineno + 1
                functions.append((num_lines, f"{path.relative_to(ROOT)}:{node.lineno} {node.name}"))
    return sorted(functions, reverse=True)[:NUM_LARGEST], sorted(modules, reverse=True)[:NUM_LARGEST]


def named(paths: Iterable[Path]) -> list[str]:
    """Places in code, prose aside, that name a model, device or format."""
    return [
        f"{path.relative_to(ROOT)}: {line.strip()}"
        for path in paths
        for line in _without_prose(path).splitlines()
        if NAMES.search(line)
    ]


def _without_prose(path: Path) -> str:
    """The program text without comments and prose: strings with a space are for people, and may name things."""
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value:
            node.value = ""
    return ast.unparse(tree)


def imports(folder: Path) -> dict[str, set[str]]:
    """Module -> modules of the same package that it names, annotations and imports within functions included.

    The package's own `__init__` is left out on the left side: that it offers names from below is its purpose.
    """
    top = folder.name
    modules = {_module(path, folder): path for path in folder.rglob("*.py")}
    graph: dict[str, set[str]] = {}
    for module, path in modules.items():
        own = path.name == "__init__.py"
        found: set[str] = set()
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                found |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                deeper = {f"{node.module}.{alias.name}" for alias in node.names}
                inner = deeper & modules.keys()
                found |= inner
                if len(inner) < len(deeper):
                    found.add(node.module)
        graph[module] = {name for name in found & modules.keys() if name != module and not (own and module == top)}
    return graph


def _module(path: Path, folder: Path) -> str:
    parts = [folder.name, *path.relative_to(folder).with_suffix("").parts]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def circles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Strongly connected components of more than one node (Tarjan 1972), each sorted."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(node: str) -> None:
        index[node] = low[node] = len(index)
        stack.append(node)
        for other in sorted(graph[node]):
            if other not in index:
                visit(other)
            if other in stack:
                low[node] = min(low[node], low[other])
        if low[node] == index[node]:
            part = stack[stack.index(node) :]
            del stack[stack.index(node) :]
            if len(part) > 1:
                found.append(sorted(part))

    for node in sorted(graph):
        if node not in index:
            visit(node)
    return found


def by_package(graph: dict[str, set[str]]) -> dict[str, set[str]]:
    """The same graph with a package of the core, or a single module beside them, as one node."""
    found: dict[str, set[str]] = {}
    for module, others in graph.items():
        parts = module.split(".")
        if len(parts) > 1:
            targets = {other.split(".")[1] for other in others if "." in other} - {parts[1]}
            found.setdefault(parts[1], set()).update(targets)
    return {node: targets & found.keys() for node, targets in found.items()}


def tree() -> str:
    """The house as a list: parts of the core with the first sentence of their docstrings, plugins by kind."""
    parts = [*(path.parent for path in CORE.glob("*/__init__.py")), *CORE.glob("[!_]*.py")]
    rows = []
    for part in sorted(parts, key=lambda part: (part.suffix, part.name)):
        name = part.name if part.suffix else f"{part.name}/"
        rows.append(f"    {name:<16} {_first_sentence(part if part.suffix else part / '__init__.py')}")
    kinds: dict[str, list[str]] = {}
    for pyproject in sorted(ROOT.glob("plugins/*/*/pyproject.toml")):
        kinds.setdefault(pyproject.parts[-3], []).append(pyproject.parts[-2])
    lists = [
        textwrap.fill(f"  {kind + '/':<18} {'  '.join(names)}", 110, subsequent_indent=" " * 21)
        for kind, names in kinds.items()
    ]
    return "\n".join(["core/                  dist lmkit-core", "  src/lmkit/", *rows, "plugins/", *lists])


def _first_sentence(path: Path) -> str:
    text = ast.get_docstring(ast.parse(path.read_text())) or ""
    return re.split(r"(?<=\.)\s", text.replace("\n", " "), maxsplit=1)[0].rstrip(".")


def commits(since: str = "") -> tuple[int, int]:
    """(commits that touch plugins/models, those of them that touch core/, too) since a commit, or in all of history."""
    arguments = ["git", "log", "--no-merges", "--format=%x00", "--name-only", *([f"{since}..HEAD"] if since else [])]
    text = subprocess.run(arguments, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    changed = [part.split("\n") for part in text.split("\0")]
    families = [names for names in changed if any(name.startswith("plugins/models/") for name in names)]
    return len(families), sum(any(name.startswith("core/src/") for name in names) for names in families)


def main() -> int:
    """Prints the figures; 1 where one is over its bound."""
    core, total = lines(), sum(lines().values())
    paths = sorted(CORE.rglob("*.py"))
    print(f"core: {total:,} lines")
    for name, num in core.items():
        print(f"  {num:6,} {name}")
    extra = dependencies() - DEPENDENCIES
    print(f"dependencies: {len(dependencies())}" + (f", over the bound: {', '.join(sorted(extra))}" if extra else ""))
    graph = imports(CORE)
    found = circles(graph) + circles(by_package(graph))
    print(f"circles of modules and packages: {len(found)}")
    for circle in found:
        print("  " + " - ".join(circle))
    everything = [path for folder in packages().values() for path in folder.rglob("*.py")]
    for what, rows in zip(("functions", "modules"), largest(everything), strict=True):
        print(f"largest {what}, in lines:")
        for num_lines, place in rows:
            print(f"  {num_lines:6,} {place}")
    names = named(paths)
    print(f"models, devices and formats named in code: {len(names)}")
    for place in names:
        print(f"  {place}")
    for name, folder in sorted(packages().items()):
        if name != CORE.name and (inner := circles(imports(folder))):
            print(f"circles in {name}: {inner}")
    families, touching = commits()
    print(f"commits of model families that touch the core: {touching} of {families}")
    return int(bool(extra or found or names))


if __name__ == "__main__":
    sys.exit(main())
