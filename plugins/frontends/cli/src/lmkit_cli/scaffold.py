"""`lmkit plugins new`: a distribution from packaged templates, with a conformance test that passes."""

from __future__ import annotations

from importlib import resources
from importlib.resources.abc import Traversable
from importlib.util import find_spec
from pathlib import Path
from string import Template
from textwrap import indent

import lmkit
from lmkit.api import ConfigError, UnknownName
from lmkit.contracts.specs import NAME
from lmkit.kinds import BY_NAME
from lmkit.plugins.catalog import catalog, folders, install
from lmkit.plugins.host import PluginHost

MORE_DEPENDENCIES = {
    "attention": ', "torch>=2.4"',
    "dialect": ', "lmkit-http{range}"',
    "executor": ', "lmkit-worker{range}"',
    "grammar": ', "numpy>=1.26"',
    "kv_connector": ', "lmkit-stores{range}"',
    "loader": ', "safetensors>=0.4"',
    "model": ', "lmkit-decoders{range}", "torch>=2.4"',
    "op": ', "torch>=2.4"',
    "platform": ', "torch>=2.4"',
    "proposer": ', "numpy>=1.26"',
    "quantization": ', "safetensors>=0.4", "torch>=2.4"',
    "reasoning_parser": ', "lmkit-formats{range}"',
    "structured_output": ', "numpy>=1.26"',
    "tool_parser": ', "lmkit-formats{range}"',
}
SERVE = {  # the options of a server that uses it; nothing, where what is installed is there
    "attention": "--attention $name",
    "executor": "--executor $name",
    "kv_connector": "--kv-connector $name",
    "loader": "--loader $name",
    "model": """--hf-overrides '{"architectures": ["$entry"]}'""",  # the demo is a Llama, and so is the family as yet
    "op": "--op $name",
    "platform": "--platform $name",
    "proposer": "--proposer $name",
    "reasoning_parser": "--reasoning-parser $name",
    "scheduler": "--scheduler $name",
    "tool_parser": "--tool-parser $name",
}
CONVERT = """demo=$$(python -c "import lmkit_model_demo; print(*lmkit_model_demo.__path__)")/checkpoint
python -m $module.convert $$demo ./converted
lmkit serve ./converted"""
ANSWER = r"<|im_start|>assistant\n<think>\n\n</think>\n\n"  # how one begins, for the demo
TURNS = rf"""{{"answer": "{ANSWER}", "user": ["<|im_start|>user\n", "<|im_end|>\n"]}}"""
COMMANDS = {  # of kinds for which that is more than options
    "quantization": CONVERT,
    "renderer": rf"""printf '<|im_start|>$$role\n$$content<|im_end|>\n---\n{ANSWER}' > chat.txt
LMKIT_PLUGINS_DISABLE=renderer:jinja lmkit serve demo --chat-template chat.txt""",
    "structured_output": "LMKIT_PLUGINS_DISABLE=structured_output:masks lmkit serve demo",
    "template": f"""printf %s '{TURNS}' > chat.$name
lmkit serve demo --chat-template chat.$name""",
    "tokenizer": CONVERT,
}
QUESTION = """{"messages": [{"role": "user", "content": "What is 2 + 3?"}]"""
TOOL = """{"type": "function", "function": {"name": "get_time", "parameters": {"type": "object", "properties": {}}}}"""
CHOICE = """"choice": ["2 + 3 = 5", "2 + 3 = 6"]"""
MORE = {  # in a request for it
    "grammar": f""""structured_outputs": {{{CHOICE}, "backend": "$name"}}""",
    "logits_processor": """"vllm_xargs": {"$name": {"tokens": [23]}}""",
    "structured_output": f""""structured_outputs": {{{CHOICE}}}""",
    "tool_parser": f""""tools": [{TOOL}], "tool_choice": "required\"""",
}
COMMON = {"workflow.yml.tmpl": ".github/workflows/test.yml"}  # where else than at the top


def kinds() -> list[str]:
    """Kinds that have templates."""
    return sorted(t.name for t in _templates().iterdir() if t.is_dir())


