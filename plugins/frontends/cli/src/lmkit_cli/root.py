"""The command group: a table of names, summaries and references. A command is imported when it is run."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from importlib import import_module, metadata
from typing import Annotated, Any

import typer
from lmkit import __version__
from lmkit.api import ConfigError, UnknownName
from lmkit.config.environment import read_environment
from lmkit.plugins.catalog import install
from lmkit.plugins.switches import Switches
from typer.core import TyperCommand, TyperGroup

RUN, LOOK, MANAGE, MORE = "Run", "Look", "Manage", "From plugins"

# name -> (reference to a function or typer app, one line for --help, panel)
COMMANDS: dict[str, tuple[str, str, str]] = {
    "serve": ("lmkit_http.command:command", "Serve a model over HTTP (OpenAI API).", RUN),
    "chat": ("lmkit_cli.chat:command", "Chat with a model in the terminal.", RUN),
    "complete": ("lmkit_cli.complete:command", "Complete one prompt and print the text.", RUN),
    "generate": ("lmkit_cli.generate:command", "Generate for a file of prompts, offline: JSONL out.", RUN),
    "inspect": ("lmkit_cli.inspect:command", "Show what a checkpoint is and what would run it.", LOOK),
    "plan": ("lmkit_cli.plan:command", "Show the memory budget of a model before loading it.", LOOK),
    "explain": ("lmkit_cli.explain:command", "Show what would be chosen, and why not the others.", LOOK),
    "parse": ("lmkit_cli.parse:command", "Show what a tool or reasoning parser makes of an output.", LOOK),
    "render": ("lmkit_cli.render:command", "Show what the model sees of a conversation.", LOOK),
    "verify": ("lmkit_cli.verify:command", "Check that template, parsers, tokenizer and grammars fit together.", LOOK),
    "show-config": ("lmkit_cli.show_config:command", "Show every configuration value and who set it.", LOOK),
    "bench": ("lmkit_bench.command:app", "Measure engine, server, start-up and kernels; compare results.", LOOK),
    "doctor": ("lmkit_cli.doctor:command", "Check this installation.", MANAGE),
    "collect-env": ("lmkit_cli.collect_env:command", "Print versions, devices and plugins for a report.", MANAGE),
    "plugins": ("lmkit_cli.plugins:app", "List, show, check and create plugins.", MANAGE),
}

EXAMPLES = """[bold]Examples[/]

lmkit serve                                  the built-in demo model on http://127.0.0.1:8000

lmkit chat                                   talk to it in the terminal

lmkit serve ./my-model --attention torch     a local checkpoint, with a named attention plugin

lmkit plan Qwen/Qwen2.5-0.5B-Instruct        will it fit?

lmkit generate prompts.txt -o out.jsonl      offline, many prompts
"""


class LazyGroup(TyperGroup):
    """Lists commands from the table; resolves one by importing it."""

    def list_commands(self, ctx: Any) -> list[str]:
        return [*COMMANDS, *(name for name in plugin_commands() if name not in COMMANDS)]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """A stand-in that knows its summary: enough for help and completion of names."""
        if cmd_name in COMMANDS:
            _, summary, panel = COMMANDS[cmd_name]
        elif (command := plugin_commands().get(cmd_name)) is not None:
            summary, panel = command.summary, MORE
        else:
            return None
        return TyperCommand(cmd_name, help=summary, short_help=summary, rich_help_panel=panel)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """The real command. Raises UnknownName with the nearest name."""
        name, rest = args[0], args[1:]
        if name in COMMANDS:
            return name, load_command(name, COMMANDS[name][0]), rest
        found = {} if name.startswith("-") else plugin_commands()
        if name in found:
            return name, load_command(name, found[name].target), rest
        if name.startswith("-"):
            return super().resolve_command(ctx, args)
        raise UnknownName("command", name, [*COMMANDS, *found], fix="lmkit --help")


def load_command(name: str, ref: str) -> Any:
    """The click command that `ref` names: a typer app, or a function."""
    module, _, attribute = ref.partition(":")
    try:
        target = getattr(import_module(module), attribute)
    except ModuleNotFoundError as e:
        if e.name != module.partition(".")[0]:
            raise
        fix = install(e.name.replace("_", "-"))
        raise ConfigError(f"lmkit {name} is a dist of its own, which is not installed", fix=fix) from e
    if not isinstance(target, typer.Typer):
        app = typer.Typer(add_completion=False, rich_markup_mode="rich")
        app.command(name, cls=getattr(target, "command_class", None), epilog=getattr(target, "examples", None))(target)
        target = app
    command = typer.main.get_command(target)
    command.name = name
    return command


@dataclass(frozen=True, slots=True)
class Command:
    """A command of another dist: an entry point of the group `lmkit.command`, named and summed up by its metadata."""

    name: str
    target: str  # "package.module:attribute": a typer app, or a function
    dist: str
    summary: str

    @property
    def key(self) -> str:
        return f"command:{self.name}"


@cache
def plugin_commands() -> dict[str, Command]:
    """Commands of other dists than those of the table, by name. Nothing of theirs is imported."""
    disabled = Switches.build(read_environment().switches).disable
    found = {}
    for entry in metadata.entry_points(group="lmkit.command"):
        if entry.dist is None or entry.name in COMMANDS:
            continue
        about = entry.dist.metadata
        summary = about["Summary"] if "Summary" in about else entry.value  # noqa: SIM401 - it has no `get`
        command = Command(entry.name, entry.value, entry.dist.name, summary)
        if not any(pattern.matches(command) for pattern in disabled):
            found[entry.name] = command
    return dict(sorted(found.items()))


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"lmkit {__version__}")
        raise typer.Exit


def _callback(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Plugin-driven LLM inference and serving."""


def root() -> Any:
    """The whole command line as a click group."""
    app = typer.Typer(
        name="lmkit", cls=LazyGroup, rich_markup_mode="rich", no_args_is_help=True, epilog=EXAMPLES,
        context_settings={"help_option_names": ["-h", "--help"]},
    )  # fmt: skip
    app.callback()(_callback)
    return typer.main.get_command(app)
