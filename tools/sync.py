"""Writes what follows from other files: the core's catalog of official plugins, pages of reference, the models' table.

python tools/sync.py           write
python tools/sync.py --check   exit 1 if something is stale
"""

from __future__ import annotations

import ast
import inspect
import json
import os
import sys
import tomllib
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
CATALOG = ROOT / "core" / "src" / "lmkit" / "plugins" / "catalog.json"
DECLARED = ROOT / "plugins" / "frontends" / "cli" / "src" / "lmkit_cli" / "declared.json"


def catalog(root: Path = ROOT) -> str:
    """Plugins by kind and name with their dists, and folders of all dists of the repository, as JSON text."""
    kinds: dict[str, dict[str, str]] = {}
    folders = {}
    for path in sorted(
        p for pattern in ("core", "tests/kit", "plugins/*/*") for p in root.glob(f"{pattern}/pyproject.toml")
    ):
        project = tomllib.loads(path.read_text())["project"]
        folders[project["name"]] = path.parent.relative_to(root).as_posix()
        for group, names in project.get("entry-points", {}).items():
            if group.startswith("lmkit.") and path.parent.parent.parent.name == "plugins":
                kinds.setdefault(group.removeprefix("lmkit."), {}).update(dict.fromkeys(names, project["name"]))
    ordered = {kind: dict(sorted(names.items())) for kind, names in sorted(kinds.items())}
    return json.dumps({"kinds": ordered, "folders": folders}, indent=2) + "\n"


def hooks_page() -> str:
    """The hooks with their signatures and examples, from their docstrings."""
    from lmkit.hookspecs import hooks
    from lmkit.kinds import KINDS

    parts = [
        "# Hooks\n",
        "Made by `tools/sync.py` from `lmkit.kinds` and `lmkit.hookspecs`. The tests run every example.\n",
    ]
    parts.append("| kind | entry-point group | hook | registers | interface |\n|---|---|---|---|---|")
    for kind in KINDS:
        about = " ".join((inspect.getdoc(kind.spec) or "").partition("\n\n")[0].split())
        row = (kind.name, f"`{kind.group}`", f"`{kind.hook}`", f"`{kind.spec.__name__}`; {about}", str(kind.interface))
        parts[-1] += "\n| " + " | ".join(row) + " |"
    parts[-1] += "\n"
    rows = [f"| {kind.name} | " + " | ".join(f"`{cell}`" for cell in use_of(kind)) + " |" for kind in KINDS]
    parts += ["| kind | called at | kit | a test |\n|---|---|---|---|\n" + "\n".join(rows) + "\n"]
    for name, function in hooks().items():
        signature = inspect.signature(function)
        parameters = ", ".join(f"{p.name}: {p.annotation}" for p in list(signature.parameters.values())[1:])
        text, _, example = (inspect.getdoc(function) or "").partition("::\n")
        code = inspect.cleandoc(example)
        parts.append(f"## `{name}({parameters}) -> {signature.return_annotation}`\n")
        parts.append(f"{text}:\n\n```python\n{code}\n```\n")
    return "\n".join(parts)


def use_of(kind: Any) -> tuple[str, str, str]:
    """Where a kind's plugins are called (file:function), the kit that proves them, and a test of one of ours."""
    sys.path.insert(0, str(ROOT / "tests" / "kit" / "src"))
    from lmkit_testing.run import kit_for

    file = kind.used_by.replace(".", "/") + ".py"
    path = next(found for folder in ("core/src", "plugins/*/*/src") for found in ROOT.glob(f"{folder}/{file}"))
    tree = ast.parse(path.read_text(encoding="utf-8"))

    def says(node: ast.AST, names: set[str]) -> bool:
        return any(getattr(part, "value", None) == kind.name or getattr(part, "id", None) in names
                   for part in ast.walk(node))  # fmt: skip

    constants = {node.targets[0].id for node in tree.body  # type: ignore[attr-defined]
                 if isinstance(node, ast.Assign) and says(node.value, set())}  # fmt: skip
    functions = [n.name for n in ast.walk(tree) if isinstance(n, ast.FunctionDef) and says(n, constants)]
    needle = f'plugin = "{kind.name}:'
    folders = [ROOT / folder for folder in ("plugins", "core/tests", "tests")]
    tests = [test for folder in folders for test in sorted(folder.rglob("test_*.py"))
             if needle in test.read_text(encoding="utf-8")]  # fmt: skip
    kit = kit_for(kind.name)
    called = f"{path.relative_to(ROOT).as_posix()}:{functions[0]}" if functions else ""
    return called, kit, tests[0].relative_to(ROOT).as_posix() if tests else ""