def write_plugin(
    kind: str,
    name: str,
    folder: Path | None = None,
    architecture: str | None = None,
    *,
    force: bool = False,
    host: PluginHost | None = None,
) -> list[Path]:
    """Write a new plugin; returns its files, pyproject.toml first. Nothing is ever overwritten.

    `architecture`: of a model, as its config.json has it. `force`: its name may be one that lmkit or another dist has
    already; `host`: the plugins that are installed. Raises UnknownName for what is no kind, ConfigError for a bad or a
    taken name, an architecture of what is no model, or a folder that is not empty.
    """
    if kind not in kinds():
        raise UnknownName("plugin kind", kind, kinds())
    if not NAME.match(name) or name[0].isdigit():
        raise ConfigError(
            f"{name!r} is no name for a plugin", fix="use lower case letters, digits and underscores, first a letter"
        )
    if architecture is not None and (kind != "model" or not architecture.isidentifier()):
        raise ConfigError(
            f"--architecture {architecture!r} of kind {kind}", fix="it is of a model, as in its config.json"
        )
    dist = f"lmkit-{kind}-{name}".replace("_", "-")
    module = f"lmkit_{kind}_{name}"
    if not force:
        _refuse_taken(kind, name, architecture or entry_name(kind, name), dist, module, host or PluginHost())
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
        "kit": install("lmkit-testing"),
        "more": MORE_DEPENDENCIES.get(kind, "").format(range=versions),
    }
    words |= _walk(kind, words)
    files = {COMMON.get(name, name.removesuffix(".tmpl")): file for name, file in _files(_templates())}
    files |= {_place(name.removesuffix(".tmpl"), module): file for name, file in _files(_templates() / kind)}
    written = []
    for path, file in files.items():
        text = Template(file.read_text(encoding="utf-8")).substitute(words)
        written.append(_write(root / path, text))
    written.append(_write(root / "src" / module / "__init__.py", ""))
    return sorted(written, key=lambda p: p.name != "pyproject.toml")


def _refuse_taken(kind: str, name: str, entry: str, dist: str, module: str, host: PluginHost) -> None:
    """Raises ConfigError where the plugin, its dist or its package has the name of one that exists.

    Installing a dist uninstalls the one of the same name first; a plugin of a name that is taken is not the one that
    the name means.
    """
    owner = ""
    if dist in folders():
        owner = f"{dist} is one of lmkit's own dists, which installing yours would replace"
    elif host.installed_version(dist) is not None:
        owner = f"{dist} is installed already"
    elif known := catalog().get(kind, {}).get(entry) or catalog().get(kind, {}).get(name):
        owner = f"{known} of lmkit's own has a {kind} {name!r}"
    elif others := [e.dist for e in (*host.entries(kind, entry), *host.entries(kind, name))]:
        owner = f"{others[0]} has a {kind} {name!r}, and is installed"
    elif (spec := find_spec(module)) is not None and spec.origin is not None:
        owner = f"there is a package {module}: {spec.origin}"
    if owner:
        raise ConfigError(
            f"the name {name!r} is taken: {owner}",
            fix=f"choose another name, or --force to stand in for it where {dist}/{entry} is named",
        )


def _walk(kind: str, words: dict[str, str]) -> dict[str, str]:
    """The lines of a README that serve the plugin, and those that ask for an answer."""
    serve = COMMANDS.get(kind) or f"lmkit serve demo {SERVE.get(kind, '')}".rstrip()
    more = f",\n  {MORE[kind]}" if kind in MORE else ""
    ask = f"curl localhost:8000/v1/chat/completions -d '{QUESTION}{more}}}'"
    if kind == "dialect":
        ask = "curl localhost:8000/$name -d 'What is 2 + 3?'"
    lines = {"serve": serve, "ask": ask}
    found = {name: indent(Template(text).substitute(words), "    ") for name, text in lines.items()}
    explain = f"explain {kind} --model demo" if kind in BY_NAME else "plugins doctor"
    return {**found, "explain": explain}


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
