"""tekken.json: byte-level BPE whose control tokens stand apart, and prompts as Mistral writes them."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from lmkit.api import CheckpointError, Tokenizer
from mistral_common.exceptions import InvalidAssistantMessageException
from mistral_common.protocol.instruct.request import ChatCompletionRequest
from mistral_common.tokens.tokenizers.base import SpecialTokenPolicy
from mistral_common.tokens.tokenizers.mistral import MistralTokenizer
from mistral_common.tokens.tokenizers.tekken import Tekkenizer

_THINK = "[THINK]"
KEEP, IGNORE = SpecialTokenPolicy.KEEP, SpecialTokenPolicy.IGNORE


class Tekken(Tokenizer):
    """The tokenizer of a tekken.json."""

    def __init__(self, file: Path) -> None:
        """Raises CheckpointError."""
        try:
            mistral = MistralTokenizer.from_file(str(file))
            raw = cast(Tekkenizer, mistral.instruct_tokenizer.tokenizer)
        except Exception as e:  # the library asserts what it needs
            raise CheckpointError(f"{file} is not a tokenizer: {str(e)[:200]}", fix="download it again") from e
        self._raw = raw
        self._control = {raw.id_to_piece(i): i for i in range(raw.num_special_tokens)}
        names = sorted(self._control, key=len, reverse=True)
        self._split = re.compile(f"({'|'.join(map(re.escape, names))})")
        self.vocab_size = raw.n_words
        self.special_ids = frozenset(self._control.values())
        self.bos_token: str | None = raw.id_to_piece(raw.bos_id)
        self.eos_token: str | None = raw.id_to_piece(raw.eos_id)
        self.eos_token_ids: tuple[int, ...] = (raw.eos_id,)
        self.chat_writer = Prompts(mistral, raw, self._control)

    def encode(self, text: str, *, add_special: bool = True) -> list[int]:
        ids = [self._raw.bos_id] if add_special else []
        for part in self._split.split(text):
            if part in self._control:
                ids.append(self._control[part])
            elif part:
                ids += self._raw.encode(part, bos=False, eos=False)
        return ids

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        return b"".join(self._bytes(i, IGNORE if skip_special else KEEP) for i in ids).decode(errors="replace")

    def piece(self, token: int) -> bytes:
        return self._bytes(token, KEEP)

    def id_of(self, text: str) -> int | None:
        if text in self._control:
            return self._control[text]
        ids = self._raw.encode(text, bos=False, eos=False)
        return ids[0] if len(ids) == 1 else None

    def _bytes(self, token: int, policy: SpecialTokenPolicy) -> bytes:
        return self._raw.id_to_byte_piece(token, policy) if 0 <= token < self.vocab_size else b""


class Prompts:
    """Implements lmkit.api.ChatWriter with mistral-common's own encoding of requests, which checks them too."""

    takes_tools = True
    options = frozenset[str]()

    def __init__(self, mistral: MistralTokenizer, raw: Tekkenizer, control: Collection[str] = ()) -> None:
        """`control`: the control tokens, which say whether the model reads its earlier reasoning."""
        self._mistral, self._raw = mistral, raw
        self._reads_reasoning = _THINK in control

    def write(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]], options: Mapping[str, Any],
        *, add_generation_prompt: bool,
    ) -> str:  # fmt: skip
        goes_on = not add_generation_prompt and messages[-1]["role"] == "assistant"
        shaped = [message for message in map(self._shaped, messages) if not _says_nothing(message)]
        try:
            return self._encoded(shaped, tools, goes_on)
        except InvalidAssistantMessageException:
            alone = [_calls_alone(message) for message in shaped]
            if alone == shaped:
                raise
            return self._encoded(alone, tools, goes_on)

    def _encoded(
        self, messages: list[dict[str, Any]], tools: Sequence[Mapping[str, Any]], goes_on: bool
    ) -> str:  # fmt: skip
        request: Any = ChatCompletionRequest.from_openai(
            messages=messages, tools=[dict(tool) for tool in tools] or None, continue_final_message=goes_on
        )
        return self._raw.decode(self._mistral.encode_chat_completion(request).tokens, KEEP)

    def _shaped(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """The message as this version of the format has it: with reasoning where there is a token for it."""
        shaped = _with_texts(message)
        if not self._reads_reasoning:
            for name in ("reasoning", "reasoning_content"):
                shaped.pop(name, None)
        return shaped


def _says_nothing(message: Mapping[str, Any]) -> bool:
    """Whether it is an answer without text, reasoning and calls, for which the format has no form."""
    content = message.get("content")
    empty = not content or (isinstance(content, list) and not any(part.get("text") for part in content))
    said = empty and not any(message.get(name) for name in ("tool_calls", "reasoning", "reasoning_content"))
    return message["role"] == "assistant" and said


def _calls_alone(message: Mapping[str, Any]) -> dict[str, Any]:
    """The message without text beside its calls, as the older versions of the format have it."""
    return {**message, "content": ""} if message.get("tool_calls") else dict(message)


def _with_texts(message: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of calls as JSON text, which is how mistral-common reads them."""
    calls = [
        {**call, "function": {**call["function"], "arguments": _text(call["function"].get("arguments"))}}
        for call in message.get("tool_calls") or ()
    ]
    return {**message, "tool_calls": calls} if calls else dict(message)


def _text(arguments: object) -> str:
    return arguments if isinstance(arguments, str) else json.dumps(arguments or {}, ensure_ascii=False)


def open_tekken(folder: Path, *, eos_token_ids: Sequence[int] = ()) -> Tekken:
    """Target of the spec: the tokenizer of a checkpoint, which knows its own end token. Raises CheckpointError."""
    return Tekken(folder / "tekken.json")