FIXES = {  # refusal code -> what to do: what the refusal itself says, or where it says nothing, what helps
    "not-installed": "the `pip install` line or the name that the refusal offers; `lmkit plugins list`",
    "name-conflict": "write `dist/name`, or disable one (`LMKIT_PLUGINS_DISABLE`); of one in two folders uninstall one",
    "disabled": "change what the refusal names: a variable, a file or `--no-plugins`",
    "core-too-old": "upgrade `lmkit-core`",
    "core-too-new": "upgrade the plugin's dist",
    "interface-unsupported": "upgrade the plugin, or `lmkit-core` where the plugin's number is the higher one",
    "broken": "`lmkit plugins doctor` shows the place, with `LMKIT_DEBUG=1` the stack trace; upgrade or uninstall it",
    "requirement-missing": "the `pip install` line of the refusal",
    "requirement-version": "the `pip install` line of the refusal",
    "platform": "another plugin, or `--platform` with one that it runs on; `lmkit doctor` says which devices are seen",
    "capability": "another plugin: `lmkit explain KIND` names those that would run on the device",
    "dtype": "`--dtype` with one that is declared, or another plugin",
    "kv-dtype": "`--kv-dtype auto` or one that is declared, or another backend",
    "head-dim": "another backend: the model decides the size",
    "block-size": "`--block-size` with one that is declared, or another backend",
    "gqa-ratio": "another backend: the model decides the ratio; fewer ranks (`--tp`) may help",
    "format": "another plugin that declares the format, or `auto`, which finds one (`--quantization auto`)",
    "ranks": "`--tp 1`, `--pp 1`, or another executor",
    "model": "name the plugin to use it anyway (`--tool-parser NAME`); a `--quantization` that the model runs with",
    "template": "name the plugin to use it anyway (`--tool-parser NAME`); `lmkit verify MODEL` says whether it fits",
    "feature": "another plugin: `lmkit explain KIND` names those that declare it; or leave out what asks for it",
    "experimental": "name it: `--KIND NAME`",
    "check-failed": "a fault of the plugin: report it with its stack trace (`LMKIT_DEBUG=1`), and use another",
    "target-import": "install what the import misses, or report it to the plugin's authors; until then another plugin",
}


def codes_page() -> str:
    """The refusal codes, by stage, each with its fix."""
    from lmkit.plugins.codes import CODES, STAGES

    rows = [
        f"| `{code}` | {stage} {STAGES[stage - 1]} | {meaning} | {FIXES[code]} |"
        for code, (stage, meaning) in CODES.items()
    ]
    return "\n".join(
        [
            "# Refusal codes\n",
            "Made by `tools/sync.py` from `lmkit.plugins.codes`. Codes of a plugin's own check carry its name: "
            "`flashinfer.driver`. A refusal says what was needed, what was offered and, where it knows, the fix.\n",
            "| code | stage | meaning | fix |\n|---|---|---|---|",
            *rows,
            "",
        ]
    )


