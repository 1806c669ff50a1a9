"""`lmkit chat`: a conversation in the terminal. Reads lines from a pipe just as well."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import perf_counter
from typing import TYPE_CHECKING, Annotated, Any

import typer
from lmkit.api import RequestError, SamplingParams
from rich.console import Console
from rich.markup import escape

from lmkit_cli.options import plugin_host, with_config
from lmkit_cli.sampling import merge, with_sampling
from lmkit_cli.settings import Sourced

if TYPE_CHECKING:
    from lmkit.llm import LLM

HELP = """[bold]/help[/]           this
[bold]/reset[/]          forget the conversation
[bold]/system TEXT[/]    forget it, and begin with these instructions
[bold]/think[/]          switch reasoning on or off
[bold]/stats[/]          switch the line of figures on or off
[bold]/quit[/]           leave (also Ctrl-D); Ctrl-C stops an answer"""


@with_config
@with_sampling
def command(
    settings: Sourced,
    sampling: dict[str, Any],
    system: Annotated[str | None, typer.Option(help="instructions for the model")] = None,
    think: Annotated[
        bool | None, typer.Option("--think/--no-think", help="ask for reasoning, if the chat template offers it")
    ] = None,
    stats: Annotated[bool, typer.Option("--stats/--no-stats", help="figures after each answer")] = True,
) -> None:
    """Chat with a model in the terminal. Type /help there. Input from a pipe is taken line by line."""
    from lmkit.llm import LLM

    from lmkit_cli.progress import StartBar

    console = Console(highlight=False)
    with StartBar() as bar:
        llm = LLM(config=settings.config, host=plugin_host(settings), own_process=True, progress=bar)
    with llm:
        params = merge(dict(llm.text.default_params or {}), sampling)
        session = Session(llm, params, console, system, stats and console.is_terminal, think)
        if sys.stdin.isatty():
            console.print(f"[dim]{escape(llm.facts.model)} on {escape(llm.facts.device)}; /help for commands[/]")
        session.run()


command.examples = """[bold]Examples[/]

lmkit chat

lmkit chat ./my-model --system "Answer in French." --temperature 0.7

echo "What is 2 + 3?" | lmkit chat
"""


@dataclass(slots=True)
class Session:
    """One conversation."""

    llm: LLM
    params: SamplingParams
    console: Console
    system: str | None = None
    stats: bool = True
    think: bool | None = None  # None: what the template does by itself
    messages: list[dict[str, Any]] = field(default_factory=list)

    def run(self) -> None:
        """Until end of input or /quit."""
        self._reset()
        for line in self._lines():
            if line in ("/quit", "/exit"):
                return
            if line.startswith("/"):
                self._command(line)
            elif line:
                self._answer(line)

    def _lines(self) -> Iterator[str]:
        interactive = sys.stdin.isatty()
        if interactive:
            import readline  # noqa: F401  line editing and history of input()
        while True:
            try:
                yield (input("> ") if interactive else _read_line()).strip()
            except EOFError:
                return
            except KeyboardInterrupt:
                if not interactive:
                    raise
                self.console.print("[dim](/quit or Ctrl-D to leave)[/]")

    def _reset(self) -> None:
        self.messages = [{"role": "system", "content": self.system}] if self.system else []

    def _command(self, line: str) -> None:
        name, _, rest = line.partition(" ")
        if name == "/help":
            self.console.print(HELP)
        elif name == "/reset":
            self._reset()
        elif name == "/system":
            self.system = rest.strip() or None
            self._reset()
        elif name == "/stats":
            self.stats = not self.stats
        elif name == "/think":
            self.think = not self.think
        else:
            self.console.print(f"[red]unknown command {escape(name)}[/]; /help lists them")

    def _answer(self, line: str) -> None:
        """Prints the answer as it comes and adds both sides to the conversation. Errors leave it as it was."""
        self.messages.append({"role": "user", "content": line})
        began = perf_counter()
        try:
            text, usage, first = self._stream(began)
        except RequestError as error:
            self.messages.pop()
            self.console.print(f"[red]{escape(str(error))}[/] {escape(error.fix)}")
            return
        self.messages.append({"role": "assistant", "content": text})
        if self.stats and usage is not None:
            seconds = max(perf_counter() - began - first, 1e-9)
            rate = max(usage.completion_tokens - 1, 0) / seconds
            self.console.print(
                f"[dim]{usage.completion_tokens} tokens, {rate:.0f} tok/s, first after {first * 1000:.0f} ms, "
                f"prompt {usage.prompt_tokens} ({usage.cached_tokens} cached)[/]"
            )

    def _stream(self, began: float) -> tuple[str, Any, float]:
        """(text, usage, seconds to the first token). Ctrl-C ends the answer, not the session."""
        from lmkit.front.ask import ChatAsk
        from lmkit.front.message import Message
        from lmkit.front.run import check_finish

        message, first, thinking = Message(), 0.0, False
        options = {} if self.think is None else {"enable_thinking": self.think}
        ask = ChatAsk(messages=self.messages, params=self.params, template_options=options)
        with _stoppable():
            for turn, change in self.llm.changes(ask):
                message, first = turn.message, first or perf_counter() - began
                if change.reasoning:
                    thinking = True
                    self.console.print(change.reasoning, end="", style="dim italic", markup=False)
                if change.content:
                    if thinking:
                        self.console.print()
                        thinking = False
                    self.console.print(change.content, end="", markup=False, soft_wrap=True)
                check_finish(turn)
        self.console.print()
        return message.content, message.finish and message.finish.usage, first


def _read_line() -> str:
    line = sys.stdin.readline()
    if not line:
        raise EOFError
    return line


@contextmanager
def _stoppable() -> Iterator[None]:
    try:
        yield
    except KeyboardInterrupt:
        return
