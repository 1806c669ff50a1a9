"""Asks of either kind: what is given is a prompt or a conversation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

from lmkit.api import InvalidParam, SamplingParams

from lmkit_python.front.ask import PROMPT, ChatAsk, Messages, PromptInput, TextAsk, chat_asks, is_list, text_asks


def one_ask(
    prompt: PromptInput | Messages, params: SamplingParams | None = None, *, n: int = 1, adapter: str | None = None
) -> TextAsk | ChatAsk:
    """A text or token ids are continued, messages are answered. Raises InvalidParam for several of them."""
    if not isinstance(prompt, Mapping) and is_list(prompt) and prompt and isinstance(prompt[0], Mapping):
        return chat_asks(cast(Messages, prompt), params, n=n, adapter=adapter)[0]
    asks = text_asks(cast(PromptInput, prompt), params, n, adapter)
    if len(asks) != 1:
        raise InvalidParam("prompt", prompt, f"{PROMPT}, or a conversation")
    return asks[0]
