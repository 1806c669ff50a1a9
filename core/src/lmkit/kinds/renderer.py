"""What makes prompts of chats with the template of a checkpoint.

Example, entry point `[project.entry-points."lmkit.renderer"] toy = "toy_render.hooks"`::

    from lmkit.api import RendererSpec, hookimpl


    @hookimpl
    def lmkit_renderers():
        yield RendererSpec(name="toy", summary="Fills in {content}", target="toy_render.renderer:ToyRenderer")
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from lmkit.contracts.specs import SelectRequest, Spec
from lmkit.kinds.base import Kind


class ChatRenderer(ABC):
    """Chat messages to a prompt. `render` is thread-safe.

    Made by `target(source: str, special_tokens: Mapping[str, str], *, tools_source: str | None = None, control_tokens:
    Iterable[str] = (), tokenizer: Tokenizer | None = None, trying: bool = False)`: the template, its variables with
    special tokens, another template for requests with tools, what must not come from clients, and the tokenizer that
    the prompt is for. With `trying`, once something has taken too much, all else fails at once. Options of the plugin
    are given by name, too. Raises ConfigError.
    """

    control_tokens: frozenset[str]  # what must not come from clients, see lmkit.prompts
    options: frozenset[str]  # variables that a request may set
    words: frozenset[str] = frozenset()  # names and texts in the template: what of a message it may read
    takes_tools: bool
    takes_documents: bool
    content: Literal["string", "list", "both"]  # how the template wants content
    findings: Mapping[
        str, str
    ]  # what it makes of each kind of message: "yes", or "no: REASON"; see lmkit.prompts.probe

    @abstractmethod
    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        documents: Sequence[Mapping[str, Any]] = (),
    ) -> str:
        """The prompt, with MARK where a client's text spells a control token. `messages` as in the OpenAI API.

        Raises TemplateFailed, InvalidParam.
        """

    @property
    def takes_system(self) -> bool:
        """Whether a system message is shown."""
        return self.findings["system"] == "yes"

    @property
    def takes_tool_results(self) -> bool:
        """Whether the result of a tool is shown."""
        return self.findings["tool results"] == "yes"


@dataclass(frozen=True, slots=True, kw_only=True)
class RendererSpec(Spec):
    """target: makes a ChatRenderer."""


KIND = Kind(
    "renderer",
    spec=RendererSpec,
    hook="lmkit_renderers",
    used_by="lmkit.text.renderer",
    ask=lambda known: [SelectRequest(kind="renderer")],
    takes="offered",
    doc=__doc__,
)
