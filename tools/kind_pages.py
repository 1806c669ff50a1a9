"""Pages of the authors' guide, one for each kind: what is registered, the target, where it runs, its kit, its refusals,
and a whole example, which is what `lmkit plugins new` writes."""

from __future__ import annotations

import ast
import inspect
import re
import tempfile
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

SERVER = "in the server's process"
RUNS = {  # where the target is made and called
    "platform": "`worker_env` and `defaults` in the process that starts a worker, without torch; all else in the "
    "worker, in the thread that steps. The probe is called at every start, in any process",
    "attention": "in the worker, in the thread that steps: `planner` once, `plan` once a step and KV group on the "
    "host, `write_kv` and `forward` in each layer",
    "quantization": "in the worker, while weights are loaded; `parse` also when a start is planned, so its module "
    "imports torch in functions only",
    "model": "`describe` wherever a start is planned, without torch; `build` and `forward` in the worker, in the "
    "thread that steps",
    "tokenizer": f"{SERVER} and in the engine's, in any thread: what it gives is shared",
    "renderer": f"{SERVER}, in any thread",
    "template": f"{SERVER}, once",
    "tool_parser": f"{SERVER}: one machine for each output, fed in order",
    "reasoning_parser": f"{SERVER}: one machine for each output, fed in order",
    "scheduler": "in the engine's process, in its one thread: keys are asked for at every step",
    "loader": "in the worker, while weights are loaded: `read` in one thread",
    "op": "in the worker: `pack` while weights are loaded, `apply` in each layer of a step",
    "executor": "in the engine's process, in its one thread",
    "grammar": "`compile` in a process of its own under limits; `load` in the engine's process, in any thread",
    "structured_output": "in the engine's process, in its one thread",
    "logits_processor": "in the worker, in the thread that steps: `apply` once a step for all rows that asked",
    "proposer": "in the worker, in the thread that steps: `propose` once a step for all rows",
    "kv_connector": "in the engine's process, in its one thread, beside the scheduler: no call may wait",
    "dialect": f"{SERVER}: `parse` in any thread, an exchange in the event loop",
}
OPTIONS = """Options are the fields of a dataclass that the spec names in `options`: `--{kind}.NAME.FIELD`, the variable
`LMKIT_{upper}__NAME__FIELD`, the key `{kind}.NAME.FIELD` of a file. Values are checked against its annotations, a
ValueError of its `__post_init__` is shown with the key, and the target is made with them: `target(**options)`."""


def page(kind: Any, use: tuple[str, str, str], examples: Path) -> str:
    """The page of a kind; `use`: where it is called, its kit, a test; `examples`: the folder of plugins to copy."""
    called, kit, test = use
    parts = [
        f"# {kind.name}\n",
        f"Made by `tools/sync.py` from `{kind.spec.__module__}` and the templates of `lmkit plugins new`.\n",
        f"{(kind.doc or '').partition('Example, entry point')[0].strip()}\n",
        f"- Entry-point group `{kind.group}`, hook `{kind.hook}`, registers `{kind.spec.__name__}` (interface "
        f"{kind.interface}).",
        f"- Called at `{called}`; {RUNS[kind.name]}.",
        f"- Kit: `lmkit_testing.{kit}`; see `{test}`, and `lmkit plugins test {kind.name}:NAME`.",
        f"- Named by users: `--{kind.name.replace('_', '-')} NAME`, or the key `{kind.setting}`.\n"
        if kind.setting
        else "- No key names it: whatever is installed is there.\n",
        "## The spec\n",
        f"{inspect.getdoc(kind.spec)}\n",
        _fields(kind.spec),
        f"\n{OPTIONS.format(kind=kind.name, upper=kind.name.upper())}\n",
    ]
    parts += ["## The target\n", *_protocols(kind)]
    codes = sorted(_codes(kind))
    if codes:
        parts.append(
            f"## Refusals\n\nOf this kind's own: {', '.join(f'`{code}`' for code in codes)}. All, with their meaning: "
            "[refusal codes](../reference/refusal-codes.md). What only your code knows is said by the function that "
            "the spec names in `check`: (request) -> Refusals, without torch.\n"
        )
    return "\n".join([*parts, *_example(kind.name, examples)])


