"""`lmkit plugins`: what is installed, what it can do, whether it is healthy; a start for new ones."""

from __future__ import annotations

import dataclasses
import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from lmkit.api import Checkpoint, CheckpointOptions, ConfigError, PluginError, UnknownName
from lmkit.config.environment import debug
from lmkit.kinds import BY_NAME, EXTENSION, GROUPS
from lmkit.plugins.catalog import catalog, install
from lmkit.plugins.host import Entry, PluginHost
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from lmkit_cli import scaffold
from lmkit_cli.options import plugin_host
from lmkit_cli.settings import gather

app = typer.Typer(help="Installed plugins: list, show, check, start new ones.", no_args_is_help=True)

STATE_STYLE = {"ok": "green", "disabled": "dim", "shadowed": "yellow"}  # all others: red
WIDE = 1000  # columns
LEVEL_STYLE = {"error": "red", "warning": "yellow", "info": "dim"}
Json = Annotated[bool, typer.Option("--json", help="as data")]


@app.command("list")
def list_plugins(
    kind: Annotated[str | None, typer.Option("--kind", help=f"one of: {', '.join(GROUPS)}")] = None,
    load: Annotated[bool, typer.Option("--load", help="import them, to show what they say of themselves")] = False,
    available: Annotated[
        bool, typer.Option("--available", help="also official plugins that are not installed")
    ] = False,
    as_json: Json = False,
) -> None:
    """List plugins from metadata; imports none of them (but with --load)."""
    if kind is not None and kind not in GROUPS:
        raise UnknownName("plugin kind", kind, GROUPS)
    host = _host()
    rows = [_row(e, host, load) for e in host.entries(kind)]
    if available:
        known = {(r["kind"], r["name"]) for r in rows}
        rows += [
            {
                "kind": k,
                "name": name,
                "dist": dist,
                "version": "",
                "state": "not installed",
                "reason": install(dist),
            }
            for k, names in catalog().items()
            for name, dist in names.items()
            if (k, name) not in known and kind in (None, k)
        ]
    if as_json:
        _print_json({"plugins": rows, "warnings": host.warnings})
        return
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = WIDE  # a pipe gets whole names, which can be searched for
    table = Table(box=None, pad_edge=False, header_style="bold")
    columns = ["kind", "name", "dist", "version", "state", *(["tier", "summary"] if load else [])]
    if any(r.get("reason") for r in rows):
        columns.append("reason")
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        style = STATE_STYLE.get(row["state"], "red")
        table.add_row(*(f"[{style}]{row[c]}[/]" if c == "state" else escape(str(row.get(c, ""))) for c in columns))
    console.print(table)
    for warning in host.warnings:
        console.print(f"[yellow]warning[/] {escape(warning)}")


def _row(entry: Entry, host: PluginHost, load: bool) -> dict[str, Any]:
    if load and entry.state == "ok":
        host.open(entry)
    row: dict[str, Any] = {
        "kind": entry.kind,
        "name": entry.name,
        "dist": entry.dist,
        "version": entry.version,
        "state": entry.state,
        "reason": "",
    }
    if entry.reason is not None:
        row["code"] = entry.reason.code
        row["reason"] = (
            entry.reason.offered if entry.state == "disabled" else f"{entry.reason.code}: {entry.reason.offered}"
        )
    if load and entry.spec is not None:
        row |= {"tier": entry.spec.tier.name.lower(), "stability": entry.spec.stability, "summary": entry.spec.summary}
    return row


