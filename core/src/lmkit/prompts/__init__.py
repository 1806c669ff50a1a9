"""What all renderers of prompts share: control tokens that a client spells stay text, and messages get their shape.

A rendered prompt is one string, in which `<|im_end|>` of the template and `<|im_end|>` typed by a user look the same.
So the renderer puts a MARK into every control token in which a client's character takes part: whether it was typed as
one, joined from several texts, or cut out of one. Tokenizing (Tokenizer.encode_marked) takes the MARKs out again, after
the tokenizer had its chance to find control tokens.

A renderer that cannot tell whose each character is marks the texts before they are written, also where a token may
begin at their ends.
"""

from __future__ import annotations

import json
import re
import string
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from hashlib import sha256
from typing import Any, Literal

from lmkit.api import MARK, ChatRenderer, InvalidParam, TemplateFailed
from lmkit.prompts.probe import probe

Fold = Callable[[str], str]

OURS, THEIRS = b"\0", b"\1"  # whose a character is: the template's, or a client's
_ROUNDS = 64
_END = "\u2061lmkit-end\u2061"  # marks the end of a message that is to be continued
_PROBE = "lmkitprobe"
_USER = [{"role": "user", "content": _PROBE}]
_PARTS = [{"role": "user", "content": [{"type": "text", "text": f"{_PROBE}{i}"} for i in (1, 2)]}]
_TOOL = {"type": "function", "function": {"name": "f", "description": "A tool", "parameters": {"type": "object"}}}
_SHORT_ID = 9  # characters of an id of a call: Mistral's templates take no other length
_ID_LETTERS = string.digits + string.ascii_letters


