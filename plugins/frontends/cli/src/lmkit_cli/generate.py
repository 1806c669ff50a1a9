"""`lmkit generate`: many prompts offline. Text or JSONL in, JSONL out; an interrupted run can be resumed.

Input is one prompt per line, or JSON objects (.jsonl) with "prompt", "token_ids" or "messages", and optionally "id" and
"params" (fields of SamplingParams). Output has one object per prompt, in order.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import IO, TYPE_CHECKING, Annotated, Any

import typer
from lmkit.api import ConfigError, LmkitError, SamplingParams, UnknownKey

from lmkit_cli.options import plugin_host, with_config
from lmkit_cli.sampling import merge, with_sampling
from lmkit_cli.settings import Sourced

if TYPE_CHECKING:
    from lmkit_python.llm import LLM
    from lmkit_python.outputs import RequestOutput

KEYS = ("id", "prompt", "token_ids", "messages", "params")
BATCH = 256  # prompts between writes: what an interruption can cost


@dataclass(slots=True)
class Item:
    """One input line."""

    line: int
    id: object
    prompt: str | list[int] | None = None
    messages: list[dict[str, Any]] | None = None
    params: dict[str, Any] = field(default_factory=dict)


@with_config(model_argument=False)
@with_sampling
def command(
    settings: Sourced,
    sampling: dict[str, Any],
    file: Annotated[str, typer.Argument(help="prompts: text (one per line) or .jsonl; - reads lines from stdin")],
    output: Annotated[str, typer.Option("--output", "-o", help="JSONL file; - is stdout")] = "-",
    n: Annotated[int, typer.Option("--n", min=1, help="outputs per prompt")] = 1,
    resume: Annotated[
        bool, typer.Option(help="skip prompts that the output file has already, append the rest")
    ] = False,
) -> None:
    """Generate for a file of prompts, without a server. A bar on stderr shows progress."""
    items = read_items(file)
    done = _count_done(output) if resume else 0
    from lmkit_python.llm import LLM
    from lmkit_python.progress import prompt_bar

    from lmkit_cli.progress import StartBar

    with StartBar() as bar:
        llm = LLM(config=settings.config, host=plugin_host(settings), own_process=True, progress=bar)
    with llm, _open(output, append=resume) as out:
        defaults = dict(llm.text.default_params or {})
        params = {item.line: _params(item, defaults, sampling) for item in items}  # all of them, before any work
        with prompt_bar(len(items) - done) as advance:
            for start in range(done, len(items), BATCH):
                batch = items[start : start + BATCH]
                for item, result in zip(batch, run_batch(llm, batch, params, n), strict=True):
                    out.write(json.dumps(as_json(item, result), ensure_ascii=False) + "\n")
                    advance(sum(len(o.token_ids) for o in result.outputs), True)
                out.flush()


command.examples = """[bold]Examples[/]

lmkit generate prompts.txt -o out.jsonl --max-tokens 64 --temperature 0