@app.command()
def show(
    plugin: Annotated[str, typer.Argument(help="KIND:NAME, for example attention:torch")], as_json: Json = False
) -> None:
    """Everything a plugin declares: capabilities, options, requirements, origin."""
    from lmkit.plugins.options import options_type

    host = _host()
    kind, name = _split(plugin)
    if kind == EXTENSION:
        _show_extension(host, name, as_json)
        return
    spec = host.load(kind, name)
    fields = {f.name: getattr(spec, f.name) for f in dataclasses.fields(spec) if f.name != "origin"}
    options = options_type(spec)
    rows = [
        (f.name, f.type if isinstance(f.type, str) else getattr(f.type, "__name__", str(f.type)), _default(f))
        for f in (dataclasses.fields(options) if options else ())
    ]
    requirements = {text: host.installed_version(_dist_name(text)) for text in spec.requires}
    if as_json:
        _print_json(
            {
                "plugin": plugin,
                "origin": dataclasses.asdict(spec.origin) if spec.origin else None,
                "spec": {key: _plain(value) for key, value in fields.items()},
                "options": [{"name": n, "type": t, "default": d} for n, t, d in rows],
                "requirements": requirements,
            }
        )
        return
    console = Console(highlight=False)
    origin = spec.origin
    console.print(f"[bold]{escape(plugin)}[/]  {escape(spec.summary)}")
    if origin is not None:
        current = BY_NAME[kind].interface
        console.print(
            f"[dim]{origin.dist} {origin.version}, {origin.module}, interface {spec.interface} of {current}[/]"
        )
    table = Table.grid(padding=(0, 2))
    for key, value in fields.items():
        if key not in ("name", "summary", "interface", "options", "requires"):
            table.add_row(f"  {key}", escape(_text(value)))
    for text, version in requirements.items():
        table.add_row("  requires", escape(f"{text} (installed: {version or 'no'})"))
    for option, type_, default in rows:
        table.add_row("  option", escape(f"--{kind}.{name}.{option}  {type_}, default {default}"))
    console.print(table)


def _show_extension(host: PluginHost, name: str, as_json: bool) -> None:
    """A module of behaviour hooks: it declares nothing, so what it listens to is shown."""
    entry, refusal = host.find(EXTENSION, name)
    refusal = refusal or (host.open(entry) if entry else None)
    if entry is None or refusal is not None:
        raise PluginError(f"{EXTENSION} {name!r} cannot be used: {refusal}", fix=refusal.fix if refusal else "")
    heard = sorted(call.name for call in host.get_hookcallers(host.get_plugin(entry.module)) or ())
    origin = {"dist": entry.dist, "version": entry.version, "module": entry.module}
    if as_json:
        _print_json({"plugin": f"{EXTENSION}:{name}", "origin": origin, "hooks": heard})
        return
    console = Console(highlight=False)
    console.print(f"[bold]{EXTENSION}:{escape(name)}[/]\n[dim]{', '.join(map(str, origin.values()))}[/]")
    console.print(escape(f"  hooks  {', '.join(heard) or 'none'}"))


@app.command()
def doctor(
    strict: Annotated[bool, typer.Option("--strict", help="exit 1 for warnings too")] = False,
    imports: Annotated[bool, typer.Option("--imports", help="also import implementations (may load torch)")] = False,
    as_json: Json = False,
) -> None:
    """Check every installed plugin; exit 1 if one is in trouble."""
    from lmkit_cli.health import count, examine

    host = _host()
    findings = examine(host, imports=imports)
    levels = count(findings)
    if as_json:
        _print_json({"findings": findings})
    else:
        console = Console(highlight=False)
        for f in findings:
            console.print(
                f"[{LEVEL_STYLE[f.level]}]{f.level:<8}[/] [bold]{escape(f.subject)}[/] "
                f"{escape(f.code)}: {escape(f.message)}",
                soft_wrap=True,
            )
            if f.fix:
                console.print(f"         -> {escape(f.fix)}", soft_wrap=True)
        for entry in host.entries() if debug() else ():
            if entry.trace:
                console.print(f"[bold]{escape(entry.key)}[/]\n{escape(entry.trace)}", soft_wrap=True)
        counts = f"{levels['error']} errors, {levels['warning']} warnings, {levels['info']} notes"
        console.print(f"{len(host.entries())} plugins: {counts}")
    if levels["error"] or (strict and levels["warning"]):
        raise typer.Exit(1)