def api_page() -> str:
    """Every name of `lmkit.api` by the module that defines it; the site shows signature and docstring of each."""
    import lmkit.api

    places: dict[str, list[str]] = {}
    for name, value in sorted(vars(lmkit.api).items()):
        if not name.startswith("_") and not inspect.ismodule(value):
            place = getattr(value, "__module__", "")
            places.setdefault(place if place.startswith(("lmkit.contracts.", "lmkit.kinds.")) else "", []).append(name)
    lines = [
        "# What plugins import\n",
        "Made by `tools/sync.py` from `lmkit.api`. The site shows signature and docstring for each line with colons;",
        'in a checkout `python -c "import lmkit.api; help(lmkit.api.AttentionSpec)"` does. Hooks: [hooks](hooks.md).',
    ]
    for place in sorted(places, key=lambda place: (not place, place)):
        last = place.rpartition(".")[2]
        title = f"Kind {last}" if ".kinds." in place else last.replace("_", " ").capitalize()
        about = inspect.getdoc(import_module(place)) if place else "The mark of hooks, constants and names of types."
        lines += [f"\n## {title or 'Others'}\n", (about or "").partition("\n\n")[0]]
        lines += [f"\n::: lmkit.api.{name}" for name in places[place]]
    return "\n".join([*lines, ""])


CHECKS = {  # of the report that `nox -s model_table` writes -> heading
    "logits": "logits", "bfloat16": "bf16", "chunks": "chunks", "batch": "batch", "greedy": "64 tokens",
    "ranks": "TP", "loading": "loading",
}  # fmt: skip
TABLE = "## Table\n"
MARKS = {"passed": "yes", "failed": "FAILED", "no": "-", None: ""}


FALLBACK = "lmkit-model-transformers"


def models_page(report: dict[str, dict], introduction: str) -> str:
    """The tables of architectures, from the report of a test run."""
    rows: dict[bool, list[str]] = {True: [], False: []}  # through the fallback?
    for name, row in report.items():
        if "logits" not in row["checks"]:  # a pooling model's: its tests are other ones
            continue
        marks = " | ".join(MARKS[row["checks"].get(check)] for check in CHECKS)
        features = ", ".join(f for f in row["features"] if f != "causal").replace("_", " ")
        dist = f" `{row['dist'].removeprefix('lmkit-model-')}` | {features} |"
        through = row["dist"] == FALLBACK
        rows[through].append(f"| `{name}` |{'' if through else dist} {marks} |")
    head = " | ".join(CHECKS.values())
    return "\n".join(
        [
            introduction,
            f"{len(rows[False])} architectures.\n",
            f"| architecture | dist | attention | {head} |",
            "|---" * (3 + len(CHECKS)) + "|",
            *rows[False],
            "\n## Through transformers\n",
            f"{len(rows[True])} architectures without a family of their own, served by the fallback:\n",
            f"| architecture | {head} |",
            "|---" * (1 + len(CHECKS)) + "|",
            *rows[True],
            "",
        ]
    )


QUANTIZED = "## What runs what\n\n"  # what follows it in docs/quantization.md is made here


def specs(group: str) -> list[Any]:
    """What the plugins of the repository register under an entry-point group, installed or not."""
    from lmkit.kinds import BY_NAME

    found = []
    for path in sorted(ROOT.glob("plugins/*/*/pyproject.toml")):
        points = tomllib.loads(path.read_text())["project"].get("entry-points", {}).get(f"lmkit.{group}", {})
        if points and str(path.parent / "src") not in sys.path:
            sys.path.insert(0, str(path.parent / "src"))
        for module in sorted(set(points.values())):
            found += getattr(import_module(module), BY_NAME[group].hook)()
    return found