lmkit generate chats.jsonl -o out.jsonl --model ./my-model --n 4 --resume
"""


def read_items(file: str) -> list[Item]:
    """The prompts of a file. Raises ConfigError naming file and line."""
    try:
        text = sys.stdin.read() if file == "-" else Path(file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {file}: {error}", fix="give a UTF-8 text or .jsonl file") from error
    lines = [(i, line) for i, line in enumerate(text.split("\n"), 1) if line.strip()]
    if not lines:
        raise ConfigError(f"{file} has no prompts", fix="write one prompt per line")
    if not file.endswith((".jsonl", ".ndjson")):
        return [Item(i, i, prompt=line.rstrip("\r")) for i, line in lines]
    return [_parse(file, i, line) for i, line in lines]


def _parse(file: str, number: int, line: str) -> Item:
    where = f"{file}, line {number}"
    try:
        data = json.loads(line)
    except ValueError as error:
        raise ConfigError(f"{where}: not JSON: {error}", fix="write one JSON object per line") from error
    if isinstance(data, str):
        return Item(number, number, prompt=data)
    if not isinstance(data, dict):
        raise ConfigError(f"{where}: needs an object or a text", fix=f"keys: {', '.join(KEYS)}")
    for key in data:
        if key not in KEYS:
            raise UnknownKey(key, KEYS, where)
    given = [key for key in ("prompt", "token_ids", "messages") if key in data]
    kinds = {"prompt": str, "token_ids": list, "messages": list}
    if len(given) != 1 or not isinstance(data[given[0]], kinds[given[0]]):
        raise ConfigError(f"{where}: needs exactly one of prompt (text), token_ids or messages (lists)")
    params = data.get("params", {})
    if not isinstance(params, dict):
        raise ConfigError(f"{where}: params must be an object", fix='{"max_tokens": 64}')
    prompt = data.get("prompt", data.get("token_ids"))
    return Item(number, data.get("id", number), prompt, data.get("messages"), params)


def _params(item: Item, defaults: dict[str, Any], sampling: dict[str, Any]) -> SamplingParams:
    """Line over command line over checkpoint. Raises ConfigError naming the line."""
    known = SamplingParams.__dataclass_fields__
    for key in item.params:
        if key not in known:
            raise UnknownKey(key, known, f"params of line {item.line}")
    try:
        return merge(defaults, {**sampling, **item.params})
    except LmkitError as error:
        raise ConfigError(f"line {item.line}: {error}", fix=error.fix) from error


def run_batch(llm: LLM, batch: Sequence[Item], params: dict[int, SamplingParams], n: int) -> Iterator[RequestOutput]:
    """Results in order. Chats and prompts are run together as far as they stand together."""
    for is_chat, group in groupby(batch, key=lambda item: item.messages is not None):
        items = list(group)
        own = [params[item.line] for item in items]
        if is_chat:
            yield from llm.chat([item.messages or [] for item in items], own, n=n, progress=False)
        else:
            yield from llm.generate([item.prompt or "" for item in items], own, n=n, progress=False)


def as_json(item: Item, result: RequestOutput) -> dict[str, Any]:
    """One output line."""
    outputs = []
    for one in result.outputs:
        data: dict[str, Any] = {"text": one.text, "token_ids": one.token_ids, "finish_reason": one.finish_reason}
        if one.reasoning:
            data["reasoning"] = one.reasoning
        if one.tool_calls:
            data["tool_calls"] = [{"id": c.id, "name": c.name, "arguments": c.arguments} for c in one.tool_calls]
        if one.logprobs is not None:
            data["logprobs"] = [entry.logprob for entry in one.logprobs]
        if one.error is not None:
            data["error"] = {"code": one.error.code, "message": one.error.message}
        outputs.append(data)
    return {"id": item.id, "prompt_tokens": len(result.prompt_token_ids), "outputs": outputs}


def _count_done(output: str) -> int:
    """Whole lines of an earlier run. Raises ConfigError for stdout; a torn last line is cut off."""
    if output == "-":
        raise ConfigError("--resume needs an output file", fix="give -o FILE")
    path = Path(output)
    if not path.exists():
        return 0
    data = path.read_bytes()
    whole = data[: data.rfind(b"\n") + 1]
    if len(whole) != len(data):
        with path.open("r+b") as out:
            out.truncate(len(whole))
    return whole.count(b"\n")


@contextmanager
def _open(output: str, append: bool) -> Iterator[IO[str]]:
    if output == "-":
        yield sys.stdout
        return
    try:
        out = Path(output).open("a" if append else "w", encoding="utf-8")  # noqa: SIM115  closed below
    except OSError as error:
        raise ConfigError(f"cannot write {output}: {error.strerror}", fix="check the path given to -o") from error
    try:
        with out:
            yield out
    except OSError as error:  # what was written before stays
        raise ConfigError(
            f"cannot write {output}: {error.strerror}", fix="make room, then go on where it stopped with --resume"
        ) from error
