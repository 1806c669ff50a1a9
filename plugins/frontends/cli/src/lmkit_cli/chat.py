"""`lmkit chat`: a conversation in the terminal. Reads lines from a pipe just as well."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import perf_counter
from typing import TYPE_CHECKING, Annotated, Any

import typer
from lmkit.api import ConfigError, RequestError
from rich.console import Console
from rich.markup import escape

from lmkit_cli.options import plugin_host, with_config
from lmkit_cli.sampling import merge, with_sampling
from lmkit_cli.settings import Sourced

if TYPE_CHECKING:
    from lmkit.api import SamplingParams
    from lmkit_python.front.message import Change
    from lmkit_python.llm import LLM

    Messages = list[dict[str, Any]]
    Answers = Callable[[Messages, bool | None], Iterator[Change]]  # the conversation, and whether to think

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
    url: Annotated[
        str | None, typer.Option(help="talk to a server (OpenAI API) instead: http://HOST:PORT; no model is loaded")
    ] = None,
    api_key: Annotated[str, typer.Option(help="of that server", envvar="LMKIT_API_KEY")] = "",
) -> None:
    """Chat with a model in the terminal. Type /help there. Input from a pipe is taken line by line."""
    console = Console(highlight=False)
    with _remote(url, api_key, settings, sampling) if url else _local(settings, sampling) as (answers, title):
        session = Session(answers, console, system, stats and console.is_terminal, think)
        if sys.stdin.isatty():
            console.print(f"[dim]{escape(title)}; /help for commands[/]")
        session.run()


command.examples = """[bold]Examples[/]

lmkit chat

lmkit chat ./my-model --system "Answer in French." --temperature 0.7

echo "What is 2 + 3?" | lmkit chat

lmkit chat --url http://127.0.0.1:8000       talk to a server that is running
"""


@contextmanager
def _local(settings: Sourced, sampling: dict[str, Any]) -> Iterator[tuple[Answers, str]]:
    """A model of this machine."""
    from lmkit_python.llm import LLM

    from lmkit_cli.progress import StartBar

    with StartBar() as bar:
        llm = LLM(config=settings.config, host=plugin_host(settings), own_process=True, progress=bar)
    with llm:
        params = merge(dict(llm.text.default_params or {}), sampling)
        yield answers_of(llm, params), f"{llm.facts.model} on {llm.facts.device}"


def answers_of(llm: LLM, params: SamplingParams) -> Answers:
    """What a model of this process says to a conversation."""
    from lmkit_python.front.ask import ChatAsk
    from lmkit_python.front.run import check_finish

    def answers(messages: Messages, think: bool | None) -> Iterator[Change]:
        options = {} if think is None else {"enable_thinking": think}
        for turn, change in llm.changes(ChatAsk(messages=messages, params=params, template_options=options)):
            yield change
            check_finish(turn)

    return answers


@contextmanager
def _remote(url: str, api_key: str, settings: Sourced, sampling: dict[str, Any]) -> Iterator[tuple[Answers, str]]:
    """The model of a server. What would load one here is refused: nothing that is said is ignored."""
    from lmkit_cli.remote import Remote

    given = {key for key, source in settings.sources.items() if source.startswith("command line")}
    if own := sorted(given - {"model.model"}):
        fix = "give them to `lmkit serve`, or leave out --url"
        raise ConfigError(f"--url talks to a server, whose settings are its own: {', '.join(own)}", fix=fix)
    with Remote(url, api_key, sampling, settings.config.model.model if given else "") as remote:
        yield remote.answers, f"{remote.model} at {remote.url}"


@dataclass(slots=True)
class Session:
    """One conversation."""

    answers: Answers
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
        text, usage, first, thinking = "", None, 0.0, False
        with _stoppable():
            for change in self.answers(self.messages, self.think):
                first = first or perf_counter() - began
                if change.reasoning:
                    thinking = True
                    self.console.print(change.reasoning, end="", style="dim italic", markup=False)
                if change.content:
                    if thinking:
                        self.console.print()
                        thinking = False
                    text += change.content
                    self.console.print(change.content, end="", markup=False, soft_wrap=True)
                usage = change.finish.usage if change.finish is not None else usage
        self.console.print()
        return text, usage, first


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