def _fields(spec: type) -> str:
    """Fields of its own, with their comments."""
    source = inspect.getsource(spec)
    rows = re.findall(r"^    (\w+): ([^=#\n]+?)(?: = ([^#\n]+?))?(?:  # (.*))?$", source, re.M)
    if not rows:
        return "It has the fields that all specs have (`lmkit.api.Spec`)."
    cells = []
    for name, kind, default, about in rows:
        told = kind.replace("|", "\\|")
        cells.append(f"| `{name}` | `{told}` | {f'`{default}`' if default else 'needed'} | {about} |")
    return "\n".join(["| field | type | default | |", "|---|---|---|---|", *cells])


def _protocols(kind: Any) -> list[str]:
    """Protocols of the module of the kind, with their methods, as they stand there."""
    import importlib

    module = importlib.import_module(kind.spec.__module__)
    source = Path(str(module.__file__)).read_text(encoding="utf-8")
    found = []
    for node in ast.parse(source).body:
        if isinstance(node, ast.ClassDef) and any(getattr(base, "id", "") == "Protocol" for base in node.bases):
            found.append(f"```python\n{ast.get_source_segment(source, node)}\n```\n")
    return found or ["Its contract stands in the module that `target` above names.\n"]


def _codes(kind: Any) -> set[str]:
    return {
        code
        for function in (kind.refusals, kind.auto_refusals)
        for code in re.findall(r'Refusal\(\s*"([a-z-]+)"', inspect.getsource(function))
    }


def _example(kind: str, examples: Path) -> list[str]:
    """What `lmkit plugins new KIND mine` writes, and where in `examples` there is another."""
    from lmkit_cli.scaffold import write_plugin

    parts = [
        f"## A whole one\n\n`lmkit plugins new {kind} mine` writes this; its test passes as it stands, and ours run "
        "it. The kits come with `pip install -e tests/kit`, in a checkout of lmkit. Then: "
        '`pip install -e "./lmkit-' + kind.replace("_", "-") + '-mine[test]"`, and `pytest` in that folder.\n'
    ]
    others = [path.parent.name for path in sorted(examples.glob("*/pyproject.toml")) if kind in _registers(path.parent)]
    if others:
        links = ", ".join(f"[{name}](../../examples/plugins/{name}/README.md)" for name in others)
        parts.append(f"In `examples/plugins` there is more to copy from: {links}.\n")
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / "plugin"
        files = sorted(write_plugin(kind, "mine", root), key=lambda p: (p.suffix != ".toml", "tests" in p.parts))
        return parts + _files(root, files)


def _registers(root: Path) -> set[str]:
    groups = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]["entry-points"]
    return {group.removeprefix("lmkit.") for group in groups}


def _files(root: Path, files: Iterable[Path]) -> list[str]:
    """Those of Python that are not empty, as they are."""
    sources = [path for path in files if path.suffix == ".py" and path.stat().st_size]
    return [
        f"`{path.relative_to(root).as_posix()}`:\n\n```python\n{path.read_text(encoding='utf-8').strip()}\n```\n"
        for path in sources
    ]


def faults_page(root: Path, kits: Mapping[str, str]) -> str:
    """The plugins that are wrong on purpose, by kind: what is wrong, and the check of the kit that finds it."""
    rows = []
    for file in sorted(root.glob("tests/kit/tests/planted_*.py")):
        plugins: dict[str, str] = {}
        for node in ast.parse(file.read_text(encoding="utf-8")).body:
            if not isinstance(node, ast.ClassDef):
                continue
            said = {each.targets[0].id: ast.literal_eval(each.value) for each in node.body
                    if isinstance(each, ast.Assign) and getattr(each.targets[0], "id", "") in ("plugin", "fails")}  # type: ignore[attr-defined]  # fmt: skip
            bases = [getattr(base, "id", "") for base in node.bases]
            plugins[node.name] = said.get("plugin") or next((plugins[base] for base in bases if base in plugins), "")
            if "fails" in said:
                about = (ast.get_docstring(node) or "").partition("\n")[0]
                rows.append((plugins[node.name].partition(":")[0], plugins[node.name], about, said["fails"]))
    cells = [f"| `{kits[kind]}` | `{plugin}` | {about} | `{check}` |" for kind, plugin, about, check in rows]
    return "\n".join([
        "# What the kits find\n",
        "Made by `tools/sync.py` from `tests/kit/tests`. Each row is a plugin that works, with one fault put into it;",
        f"a test runs the check that must find it (`nox -s kits`). {len(rows)} faults of",
        f"{len({row[0] for row in rows})} kinds. What is common to all kinds, as hooks that import torch, is shown by",
        "the tests of the core.\n",
        "| kit | plugin | what is wrong | the check that fails |\n|---|---|---|---|",
        *cells,
        "",
    ])  # fmt: skip
