"""`lmkit complete`: one prompt in, its completion out."""

from __future__ import annotations

import sys
from typing import Annotated, Any

import typer
from lmkit.api import ConfigError

from lmkit_cli.options import plugin_host, with_config
from lmkit_cli.sampling import merge, with_sampling
from lmkit_cli.settings import Sourced


def _prompt(text: str) -> str:
    """The argument; "-" reads stdin."""
    prompt = sys.stdin.read() if text == "-" else text
    if not prompt:
        raise ConfigError("the prompt is empty", fix="give a text, or - and a text on stdin")
    return prompt


@with_config(model_argument=False)
@with_sampling
def command(
    settings: Sourced,
    sampling: dict[str, Any],
    prompt: Annotated[str, typer.Argument(help="the text to continue; - reads stdin", metavar="PROMPT")],
) -> None:
    """Complete one prompt and print the text as it is made. No chat template is applied."""
    text = _prompt(prompt)
    from lmkit_python.front.ask import TextAsk
    from lmkit_python.front.run import check_finish
    from lmkit_python.llm import LLM

    with LLM(config=settings.config, host=plugin_host(settings), own_process=True) as llm:
        params = merge(dict(llm.text.default_params or {}), sampling)
        for turn, change in llm.changes(TextAsk(prompts=[text], params=params)):
            print(change.content, end="", flush=True)
            check_finish(turn)
    print()


command.examples = """[bold]Examples[/]

lmkit complete "Once upon a time" --max-tokens 50

echo "def fib(n):" | lmkit complete - --model ./my-model --temperature 0
"""
