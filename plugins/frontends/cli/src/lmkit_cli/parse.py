"""`lmkit parse`: what a tool and a reasoning parser make of a model's output. No model, no torch.

Result: {"content", "reasoning", "tool_calls": [{"name", "arguments"}], "warnings"}. `content` and `reasoning` are null
when there is no text of that kind. `arguments` is the JSON value; a text that is not JSON stands as a string, with a
warning. A call that the model did not close has "complete": false, and as its arguments the text so far. With --jsonl a
line that cannot be used gets {"error": {"code", "message", "fix"}} in its place.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer
from lmkit.api import (
    ConfigError,
    InvalidParam,
    LmkitError,
    ParseWarning,
    ToolDef,
    UnknownKey,
    UnknownName,
)
from lmkit.text.formats import AnyFormat, Chain, in_order, load_format, start_parser
from lmkit.text.tools import tool_def
from lmkit_python.front.message import Message, ToolCall

if TYPE_CHECKING:
    from lmkit.plugins.host import PluginHost

KEYS = ("text", "tool_parser", "reasoning_parser", "tools", "template_kwargs", "chunks")
MAX_CUT = 20  # characters of a random piece, at most


@dataclass(frozen=True)
class Case:
    """One output to parse. `chunks`: "" feeds it whole, otherwise as in --chunks."""

    text: str = ""
    tool_parser: str | None = None
    reasoning_parser: str | None = None
    tools: Sequence[ToolDef] = ()
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    chunks: str = ""


def command(
    file: Annotated[str, typer.Argument(help="the output of a model; with --jsonl cases; - is stdin")] = "-",
    tool_parser: Annotated[str | None, typer.Option("--tool-parser", metavar="NAME", show_default="none")] = None,
    reasoning_parser: Annotated[
        str | None, typer.Option("--reasoning-parser", metavar="NAME", show_default="none")
    ] = None,
    tools: Annotated[
        str | None, typer.Option("--tools", metavar="FILE", help="JSON list of tools: their schemas type arguments")
    ] = None,
    template_kwargs: Annotated[
        str | None, typer.Option("--template-kwargs", metavar="JSON", help='as {"enable_thinking": false}')
    ] = None,
    chunks: Annotated[
        str, typer.Option("--chunks", metavar="N|random:SEED", help="characters fed at a time", show_default="all")
    ] = "",
    jsonl: Annotated[bool, typer.Option("--jsonl", help=f"cases, one a line: {{{', '.join(KEYS)}}}")] = False,
) -> int:
    """Parse a model's output into content, reasoning and tool calls, as the server does."""
    parsers = Parsers()
    default = Case("", tool_parser, reasoning_parser, _read_tools(tools), _read_kwargs(template_kwargs), chunks)
    parsers.check(default)
    if jsonl:
        return 2 if run_lines(_lines(file), default, parsers, sys.stdout.buffer) else 0
    result = parsers.run(replace(default, text=_text(file)))
    print(json.dumps(result, indent=2, ensure_ascii=True))
    return 0


EXAMPLES = """[bold]Examples[/]

lmkit parse output.txt --tool-parser hermes --reasoning-parser think

lmkit parse - --tool-parser hermes --tools tools.json --chunks random:7 < output.txt

lmkit parse cases.jsonl --jsonl > results.jsonl
"""
command.examples = EXAMPLES  # type: ignore[attr-defined]


class Parsers:
    """Formats by name, each loaded once."""

    def __init__(self) -> None:
        self._formats: dict[tuple[str, str], AnyFormat] = {}

    @cached_property
    def _host(self) -> PluginHost:
        from lmkit_cli.options import plugin_host
        from lmkit_cli.settings import gather

        return plugin_host(gather({}))

    def check(self, case: Case) -> None:
        """Raises what `run` would raise for any text: unknown names, a wrong `chunks`."""
        self._stages(case)
        split("", case.chunks)

    def run(self, case: Case) -> dict[str, Any]:
        """The result object of one case. Raises UnknownName, PluginError, ConfigError, InvalidParam."""
        from lmkit.plugins.refs import call

        stages = self._stages(case)
        names = " + ".join(name for name in (case.reasoning_parser, case.tool_parser) if name)
        return call(f"parser {names}", parse, stages, case)

    def _stages(self, case: Case) -> list[AnyFormat]:
        named = (("reasoning_parser", case.reasoning_parser), ("tool_parser", case.tool_parser))
        return [self._format(kind, name) for kind, name in named if name not in (None, "none")]

    def _format(self, kind: str, name: str) -> AnyFormat:
        if (kind, name) not in self._formats:
            if name == "auto":
                raise ConfigError(f"{kind} auto needs a checkpoint", fix="name a parser: lmkit plugins list")
            if not self._host.entries(kind, name):
                raise UnknownName(kind.replace("_", " "), name, self._host.names(kind), "lmkit plugins list")
            self._formats[kind, name] = load_format(self._host, kind, name)
        return self._formats[kind, name]


