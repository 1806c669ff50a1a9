"""The renderers that the core itself brings, and the one that the plan has chosen for templates."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

from lmkit.api import ChatRenderer, ChatWriter, ResolvedPlan, TemplateFailed, owner_of
from lmkit.plugins import load_target
from lmkit.plugins.catalog import install_command
from lmkit.plugins.refs import ask
from lmkit.prompts import PromptRenderer
from lmkit.prompts.probe import probe

MAX_PROMPT = 32 << 20  # characters


def open_renderer(plan: ResolvedPlan, source: str, special_tokens: Mapping[str, str], **options: Any) -> ChatRenderer:
    """For a template; `options` are those of lmkit.api.ChatRenderer. Raises ConfigError."""
    choice = plan.choice("renderer")
    if choice is None:
        return NullRenderer()
    make = partial(load_target(choice), source, special_tokens, **options, **choice.options)
    made: ChatRenderer = ask(owner_of(choice), make, gives=ChatRenderer)
    return made


class NullRenderer(ChatRenderer):
    """In place of one, where none is installed: it refuses."""

    control_tokens = options = frozenset[str]()
    takes_tools = takes_documents = True  # so that the refusal is not about these
    content = "both"

    def __init__(self) -> None:
        self.findings = probe(self)

    def render(self, *args: Any, **options: Any) -> str:
        raise TemplateFailed(
            "nothing that is installed renders chat templates", fix=install_command("renderer", "jinja")
        )


class WriterRenderer(PromptRenderer):
    """Prompts of a tokenizer's ChatWriter: code of a plugin, and no data of a checkpoint."""

    takes_documents = False

    def __init__(self, writer: ChatWriter, control_tokens: Iterable[str] = ()) -> None:
        super().__init__(control_tokens)
        self._writer = writer
        self.takes_tools, self.options = writer.takes_tools, writer.options
        self.content = self.find_content()

    def run(
        self, messages: list[dict[str, Any]], tools: list[Any], kwargs: dict[str, Any], documents: list[Any],
        add_generation_prompt: bool,
    ) -> str:  # fmt: skip
        options = {key: kwargs[key] for key in self._writer.options if key in kwargs}

        def write(count: int) -> str:
            """The prompt of so many of the messages."""
            return self._writer.write(messages[:count], tools, options, add_generation_prompt=add_generation_prompt)

        try:
            text = write(len(messages))
        except Exception as e:  # whatever a writer does not take is the request's fault
            words = f"{type(e).__name__} ({str(e)[:200]})"
            raise TemplateFailed(f"the chat template: {words}", index=_refused(write, len(messages), e)) from e
        if len(text) > MAX_PROMPT:
            raise TemplateFailed(f"the chat template used more than it may: {MAX_PROMPT} characters of output")
        return text


def _refused(write: Callable[[int], str], count: int, error: Exception) -> int:
    """The index of the message that a writer refuses: the last of the fewest messages that give the same error."""

    def fails(count: int) -> bool:
        try:
            write(count)
        except Exception as e:
            return type(e) is type(error) and str(e) == str(error)
        return False

    return bisect_left(range(1, count), True, key=fails)