def quantization_page(page: str) -> str:
    """The page with the table of formats, layers, kernels and devices made anew."""
    kernels = sorted(specs("op"), key=lambda spec: (-spec.tier, spec.name))

    def runs(op: str, stored: str) -> str:
        able = [k for k in kernels if k.op == op and (not k.formats or stored in k.formats)]
        return ", ".join(f"`{k.name}` ({'any' if '*' in k.platforms else ', '.join(k.platforms)})" for k in able)

    rows = ["| format | chosen by | weights | linears | experts |", "|---|---|---|---|---|"]
    for spec in sorted(specs("quantization"), key=lambda spec: spec.name):
        methods = ((method if "." in method else f"quant_method: {method}") for method in spec.checkpoint_methods)
        by = [f"`{method}`" for method in methods]
        by += [f"`--quantization {spec.name}`"] * spec.online
        for stored in spec.weight_formats:
            experts = runs("moe", stored) or "each as a linear"
            rows.append(f"| {spec.name} | {', '.join(by)} | {stored} | {runs('linear', stored)} | {experts} |")
    return page.partition(QUANTIZED)[0] + QUANTIZED + PARAGRAPH + "\n".join([*rows, *gguf_families()]) + "\n"


SUGGESTED = ("platform", "attention", "quantization", "op", "loader", "tokenizer", "tool_parser", "reasoning_parser")


def declared() -> str:
    """What the plugins of the repository say they are for, as JSON text: read where they are not installed."""
    dists = json.loads(catalog())["kinds"]
    rows = []
    for kind in SUGGESTED:
        for spec in sorted(specs(kind), key=lambda spec: spec.name):
            row: dict[str, Any] = {"kind": kind, "name": spec.name, "dist": dists[kind][spec.name]}
            found = {
                "platforms": (spec.name,) if kind == "platform" else spec.platforms,
                "formats": (*getattr(spec, "formats", ()), *getattr(spec, "weight_formats", ())),
                "methods": getattr(spec, "checkpoint_methods", ()),
                "files": getattr(spec, "files", ()),
                "models": getattr(spec, "models", ()),
            }
            row |= {key: sorted(value) for key, value in found.items() if value}
            rows.append(row | {"named": True} if spec.stability == "experimental" else row)
    return "[\n" + ",\n".join(f" {json.dumps(row)}" for row in rows) + "\n]\n"


def gguf_families() -> list[str]:
    """Lines that say which architectures of GGUF files are read, and as which of lmkit's."""
    families = import_module("lmkit_loader_gguf.families").FAMILIES  # on the path since its hooks were read
    rows = [f"| `{name.partition(' ')[0]}` | {family.architecture} |" for name, family in families.items()]
    return ["", "## Architectures of GGUF files", "", "| `general.architecture` | read as |", "|---|---|", *rows]


PARAGRAPH = """Made by `tools/sync.py` from what the plugins of this repository declare. Kernels stand in the order in
which they are tried; in brackets the platforms. Experts that no kernel runs at once run each as a linear.

"""
HOUSE = ("<!-- house: made by tools/sync.py -->\n", "<!-- end of house -->")


def architecture_page(page: str) -> str:
    """The page with the list of what stands in the house made anew."""
    import house

    before, _, rest = page.partition(HOUSE[0])
    return f"{before}{HOUSE[0]}```\n{house.tree()}\n```\n{HOUSE[1]}{rest.partition(HOUSE[1])[2]}"