def parse(stages: Sequence[AnyFormat], case: Case) -> dict[str, Any]:
    """Feeds the text; what the message amounts to."""
    parser = Chain(*(start_parser(fmt, None, case.tools, case.template_kwargs) for fmt in in_order(*stages)))
    events = [event for piece in split(case.text, case.chunks) for event in parser.feed(piece)] + parser.flush()
    message = Message()
    message.feed(events)
    found = [event for event in events if isinstance(event, ParseWarning)]
    warnings = [f"{w.message}: {w.text}" if w.text else w.message for w in found]
    return {
        "content": message.content or None,
        "reasoning": message.reasoning or None,
        "tool_calls": [_shown(call, warnings) for call in message.calls],
        "warnings": warnings,
    }


def _shown(call: ToolCall, warnings: list[str]) -> dict[str, Any]:
    if not call.complete:
        return {"name": call.name, "arguments": call.arguments, "complete": False}
    return {"name": call.name, "arguments": _value(call.name, call.arguments, warnings)}


def split(text: str, chunks: str) -> Iterator[str]:
    """Pieces of `text`: all of it (""), N characters each, or of random length ("random:SEED"). Raises ConfigError."""
    source = random.Random(chunks)
    if not chunks:
        lengths: Iterable[int] = iter((len(text),))
    elif chunks.isdecimal() and int(chunks) > 0:
        lengths = iter(lambda: int(chunks), 0)
    elif chunks.startswith("random:") and len(chunks) > len("random:"):
        lengths = iter(lambda: source.randint(1, MAX_CUT), 0)
    else:
        raise ConfigError(f"chunks: got {chunks!r}", fix="give a number of characters, or random:SEED")
    at = 0
    for length in lengths:
        if at >= len(text):
            break
        yield text[at : at + length]
        at += length


def run_lines(lines: Iterable[bytes], default: Case, parsers: Parsers, out: Any) -> int:
    """One result per line that is not blank. Returns the number of errors."""
    num_errors = 0
    for line in lines:
        if not line.strip():
            continue
        try:
            result = parsers.run(read_case(line, default))
        except LmkitError as error:
            num_errors += 1
            result = {"error": {"code": error.code, "message": str(error), "fix": error.fix}}
        out.write(json.dumps(result).encode() + b"\n")
    out.flush()
    return num_errors


def read_case(line: bytes, default: Case) -> Case:
    """A line over the options of the command line. Raises ConfigError, UnknownKey, InvalidParam."""
    data = _loads(line, "the line")
    if not isinstance(data, dict):
        raise ConfigError("the line is not an object", fix=f"keys: {', '.join(KEYS)}")
    for key in data:
        if key not in KEYS:
            raise UnknownKey(key, KEYS, "the line")
    if not isinstance(data.get("text"), str):
        raise InvalidParam("text", data.get("text"), "a text")
    given = {key: value for key, value in data.items() if value is not None}
    for key in ("tool_parser", "reasoning_parser"):
        if not isinstance(given.get(key, ""), str):
            raise InvalidParam(key, given[key], "a name")
    if "tools" in given:
        given["tools"] = _tools(given["tools"])
    if not isinstance(given.get("template_kwargs", {}), dict):
        raise InvalidParam("template_kwargs", given["template_kwargs"], "an object")
    if "chunks" in given:
        given["chunks"] = str(given["chunks"])
    return replace(default, **given)


def _loads(text: str | bytes, where: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where} is not JSON: {error}", fix="write UTF-8 JSON") from error


def _value(name: str, arguments: str, warnings: list[str]) -> Any:
    """The arguments as a value; a text that is not strict JSON stays a text."""
    try:
        return json.loads(arguments, parse_constant=_no_constant)
    except (ValueError, RecursionError):
        warnings.append(f"the arguments of {name} are not JSON")
        return arguments


def _no_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is not JSON")


def _tools(data: Any) -> tuple[ToolDef, ...]:
    if not isinstance(data, list):
        raise InvalidParam("tools", data, "a list")
    return tuple(map(tool_def, data))


def _read_tools(file: str | None) -> tuple[ToolDef, ...]:
    return _tools(_loads(_read(file), file)) if file is not None else ()


def _read_kwargs(text: str | None) -> dict[str, Any]:
    data = _loads(text, "--template-kwargs") if text is not None else {}
    if not isinstance(data, dict):
        raise InvalidParam("--template-kwargs", data, "an object")
    return data


def _text(file: str) -> str:
    try:
        return (sys.stdin.buffer.read() if file == "-" else _read(file)).decode()
    except UnicodeDecodeError as error:
        raise ConfigError(f"{file} is not text: {error}", fix="give UTF-8") from error


def _lines(file: str) -> Iterable[bytes]:
    return sys.stdin.buffer if file == "-" else _read(file).split(b"\n")


def _read(file: str) -> bytes:
    try:
        return Path(file).read_bytes()
    except OSError as error:
        raise ConfigError(f"cannot read {file}: {error.strerror}", fix="check the path") from error
