"""`lmkit plugins new`: a distribution from packaged templates, with a conformance test that passes."""

from __future__ import annotations

from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from string import Template

import lmkit
from lmkit.api import ConfigError, UnknownName
from lmkit.contracts.specs import NAME
from lmkit.kinds import BY_NAME

MORE_DEPENDENCIES = {
    "attention": ', "torch>=2.4"',
    "dialect": ', "lmkit-http{range}"',
    "loader": ', "safetensors>=0.4"',
    "model": ', "lmkit-decoders{range}", "torch>=2.4"',
    "op": ', "torch>=2.4"',
    "platform": ', "torch>=2.4"',
    "proposer": ', "numpy>=1.26"',
    "reasoning_parser": ', "lmkit-formats{range}"',
    "tool_parser": ', "lmkit-formats{range}"',
}
COMMON = {"workflow.yml.tmpl": ".github/workflows/test.yml"}  # where else than at the top


def kinds() -> list[str]:
    """Kinds that have templates."""
    return sorted(t.name for t in _templates().iterdir() if t.is_dir())


def write_plugin(kind: str, name: str, folder: Path | None = None, architecture: str | None = None) -> list[Path]:
    """Write a new plugin; returns its files, pyproject.toml first. Nothing is ever overwritten.

    `architecture`: of a model, as its config.json has it. Raises UnknownName for a kind without template, ConfigError
    for a bad name, an architecture of what is no model, or a folder that is not empty.
    """
    if kind not in kinds():
        raise UnknownName("template for plugin kind", kind, kinds(), fix="start from the example in lmkit.kinds")
    if not NAME.match(name):
        raise ConfigError(f"{name!r} is no name for a plugin", fix="use lower case letters, digits and underscores")
    if architecture is not None and (kind != "model" or not architecture.isidentifier()):
        raise ConfigError(
            f"--architecture {architecture!r} of kind {kind}", fix="it is of a model, as in its config.json"
        )
    dist = f"lmkit-{kind}-{name}".replace("_", "-")
    module = f"lmkit_{kind}_{name}"
    root = folder or Path(dist)
    if root.exists() and (not root.is_dir() or any(root.iterdir())):
        raise ConfigError(f"{root} exists and is not empty", fix="give another --folder")
    major, minor, *_ = lmkit.__version__.split(".")
    versions = f">={major}.{minor},<{major}.{int(minor) + 2}"
    words = {
        "kind": kind,
        "name": name,
        "dist": dist,
        "module": module,
        "class_name": _class_name(name),
        "entry": architecture or entry_name(kind, name),
        "interface": str(BY_NAME[kind].interface) if kind in BY_NAME else "",
        "core_range": f"lmkit-core{versions}",
        "more": MORE_DEPENDENCIES.get(kind, "").format(range=versions),
    }
    files = {COMMON.get(name, name.removesuffix(".tmpl")): file for name, file in _files(_templates())}
    files |= {_place(name.removesuffix(".tmpl"), module): file for name, file in _files(_templates() / kind)}
    written = []
    for path, file in files.items():
        text = Template(file.read_text(encoding="utf-8")).substitute(words)
        written.append(_write(root / path, text))
    written.append(_write(root / "src" / module / "__init__.py", ""))
    return sorted(written, key=lambda p: p.name != "pyproject.toml")


def entry_name(kind: str, name: str) -> str:
    """Name of a plugin's entry point: of a model, the architecture it serves."""
    return _class_name(name) + "ForCausalLM" if kind == "model" else name


def _class_name(name: str) -> str:
    return "".join(part.capitalize() for part in name.split("_"))


def _templates() -> Traversable:
    return resources.files("lmkit_cli") / "templates"


def _files(folder: Traversable) -> list[tuple[str, Traversable]]:
    return sorted((f.name, f) for f in folder.iterdir() if f.is_file())


def _place(name: str, module: str) -> str:
    return f"tests/test_{module}.py" if name == "test.py" else f"src/{module}/{name}"


def _write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path