class PromptRenderer(ChatRenderer):
    """A renderer in this process. Subclasses say in `run` what one rendering is, and call `find_content` in the end."""

    def __init__(self, control_tokens: Iterable[str] = (), fold: Fold | None = None) -> None:
        """`fold`: what else spells the control tokens."""
        self.control_tokens = frozenset(control_tokens)
        self._mark = marker(self.control_tokens, fold)
        self.content = "string"

    @abstractmethod
    def run(
        self, messages: list[dict[str, Any]], tools: list[Any], kwargs: dict[str, Any], documents: list[Any],
        add_generation_prompt: bool,
    ) -> str:  # fmt: skip
        """The text of one rendering, as it is. Raises TemplateFailed."""

    def write(
        self, messages: list[dict[str, Any]], tools: list[Any], kwargs: dict[str, Any], documents: list[Any],
        add_generation_prompt: bool,
    ) -> str:  # fmt: skip
        """The marked text of a request. Here all that a client gives is marked before it is written."""
        messages, tools, kwargs, documents = map(self._mark, (messages, tools, kwargs, documents))
        return self.run(messages, tools, kwargs, documents, add_generation_prompt)

    def finished(self, text: str) -> str:
        """A plain text, marked."""
        return text

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
        if documents and not self.takes_documents:
            raise InvalidParam("documents", len(documents), "a chat template that reads them, and this one does not")
        for key in kwargs or ():
            if key not in self.options:
                known = ", ".join(sorted(self.options)) or "none"
                raise InvalidParam("chat_template_kwargs", key, f"a variable of the chat template ({known})")
        shaped = [self._shape(m) for m in messages]
        if any(message.get("tool_calls") or message["role"] == "tool" for message in shaped):
            self._identify_calls(shaped)
        if continue_final_message:
            add_generation_prompt = False
            _mark_end(shaped)
        text = self.write(shaped, list(tools), dict(kwargs or {}), list(documents), add_generation_prompt)
        if continue_final_message:
            text, found, _ = text.rpartition(_END)
            if not found:
                raise TemplateFailed("the chat template drops the final message, it cannot be continued")
        return self.finished(text)

    @cached_property
    def findings(self) -> Mapping[str, str]:  # type: ignore[override]  # found out when it is asked for
        """See lmkit.prompts.probe."""
        return probe(self)

    def _shape(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """The message as this template wants it: content in its form, arguments of calls that it can walk over, and no
        field that says nothing (templates take an empty list of calls for calls)."""
        shaped = {key: value for key, value in message.items() if value not in (None, "", [], {})}
        content = message.get("content")
        if isinstance(content, list) and self.content == "string":
            shaped["content"] = "\n".join(part["text"] for part in content)
        elif not content or (isinstance(content, str) and self.content == "list"):
            shaped["content"] = [{"type": "text", "text": content or ""}] if self.content == "list" else ""
        if message.get("tool_calls"):
            shaped["tool_calls"] = [self._shape_call(call) for call in message["tool_calls"]]
        return {"role": None, **shaped}

    def _shape_call(self, call: Mapping[str, Any]) -> dict[str, Any]:
        function = dict(call["function"])
        text = function.get("arguments") or "{}"
        try:
            arguments = json.loads(text) if isinstance(text, str) else text
        except (ValueError, RecursionError):
            arguments = text
        if isinstance(arguments, Mapping):
            function["arguments"] = arguments
        elif arguments is None or (isinstance(text, str) and not text.strip()):
            function["arguments"] = {}
        elif not self.shows_text_arguments:
            function["arguments"] = {"arguments": text}
        return {**call, "function": function}

    def _identify_calls(self, messages: list[dict[str, Any]]) -> None:
        """Gives ids to calls and results without one, in order, and replaces ids that the template would refuse."""
        unanswered: list[dict[str, Any]] = []
        number = 0
        for message in messages:
            if calls := message.get("tool_calls"):
                message["tool_calls"] = unanswered = [dict(call) for call in calls]
                for call in unanswered:
                    call["id"] = self._call_id(call.get("id"), number)
                    number += 1
                unanswered = list(unanswered)
            elif message["role"] == "tool":
                message["tool_call_id"] = self._result_id(message, unanswered, number)

    def _result_id(self, message: Mapping[str, Any], unanswered: list[dict[str, Any]], number: int) -> str:
        """The id of the call that a result belongs to; without a word about it, the next one of that tool's name."""
        id = message.get("tool_call_id")
        if id:
            id = self._call_id(id, number)
            answered = next((call for call in unanswered if call["id"] == id), None)
        else:
            named = (call for call in unanswered if call["function"].get("name") == message.get("name"))
            answered = next(named, unanswered[0] if unanswered else None)
            id = answered["id"] if answered is not None else self._call_id(None, number)
        if answered is not None:
            unanswered.remove(answered)
        return str(id)

    def _call_id(self, id: object, number: int) -> str:
        if not id:
            return f"call{number:05d}"[-_SHORT_ID:]
        text = str(id)
        return text if self.takes_any_call_id or _is_short(text) else short_id(text)

    @cached_property
    def shows_text_arguments(self) -> bool:
        """Whether arguments that are a text, and no JSON object, are shown as it is; other templates walk over them."""
        return self._shows_call(_PROBE, "0" * _SHORT_ID)

    @cached_property
    def takes_any_call_id(self) -> bool:
        """Whether ids of calls may have any length; True also when the template shows no calls whatever their ids."""
        long, short, usual = (self._shows_call({_PROBE: _PROBE}, "0" * length) for length in (24, 1, _SHORT_ID))
        return (long and short) or not usual

    def _shows_call(self, arguments: object, id: str) -> bool:
        call = {"id": id, "type": "function", "function": {"name": "f", "arguments": arguments}}
        messages: list[dict[str, Any]] = [
            {"role": "user", "content": "Hello"}, {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": id, "name": "f", "content": "1"},
        ]  # fmt: skip
        if self.content == "list":
            for message in messages:
                message["content"] = [{"type": "text", "text": message["content"]}]
        return any(self._seen(messages, tools) for tools in ([], [_TOOL]))

    def find_content(self) -> Literal["string", "list", "both"]:
        """Asked by rendering: a list that is shown part by part, and not as Python would print it, is understood."""
        strings = self.shows_user()
        self.content = "both"
        try:
            text = self.run([dict(m) for m in _PARTS], [], {}, [], True)
        except TemplateFailed:
            text = ""
        lists = f"{_PROBE}1" in text and f"{_PROBE}2" in text and "'type'" not in text and '"type"' not in text
        return "both" if strings and lists else "list" if lists else "string"

    def shows_user(self) -> bool:
        """Whether the template renders a message of the user, and its text is seen."""
        return self._seen([dict(message) for message in _USER], [])

    def _seen(self, messages: list[dict[str, Any]], tools: list[Any]) -> bool:
        try:
            return _PROBE in self.run(messages, tools, {}, [], True)
        except TemplateFailed:
            return False


def _is_short(id: str) -> bool:
    return len(id) == _SHORT_ID and id.isascii() and id.isalnum()


def short_id(id: str) -> str:
    """Nine letters and digits for an id of a call: always the same ones, others for another id."""
    number = int.from_bytes(sha256(id.encode("utf-8", "replace")).digest()[:8])
    letters = []
    for _ in range(_SHORT_ID):
        number, letter = divmod(number, len(_ID_LETTERS))
        letters.append(_ID_LETTERS[letter])
    return "".join(letters)


def _mark_end(messages: list[dict[str, Any]]) -> None:
    last = messages[-1]
    if isinstance(last["content"], list):
        parts = [dict(p) for p in last["content"]]
        parts[-1]["text"] += _END
        last["content"] = parts
    else:
        last["content"] += _END


def breaker(control_tokens: Iterable[str], fold: Fold | None = None) -> Callable[[str, bytes], str]:
    """A function that marks the control tokens of a text that are not wholly the template's.

    It takes the text, and a byte per character that says whose it is. `fold`: what the tokenizer makes of a text before
    it looks for such tokens.
    """
    names = {t for t in control_tokens if len(t) > 1}
    pattern = _pattern(names)
    folded = _pattern(names | {fold(t) for t in names}) if fold is not None else None

    def spans(text: str) -> Iterator[tuple[int, int]]:
        if pattern is not None:
            yield from (found.span() for found in pattern.finditer(text))
        if fold is not None and folded is not None:
            seen, places = _folded(text, fold)
            yield from ((places[m.start()], places[m.end() - 1] + 1) for m in folded.finditer(seen))

    def broken(plain: str, whose: bytes) -> str:
        for _ in range(_ROUNDS):  # again where one overlaps another
            if THEIRS not in whose:
                break
            found = [span for span in spans(plain) if THEIRS in whose[slice(*span)]]
            cuts = sorted({_cut(whose, *span) for span in found})
            if not cuts:
                break
            pieces = list(zip([0, *cuts], [*cuts, len(plain)], strict=True))
            plain = MARK.join(plain[a:b] for a, b in pieces)
            whose = THEIRS.join(whose[a:b] for a, b in pieces)
        return plain

    return broken


def _folded(text: str, fold: Fold) -> tuple[str, list[int]]:
    """The folded text, and from which character each of its characters comes."""
    start = fold("x")
    table = {char: fold("x" + char).removeprefix(start) for char in set(text)}  # some put a blank before a text
    places = [at for at, char in enumerate(text) for _ in table[char]]
    return "".join(map(table.__getitem__, text)), places


def _cut(whose: bytes, begin: int, end: int) -> int:
    """Where the token at begin:end is broken: not inside of what the template wrote, which may be a token itself."""
    other = THEIRS if whose[begin : begin + 1] == OURS else OURS
    at = whose.find(other, begin, end)
    return at if at >= 0 else begin + 1


def marker(control_tokens: Iterable[str], fold: Fold | None = None) -> Callable[[Any], Any]:
    """A function that marks every text in a JSON value, keys included: none of them, nor two joined, has a token."""
    names = [t for t in control_tokens if len(t) > 1]
    broken = breaker(names, fold)
    begun = frozenset(name[:k] for name in names for k in range(1, len(name)))
    longest = max(map(len, begun), default=0)

    def mark(value: Any) -> Any:
        if isinstance(value, str):
            text = broken(value, THEIRS * len(value))
            end = len(text.rstrip())
            for at in range(end - 1, max(end - longest, 0) - 1, -1):
                if text[at:end] in begun:
                    text, end = text[: at + 1] + MARK + text[at + 1 :], end + 1
            return text
        if isinstance(value, dict):
            return {mark(k): mark(v) for k, v in value.items()}
        return [mark(v) for v in value] if isinstance(value, list) else value

    return mark


def _pattern(tokens: Iterable[str]) -> re.Pattern[str] | None:
    names = sorted(tokens, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, names))) if names else None


def shown(text: str) -> str:
    """A marked text as people should see it."""
    return text.replace(MARK, "")
