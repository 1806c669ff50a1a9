"""House rules that a machine can check: layers, names, forbidden calls, dependency pins, budgets."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from lmkit.kinds import KINDS

ROOT = Path(__file__).resolve().parents[2]
CORE = ROOT / "core" / "src" / "lmkit"
FRONT_ENDS = ROOT / "plugins" / "frontends"  # they are released with the core, and may use what is not public
KIT = ROOT / "tests" / "kit"
SOURCES = sorted([*CORE.rglob("*.py"), *ROOT.glob("plugins/*/*/src/**/*.py"), *KIT.rglob("*.py")])
PLUGIN_SOURCES = [p for p in SOURCES if not {CORE, FRONT_ENDS, KIT} & set(p.parents)]

# A layer may import itself and those of a smaller number.
LAYER = {
    "contracts": 0, "api": 0, "kinds": 0, "hookspecs": 0,
    "config": 1, "plugins": 1, "builtin": 1, "logs": 1, "files": 1, "generation": 1,
    "checkpoint": 2,
    "memory": 3, "scheduling": 3,
    "engine": 4, "text": 4, "prompts": 4,
    "command": 5,
}  # fmt: skip


def imports(path: Path, *, runtime_only: bool = True) -> Iterator[str]:
    """Modules a file imports; with runtime_only, those under `if TYPE_CHECKING` are left out."""
    tree = ast.parse(path.read_text())
    skipped: set[ast.AST] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test) and runtime_only:
            skipped.update(child for stmt in node.body for child in ast.walk(stmt))
        elif node not in skipped and isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif node not in skipped and isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module


def layer_of(module: str) -> str:
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else ""


def test_imports_point_downwards() -> None:
    wrong = []
    for path in CORE.rglob("*.py"):
        own = path.relative_to(CORE).parts[0].removesuffix(".py")
        if own not in LAYER:
            continue  # the package itself
        for module in imports(path):
            target = layer_of(module)
            if module.startswith("lmkit.") and LAYER.get(target, 0) > LAYER[own]:
                wrong.append(f"{path.relative_to(ROOT)} imports {module}")
    assert not wrong, "\n".join(wrong)


def test_every_core_package_has_a_layer() -> None:
    names = {p.name.removesuffix(".py") for p in CORE.iterdir() if p.suffix == ".py" or (p / "__init__.py").exists()}
    assert names - {"__init__", "__main__", "__pycache__"} <= set(LAYER)


def test_the_core_imports_neither_torch_nor_a_plugin() -> None:
    """But for the command line, which it hands over."""
    found = [
        f"{path.relative_to(ROOT)} imports {module}"
        for path in set(CORE.rglob("*.py")) - {CORE / "command.py"}
        for module in imports(path)
        if module.split(".")[0] in {"torch", "safetensors", "transformers", "triton"} or module.startswith("lmkit_")
    ]
    assert not found, "\n".join(found)


def test_plugins_import_only_the_public_surface() -> None:
    allowed = re.compile(r"^lmkit(\.(api|checkpoint|files|memory|prompts)(\.|$)|$)")
    found = [
        f"{path.relative_to(ROOT)} imports {module}"
        for path in PLUGIN_SOURCES
        for module in imports(path, runtime_only=False)
        if module.split(".")[0] == "lmkit" and not allowed.match(module)
    ]
    assert not found, "\n".join(found)


FORBIDDEN_MODULES = {"pickle", "dill", "cloudpickle", "marshal", "shelve", "joblib"}
FORBIDDEN_CALLS = {
    "eval",
    "exec",
    "torch.load",
    "yaml.load",
    "np.load",
    "numpy.load",
    "jinja2.Environment",
    "jinja2.sandbox.SandboxedEnvironment",
}
LAST_NAMES = {call.rpartition(".")[2] for call in FORBIDDEN_CALLS}


def last_name(function: ast.expr) -> str | None:
    return getattr(function, "id", None) or getattr(function, "attr", None)


def tensors_only(path: Path, call: ast.Call) -> bool:
    """The one place that reads pickled weights: in a process of its own, by the reader that knows only tensors."""
    literal = {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords}
    return path.match("lmkit_convert/unpickled.py") and literal.get("weights_only") == "True"


def test_no_code_from_data() -> None:
    found = []
    for path in [
        *SOURCES,
        *(ROOT / "tools").glob("*.py"),
        *ROOT.glob("plugins/*/*/train/*.py"),
        *(ROOT / "bench").rglob("*.py"),
    ]:
        found += [
            f"{path.relative_to(ROOT)} imports {m}" for m in imports(path) if m.split(".")[0] in FORBIDDEN_MODULES
        ]
        for node in ast.walk(ast.parse(path.read_text())):
            if (
                isinstance(node, ast.Call)
                and last_name(node.func) in LAST_NAMES  # `unparse` takes its time
                and ast.unparse(node.func) in FORBIDDEN_CALLS
                and not tensors_only(path, node)
            ):
                found.append(f"{path.relative_to(ROOT)}:{node.lineno} calls {ast.unparse(node.func)}")
            if isinstance(node, ast.keyword) and node.arg == "trust_remote_code" and ast.unparse(node.value) != "False":
                found.append(f"{path.relative_to(ROOT)}: trust_remote_code is not literally False")
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("jinja2"):
                names = {alias.name for alias in node.names} & {"Environment", "SandboxedEnvironment", "Template"}
                found += [
                    f"{path.relative_to(ROOT)} imports {name}: only ImmutableSandboxedEnvironment" for name in names
                ]
            if isinstance(node, ast.ExceptHandler) and node.type is None:
                found.append(f"{path.relative_to(ROOT)}:{node.lineno} bare except")
    assert not found, "\n".join(found)


def test_no_unfinished_code() -> None:
    words = re.compile(r"\b(TODO|FIXME|XXX|HACK)\b|raise NotImplementedError")
    found = [
        f"{path.relative_to(ROOT)}:{i}: {line.strip()}"
        for path in SOURCES
        for i, line in enumerate(path.read_text().splitlines(), 1)
        if words.search(line)
    ]
    assert not found, "\n".join(found)


LIBRARIES = (
    "killable",
    "stores",
    "layers",
    "layouts",
    "decoders",
    "formats",
    "worker",
    "gpu",
)  # dists that plugins of a kind are written with
HEAVY = ("torch", "triton", "transformers", "flashinfer-python", "numpy")


@pytest.mark.parametrize(
    "pyproject", sorted(ROOT.glob("core/pyproject.toml")) + sorted(ROOT.glob("plugins/*/*/pyproject.toml")), ids=str
)
def test_heavy_dependencies_have_floors_only(pyproject: Path) -> None:
    data = tomllib.loads(pyproject.read_text())
    project = data["project"]
    extras = [dep for deps in project.get("optional-dependencies", {}).values() for dep in deps]
    for dep in [*project.get("dependencies", []), *extras]:
        name = re.split(r"[<>=!~\[; ]", dep, maxsplit=1)[0]
        if name in HEAVY:
            assert not re.search(r"==|<|~=", dep.split(";")[0]), f"{dep}: floors only"
    compiled = (pyproject.parent / "csrc").is_dir()
    assert data["build-system"]["build-backend"] == ("setuptools.build_meta" if compiled else "flit_core.buildapi")
    if "plugins" in pyproject.parts:
        assert any(re.match(r"lmkit-core(\[[\w,]+\])?>=.*<", dep) for dep in project["dependencies"])
        kind, name = pyproject.parts[-3], pyproject.parts[-2]
        if kind == "frontends" or name in LIBRARIES:
            assert project["name"] == f"lmkit-{name}"
            return
        assert any(key.startswith("lmkit.") for key in project["entry-points"])
        singular = {folder: k.name for k in KINDS for folder in (k.name, f"{k.name}s")}
        assert project["name"] == f"lmkit-{singular[kind].replace('_', '-')}-{name.replace('_', '-')}"


def test_requirements_files_name_every_plugin() -> None:
    text = "\n".join(
        (ROOT / f).read_text() for f in ("requirements.txt", "requirements-all.txt", "requirements-cuda.txt")
    )
    for path in ROOT.glob("plugins/*/*/pyproject.toml"):
        assert f"-e ./{path.parent.relative_to(ROOT)}\n" in text, f"{path.parent} stands in no requirements file"


def test_model_families_stay_small() -> None:
    """A file shows only what is peculiar to a family: under 200 lines."""
    files = [
        p for p in ROOT.glob("plugins/models/*/src/**/*.py") if not {"lmkit_layers", "lmkit_decoders"} & set(p.parts)
    ]
    sizes = {str(path.relative_to(ROOT)): path.read_text().count("\n") for path in files}
    assert not {path: size for path, size in sizes.items() if size >= 200}


def run_python(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_import_is_light() -> None:
    heavy = "('torch', 'numpy', 'transformers', 'pydantic', 'starlette', 'typer')"
    assert run_python(f"import sys, lmkit, lmkit.api; print([m for m in {heavy} if m in sys.modules])") == "[]"


@pytest.mark.parametrize("arguments", [["--help"], ["plugins", "list"]], ids=" ".join)
def test_help_and_list_load_no_plugin(arguments: list[str]) -> None:
    code = (
        "import sys, contextlib, io\n"
        f"sys.argv = ['lmkit', *{arguments!r}]\n"
        "from lmkit.command import main\n"
        "with contextlib.redirect_stdout(io.StringIO()):\n"
        "    try: main()\n"
        "    except SystemExit as e: assert not e.code, e.code\n"
        "found = [m for m in sys.modules if m in ('torch', 'transformers') or m.startswith('lmkit_')]\n"
        "print([m for m in found if not m.startswith('lmkit_cli')])"
    )
    assert run_python(code).splitlines()[-1] == "[]"


def test_nothing_speaks_of_machines_or_registries() -> None:
    bad = re.compile(r"/work/(main|wt|shared|venv)|/root/|/opt/(pypi|wheels)")
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False).stdout.split()
    found = []
    for name in tracked:
        path = ROOT / name
        if (
            path.suffix in {".py", ".md", ".toml", ".txt", ".json", ".yaml"}
            and path.exists()
            and path != Path(__file__)
        ) and bad.search(path.read_text(errors="replace")):
            found.append(name)
    assert not found, found