def fields_page() -> str:
    """Which field of a request works on which route."""
    dialects = sorted(path.name for path in (ROOT / "plugins" / "dialects").iterdir() if path.is_dir())
    folders = ("frontends/http", "frontends/run-batch", "tool_parsers/formats", *(f"dialects/{d}" for d in dialects))
    for folder in folders:
        sys.path.insert(0, str(ROOT / "plugins" / folder / "src"))
    page = [
        "# Fields of requests\n",
        "Made by `tools/sync.py` from what the dialects declare; a test sends each field to each route. The rule:\n",
        "- *works*: the field is honoured.",
        "- *refused*: a 400 that names the field and says what to send instead. Its absence would change what the",
        "  answer means: what is read, which tokens may be drawn, where the answer ends, what it contains. Values that",
        "  describe what happens anyway are taken; the second table of each dialect lists them.",
        "- *dropped*: the field is accepted and changes nothing here: labels, accounting, storage, caches, speed,",
        "  verbosity, effort where the chat template has no switch for it, tools that some service would run when it",
        "  likes to.",
        "- All other fields are unknown. They are dropped too, in the request and in its parts, or refused with",
        "  `--unknown-fields refuse`.\n",
        "Dropped fields are named in the header `x-lmkit-warnings` of the answer (at most 1 KiB) and in `lmkit why`,",
        'and counted in `lmkit_dropped_fields_total`. `null`, `false`, `""`, `[]` and `{}` say nothing and are taken',
        "in silence, whatever the field, unless they change something.\n",
        "`/invocations` of the dialect `sagemaker` hands bodies on to these routes. The routes that only render",
        "prompts read bodies of chat and completions, and refuse what token ids cannot say.",
    ]
    for name in dialects:
        requests = getattr(import_module(f"lmkit_dialect_{name}.dialect"), "REQUESTS", None)
        if requests is not None:
            page += _fields_of(name, requests)
    return "\n".join([*page, ""])


def _fields_of(dialect: str, requests: Mapping[str, Any]) -> list[str]:
    """The part of one dialect: its routes and fields, and what to send instead of those that are refused."""
    states = {route: kind.states() for route, kind in requests.items()}
    refusals = {name: refusal for kind in requests.values() for name, refusal in kind.refusals().items()}
    rows = [[f"`{name}`", *(found.get(name, "") for found in states.values())]
            for name in sorted({name for found in states.values() for name in found})]  # fmt: skip
    lines = [f"\n## {dialect}\n", "| field | " + " | ".join(f"`{route.split(' ')[1]}`" for route in requests) + " |",
             "|---" * (1 + len(requests)) + "|", *("| " + " | ".join(row) + " |" for row in rows)]  # fmt: skip
    if refusals:
        lines += ["\n| refused field | instead | values that are taken |", "|---|---|---|"]
        lines += [f"| `{name}` | {refusal.fix} | {', '.join(f'`{json.dumps(v)}`' for v in refusal.unless)} |"
                  for name, refusal in sorted(refusals.items())]  # fmt: skip
    return lines


def outputs() -> dict[Path, str]:
    """Every generated file with its content."""
    sys.path.insert(0, str(ROOT / "core" / "src"))
    from gpu_tables import gpu_page
    from kind_pages import faults_page, page
    from lmkit.kinds import KINDS

    docs, examples = ROOT / "docs", ROOT / "examples" / "plugins"
    pages = docs / "reference"
    report = json.loads((pages / "models.json").read_text())
    introduction = (docs / "models.md").read_text().partition(TABLE)[0] + TABLE
    return {
        CATALOG: catalog(),
        DECLARED: declared(),
        pages / "hooks.md": hooks_page(),
        pages / "refusal-codes.md": codes_page(),
        pages / "fields.md": fields_page(),
        pages / "api.md": api_page(),
        **{docs / "kinds" / f"{kind.name}.md": page(kind, use_of(kind), examples) for kind in KINDS},
        pages / "kits.md": faults_page(ROOT, {kind.name: use_of(kind)[1] for kind in KINDS}),
        docs / "quantization.md": quantization_page((docs / "quantization.md").read_text()),
        docs / "gpu.md": gpu_page((docs / "gpu.md").read_text(), specs),
        docs / "models.md": models_page(report, introduction),
        docs / "architecture.md": architecture_page((docs / "architecture.md").read_text()),
    }


def main(arguments: list[str]) -> int:
    os.environ.pop("TRITON_INTERPRET", None)  # of tests: kernels that are interpreted have no cases of a device
    stale = [path for path, text in outputs().items() if not path.exists() or path.read_text() != text]
    if arguments == ["--check"]:
        for path in stale:
            print(f"{path.relative_to(ROOT)} is stale: run python tools/sync.py")
        return 1 if stale else 0
    for path in stale:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(outputs()[path])
        print(f"wrote {path.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
