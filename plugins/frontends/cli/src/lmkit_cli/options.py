"""Command-line options derived from EngineConfig: one per field, grouped by section, documented where it is declared.

    @with_config
    def command(settings: Sourced, port: Annotated[int, typer.Option(help="...")] = 8000) -> None: ...

The command then also takes --config FILE, every engine option, and dotted ones for plugins (--attention.NAME.OPTION).
"""

from __future__ import annotations

import inspect
import logging
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer
from lmkit.api import ConfigError
from lmkit.config.schema import Leaf, leaves
from typer.core import TyperCommand

from lmkit_cli.settings import Sourced, gather, parse_dotted

if TYPE_CHECKING:
    from lmkit.plugins.host import PluginHost

DOTTED = re.compile(r"^--([a-z][\w-]*(?:\.[\w-]+)+)(?:=(.*))?$", re.DOTALL)
META = "lmkit.dotted"  # where ConfigCommand leaves dotted options for the function

ALSO = {"--loader": ("--load-format",)}  # flags of other servers that take the same words

PANELS = {
    "model": "Model",
    "cache": "KV cache",
    "sched": "Scheduling",
    "parallel": "Processes and devices",
    "lora": "Adapters",
    "spec": "Speculative decoding",
    "": "Plugins and logs",
}


class ConfigCommand(TyperCommand):
    """Takes dotted options out of the arguments before click sees them."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        rest, dotted = split_dotted(args)
        ctx.meta[META] = dotted
        return super().parse_args(ctx, rest)


def split_dotted(args: Sequence[str]) -> tuple[list[str], list[tuple[str, str]]]:
    """(other arguments, [(dotted name, text)]). Raises ConfigError for a dotted option without a value."""
    rest: list[str] = []
    dotted: list[tuple[str, str]] = []
    left = list(args)
    while left:
        arg = left.pop(0)
        if arg == "--":
            return [*rest, arg, *left], dotted
        found = DOTTED.match(arg)
        if not found:
            rest.append(arg)
            continue
        name, value = found.groups()
        if value is None:
            if not left:
                raise ConfigError(f"{arg} needs a value", fix=f"write {arg} VALUE")
            value = left.pop(0)
        dotted.append((name, value))
    return rest, dotted


def with_config(function: Callable[..., Any] | None = None, *, model_argument: bool = True) -> Any:
    """Decorator: adds the engine options, passes their merged values as `settings`, and `ctx` if asked. See the module.

    `model_argument`: the model may be given as the first argument, not only as --model.
    """
    if function is None:
        return lambda f: with_config(f, model_argument=model_argument)
    fields = {name_of(leaf): leaf for leaf in leaves().values()}
    hints = get_type_hints(function, include_extras=True)
    own = [
        p.replace(annotation=hints[n])
        for n, p in inspect.signature(function).parameters.items()
        if n not in ("settings", "ctx")
    ]
    assert not {p.name for p in own} & set(fields), "an option of the command has the name of an engine option"

    @wraps(function)
    def command(ctx: typer.Context, **kwargs: Any) -> Any:
        flags, names = parse_dotted(ctx.meta.get(META, ()))
        for name, leaf in fields.items():
            given = kwargs.pop(name)
            if leaf.several and given is not None:
                given = ",".join(given) if given else None
            if given is not None:
                where = f"command line {leaf.flag}"
                flags[leaf.key] = leaf.parse(given, where) if isinstance(given, str) else leaf.check(given, where)
        if model_argument and (model := kwargs.pop("model_name")) is not None:
            if flags.get("model.model", model) != model:
                raise ConfigError(f"two models: {model!r} and --model {flags['model.model']!r}", fix="give one")
            flags["model.model"], names["model.model"] = model, "MODEL"
        settings = gather(flags, kwargs.pop("config"), flag_names=names, official_only=kwargs.pop("no_plugins"))
        if "ctx" in hints:
            kwargs["ctx"] = ctx
        with logged(settings.config.log_level, settings.config.log_format):
            return function(settings=settings, **kwargs)

    first = [_parameter("ctx", typer.Context, inspect.Parameter.empty)]
    if model_argument:
        argument = typer.Argument(help=leaves()["model.model"].doc, metavar="MODEL", show_default="demo")
        first.append(_parameter("model_name", Annotated[str | None, argument], None))
    file = typer.Option("--config", help="configuration file, TOML or YAML", metavar="FILE", show_default=False)
    safe = typer.Option("--no-plugins", help="safe mode: only the official plugins", rich_help_panel=PANELS[""])
    last = [
        _parameter("config", Annotated[str | None, file], None),
        _parameter("no_plugins", Annotated[bool, safe], False),
    ]
    parameters = [*first, *own, *last, *(_option(name, leaf) for name, leaf in fields.items())]
    command.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in parameters]
    )
    command.__annotations__ = {p.name: p.annotation for p in parameters}
    command.command_class = ConfigCommand  # type: ignore[attr-defined]
    return command


@contextmanager
def logged(level: str | None, form: str) -> Iterator[None]:
    """Logs as --log-level and --log-format say; without a level a command logs as it likes."""
    if level is None:
        yield
        return
    from lmkit.logs import TIMED, write_json, written_logs

    with written_logs(TIMED, logging.getLevelNamesMapping()[level.upper()]):
        if form == "json":
            write_json()
        yield


def plugin_host(settings: Sourced) -> PluginHost:
    """The plugins that environment, file and command line allow."""
    from lmkit.plugins.host import PluginHost
    from lmkit.plugins.switches import Switches

    switches = Switches.build(
        settings.environment.switches,
        disable=settings.disable,
        only=settings.only,
        official_only=settings.official_only,
    )
    return PluginHost(switches=switches)


def name_of(leaf: Leaf) -> str:
    """Python name of the option's parameter."""
    return leaf.flag.removeprefix("--").replace("-", "_")


def _option(name: str, leaf: Leaf) -> inspect.Parameter:
    flag = f"{leaf.flag}/--no-{leaf.flag.removeprefix('--')}" if leaf.type is bool else leaf.flag
    kind: Any = bool if leaf.type is bool else list[str] if leaf.several else str
    shown = False if leaf.default is None else str(leaf.default).lower() if kind is bool else str(leaf.default)
    option = typer.Option(
        flag,
        *ALSO.get(flag, ()),
        help=f"{leaf.doc}; repeatable" if leaf.several else leaf.doc,
        metavar=None if kind is bool else {int: "N", str: "TEXT"}[leaf.type],
        rich_help_panel=PANELS[leaf.section],
        show_default=shown,
    )
    return _parameter(name, Annotated[kind | None, option], None)


def _parameter(name: str, annotation: Any, default: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)
