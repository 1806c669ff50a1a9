"""What is known of a chat template, wherever it is rendered: here (render.py) or in a process apart (apart.py)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, Literal

from lmkit.text.probe import probe


class ChatRenderer(ABC):
    """Chat messages to a prompt. `render` is thread-safe."""

    control_tokens: frozenset[str]  # what must not come from clients, see lmkit.prompts
    options: frozenset[str]  # variables that a request may set
    takes_tools: bool
    takes_documents: bool
    content: Literal["string", "list", "both"]  # how the template wants content

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

    @cached_property
    def findings(self) -> dict[str, str]:
        """See lmkit.text.probe."""
        return probe(self)

    @property
    def takes_system(self) -> bool:
        """Whether a system message is shown."""
        return self.findings["system"] == "yes"

    @property
    def takes_tool_results(self) -> bool:
        """Whether the result of a tool is shown."""
        return self.findings["tool results"] == "yes"