@app.command()
def new(
    kind: Annotated[str, typer.Argument(help=f"one of: {', '.join(scaffold.kinds())}")],
    name: Annotated[str, typer.Argument(help="its name: lower case, digits, underscores")],
    folder: Annotated[Path | None, typer.Option("--folder", help="where to write; default: ./lmkit-KIND-NAME")] = None,
    architecture: Annotated[
        str | None, typer.Option("--architecture", help="of a model: as in its config.json; default: NAMEForCausalLM")
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="also under a name that lmkit or an installed dist has already")
    ] = False,
) -> None:
    """Write a new plugin: a distribution with an implementation and a conformance test that passes."""
    written = scaffold.write_plugin(kind, name, folder, architecture, force=force, host=_host())
    console = Console(highlight=False)
    for path in written:
        console.print(f"wrote {escape(str(path))}", soft_wrap=True)
    root = written[0].parent
    kit = "" if find_spec("lmkit_testing") else f"{install('lmkit-testing')} && "
    console.print(escape(f"next: {kit}pip install -e '{root}[test]' && pytest {root}"), soft_wrap=True)


@app.command()
def suggest(
    model: Annotated[str, typer.Argument(help="checkpoint: a directory, a file, or a hub id")],
    device: Annotated[
        str | None, typer.Option(help="platform to run on, as 'cuda' or 'cuda:9.0:80GB'; default: this machine's")
    ] = None,
    as_json: Json = False,
) -> None:
    """Say which plugins run a checkpoint here, and the line that installs what is missing. Loads nothing."""
    from lmkit_cli.suggest import command_line, platform_here, suggest

    platform = device.partition(":")[0] if device else platform_here()
    if platform not in catalog()["platform"]:
        raise UnknownName("platform", platform, catalog()["platform"])
    checkpoint = _host().first("lmkit_resolve_checkpoint", Checkpoint, ref=model, options=CheckpointOptions())
    if checkpoint is None:
        raise ConfigError(f"no checkpoint {model!r}", fix="give a directory with config.json, or a hub id")
    found = suggest(checkpoint, platform)
    line = command_line(found)
    if as_json:
        _print_json({"platform": platform, "dists": found, "install": line})
        return
    console = Console(highlight=False)
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("dist", "for", "installed"):
        table.add_column(column)
    for s in found:
        table.add_row(s.dist, escape(s.why), "yes" if s.installed else "[yellow]no[/]")
    console.print(table)
    console.print(escape(line) or "all of it is installed", soft_wrap=True)


@app.command("test")
def run_test(
    plugin: Annotated[str, typer.Argument(help="KIND:NAME of an installed plugin")],
    arguments: Annotated[list[str] | None, typer.Argument(help="arguments for pytest, after --")] = None,
) -> None:
    """Run the conformance kit against an installed plugin; no test file is needed."""
    kind, name = _split(plugin)
    try:
        kits = import_module("lmkit_testing.run")
    except ImportError as e:
        raise ConfigError(f"the conformance kits need {e.name}", fix=install("lmkit-testing")) from e
    raise typer.Exit(kits.run_conformance(kind, name, arguments or []))


def _host() -> PluginHost:
    """The plugins that the environment and LMKIT_CONFIG allow."""
    return plugin_host(gather())


def _split(plugin: str) -> tuple[str, str]:
    kind, colon, name = plugin.partition(":")
    if not colon or not name:
        raise ConfigError(f"{plugin!r} is not KIND:NAME", fix="for example attention:torch; see lmkit plugins list")
    if kind not in GROUPS:
        raise UnknownName("plugin kind", kind, GROUPS)
    return kind, name


def _dist_name(requirement: str) -> str:
    from packaging.requirements import Requirement

    return Requirement(requirement).name


def _default(field: dataclasses.Field[Any]) -> Any:
    if field.default is not dataclasses.MISSING:
        return field.default
    return field.default_factory() if field.default_factory is not dataclasses.MISSING else "required"


def _plain(value: object) -> Any:
    """A spec's value as JSON: sets sorted, dimensions and ranges as text."""
    if isinstance(value, frozenset):
        return sorted(value)
    if isinstance(value, (tuple, list)):
        return [_plain(v) for v in value]
    if isinstance(value, dict):
        return {str(k): _plain(v) for k, v in value.items()}
    return value if isinstance(value, (str, int, float, bool, type(None))) else str(value)


def _text(value: object) -> str:
    plain = _plain(value)
    return ", ".join(map(str, plain)) if isinstance(plain, list) else str(plain)


def _print_json(value: object) -> None:
    sys.stdout.buffer.write(msgspec.json.format(msgspec.json.encode(value), indent=2) + b"\n")
    sys.stdout.buffer.flush()
