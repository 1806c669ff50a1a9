"""`lmkit render`: what a model will see of a conversation. No weights, no torch."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from lmkit.api import ConfigError, InvalidParam

from lmkit_cli.options import plugin_host, with_config
from lmkit_cli.settings import Sourced


@with_config
def command(
    settings: Sourced,
    file: Annotated[
        str, typer.Argument(metavar="MESSAGES", help='JSON: messages, or {"messages", "tools", ...}; - is stdin')
    ] = "-",
    tools: Annotated[str | None, typer.Option("--tools", metavar="FILE", help="JSON list of tools")] = None,
    template_kwargs: Annotated[
        str | None, typer.Option("--template-kwargs", metavar="JSON", help='as {"enable_thinking": false}')
    ] = None,
    prompt: Annotated[bool, typer.Option("--prompt/--no-prompt", help="end where the answer begins")] = True,
    continued: Annotated[bool, typer.Option("--continue", help="go on with the last message")] = False,
    tokens: Annotated[
        bool, typer.Option("--tokens", help="one token a line: its id, * for control tokens, its text")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="text, token ids and findings about the template as data")
    ] = False,
) -> None:
    """Print the prompt that the chat template makes of messages, as the server would."""
    from lmkit.plugins.resolve import resolve
    from lmkit.prompts import shown
    from lmkit.text.side import TextSide
    from lmkit_python.front.ask import ChatAsk
    from lmkit_python.front.prepare import rendered

    request = _read(file)
    given = request if isinstance(request, dict) else {"messages": request}
    messages = given.get("messages")
    if not isinstance(messages, list) or not messages or not all(isinstance(m, dict) for m in messages):
        raise InvalidParam("messages", messages, "a list of messages like {'role': 'user', 'content': 'Hello'}")
    given_tools = _read(tools) if tools else given.get("tools") or []
    kwargs = _kwargs(template_kwargs) if template_kwargs else given.get("chat_template_kwargs") or {}
    host = plugin_host(settings)
    plan, checkpoint, _ = resolve(settings.config, host)
    text = TextSide.open(checkpoint, plan, settings.config)
    ask = ChatAsk(
        messages=messages, tools=given_tools, template_options=kwargs, add_generation_prompt=prompt and not continued,
        continue_final=continued, documents=given.get("documents") or (),
    )  # fmt: skip
    read = rendered(text, ask)
    if not (tokens or as_json):
        sys.stdout.write(shown(read) + "\n")
        return
    ids = text.encode_prompt(read, add_special=False)
    if as_json:
        findings = text.renderer.findings if text.renderer is not None else {}
        print(json.dumps({"text": shown(read), "token_ids": ids, "findings": findings}, indent=2))
        return
    for token in ids:
        control = "*" if token in text.tokenizer.special_ids else " "
        print(f"{token:>8} {control} {text.tokenizer.piece(token).decode(errors='replace')!r}")


command.examples = """[bold]Examples[/]

lmkit render demo messages.json

lmkit render ./my-model messages.json --tokens --template-kwargs '{"enable_thinking": true}'

echo '[{"role": "user", "content": "Hello"}]' | lmkit render demo -
"""


def _read(file: str) -> Any:
    try:
        return json.loads(sys.stdin.read() if file == "-" else Path(file).read_text(encoding="utf-8"))
    except OSError as e:
        raise ConfigError(f"cannot read {file}: {e.strerror}", fix="check the path") from e
    except ValueError as e:
        raise ConfigError(f"{file} is not JSON: {e}", fix="give a JSON file") from e


def _kwargs(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as e:
        raise ConfigError(f"--template-kwargs is not JSON: {e}", fix="""as --template-kwargs '{"a": 1}'""") from e
    if not isinstance(value, dict):
        raise ConfigError("--template-kwargs is a JSON object", fix="""as --template-kwargs '{"a": 1}'""")
    return value
