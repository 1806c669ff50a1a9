"""Plugins of the text side that are wrong on purpose, each a good one with one fault: the kit must find it.

Not collected as such: test_planted.py runs of each the check that must fail. `tools/sync.py` makes
docs/reference/kits.md of this file. What the good ones are is shown by their own tests, which pass the same checks.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from lmkit.api import MARK
from lmkit.text.formats import start_parser
from lmkit_testing import (
    Asked,
    DialectConformance,
    ReasoningParserConformance,
    RendererConformance,
    StructuredOutputConformance,
    TemplateConformance,
    TokenizerConformance,
    ToolParserConformance,
)
from lmkit_testing.planted import Planted, good

# --------------------------------------------------------------------------------------------------------- parsers


class Parsed:
    """A format of code whose machine is another one's, with what `feed` changes."""

    keep_special = frozenset[str]()

    def __init__(self, fmt: Any, feed: Callable[[str], str], flush: bool = True) -> None:
        self.name, self._fmt, self._feed, self._flush = fmt.name, fmt, feed, flush
        self.keep_special = fmt.keep_special

    def grammar(self, tools: Any, choice: Any) -> None:
        return None

    def start(self, prompt_tail: str, tools: Any) -> Any:
        inner, feed, flush = start_parser(self._fmt, prompt_tail, tools), self._feed, self._flush

        class Parser:
            def feed(self, text: str, ids: Any = ()) -> Any:
                return inner.feed(feed(text))

            def flush(self) -> Any:
                return inner.flush() if flush else []

        return Parser()


class Hermes(Planted, ToolParserConformance):
    plugin = "tool_parser:hermes"
    samples = ('Look: <tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call> done',)


class DropsAtASplit(Hermes):
    """A `<` at the end of a piece of text is lost"""

    fails = "test_every_split_gives_the_same_message"

    def format(self) -> Any:
        return Parsed(good(self.plugin), lambda text: text[:-1] if text.endswith("<") and text != "<" else text)


class HeldBack(Hermes):
    """What was held back at the end is never given"""

    fails = "test_text_without_markers_is_content"

    def format(self) -> Any:
        return Parsed(good(self.plugin), lambda text: text[:-3], flush=False)


class Qwen3(Planted, ReasoningParserConformance):
    plugin = "reasoning_parser:qwen3"
    samples = ("<think>a</think>b",)


class PlainIsReasoning(Qwen3):
    """An answer that has no reasoning is lost"""

    fails = "test_text_without_markers_is_content"

    def format(self) -> Any:
        return Parsed(good(self.plugin), lambda text: "<think>" + text)


# --------------------------------------------------------------------------------------------------- the text side


class OpenAI(Planted, DialectConformance):
    plugin = "dialect:openai"
    body = {"prompt": "Hello", "max_tokens": 99}
    asked = (Asked("POST /v1/completions", body, body | {"stream": True}),)

    def text(self, answer: bytes, streamed: bool) -> str:
        lines = [line[6:] for line in answer.decode().splitlines() if line.startswith("data: {")]
        return "".join(
            c["text"] for line in (lines if streamed else [answer]) for c in json.loads(line).get("choices", ())
        )


class PlainErrors(OpenAI):
    """Errors are plain text"""

    fails = "test_errors_are_json_that_says_what_and_why"

    class Fault:
        def error(self, info: Any) -> bytes:
            return str(info.message).encode()


class ErrorsWithoutFix(OpenAI):
    """Errors do not say what to do"""

    fails = "test_errors_are_json_that_says_what_and_why"

    class Fault:
        def error(self, info: Any) -> bytes:
            return json.dumps({"error": info.message}).encode()


class RaisesOnGarbage(OpenAI):
    """A body that is no JSON raises what the JSON library raises"""

    fails = "test_garbage_is_refused_in_words"

    class Fault:
        def parse(self, incoming: Any, served: Any) -> Any:
            json.loads(incoming.body)
            return super().parse(incoming, served)


class DropsBlanks(OpenAI):
    """Streams leave out the blanks between words"""

    fails = "test_answers"

    class Fault:
        def parse(self, incoming: Any, served: Any) -> Any:
            exchange = super().parse(incoming, served)
            chunk = exchange.chunk
            exchange.chunk = lambda turn, change: b"" if change.content == " " else chunk(turn, change)
            return exchange


class Json(Planted, TokenizerConformance):
    plugin = "tokenizer:json"

    @classmethod
    def wrong(cls, base: Any) -> Any:
        def make(path: Any, **options: Any) -> Any:
            return cls.changed(base(path, **options))

        return make

    @classmethod
    def changed(cls, tokenizer: Any) -> Any:
        return tokenizer


def other(tokenizer: Any, **methods: Any) -> Any:
    """An object with other methods, which are given the class before."""
    base = type(tokenizer)
    made = copy.copy(tokenizer)
    made.__class__ = type("Wrong", (base,), {name: method(base) for name, method in methods.items()})
    return made


class StripsBlanks(Json):
    """Texts come back without the blanks at their ends"""

    fails = "test_texts_come_back"

    @classmethod
    def changed(cls, tokenizer: Any) -> Any:
        return other(
            tokenizer, encode=lambda base: lambda self, text, **o: base.encode(self, " ".join(text.split()), **o)
        )


class HalfCharacters(Json):
    """The detokenizer decodes token by token"""

    fails = "test_tokens_join_however_they_come"

    @classmethod
    def changed(cls, tokenizer: Any) -> Any:
        class Machine:
            def __init__(self, skip: bool) -> None:
                self.skip = skip

            def feed(self, token: int) -> str:
                return str(tokenizer.decode([token], skip_special=self.skip))

            def flush(self) -> str:
                return ""

        return other(tokenizer, detokenizer=lambda base: lambda self, *, skip_special=True, **_: Machine(skip_special))


class ClientsWriteTokens(Json):
    """Marks are taken out before control tokens are looked for"""

    fails = "test_control_tokens"

    @classmethod
    def changed(cls, tokenizer: Any) -> Any:
        def encode_marked(base: Any) -> Any:
            return lambda self, text, **options: base.encode(self, text.replace(MARK, ""), **options)

        return other(tokenizer, encode_marked=encode_marked)


class ReadsAnything(Json):
    """A damaged file is another tokenizer, without an error"""

    fails = "test_damage"

    @classmethod
    def wrong(cls, base: Any) -> Any:
        def make(path: Any, **options: Any) -> Any:
            try:
                return base(path, **options)
            except Exception:
                return None

        return make


class Jinja(Planted, RendererConformance):
    plugin = "renderer:jinja"


class Unmarked(Jinja):
    """A client's control tokens are the template's"""

    fails = "test_clients_write_no_control_token"

    @classmethod
    def wrong(cls, base: Any) -> Any:
        return lambda source, special, **options: base(source, special, **{**options, "control_tokens": ()})


class DropsSystem(Jinja):
    """System messages are left out"""

    fails = "test_all_that_is_said_is_shown"

    @classmethod
    def wrong(cls, base: Any) -> Any:
        def dropped(old: Any) -> Any:
            def render(self: Any, messages: Any, *args: Any, **options: Any) -> Any:
                return old.render(self, [m for m in messages if m["role"] != "system"], *args, **options)

            return render

        return lambda source, special, **options: other(base(source, special, **options), render=dropped)


class AnyVariable(Jinja):
    """A variable that the template does not know is ignored"""

    fails = "test_variables_are_known"

    @classmethod
    def wrong(cls, base: Any) -> Any:
        def lax(old: Any) -> Any:
            def render(self: Any, messages: Any, tools: Any = (), kwargs: Any = None, **options: Any) -> Any:
                known = {name: value for name, value in (kwargs or {}).items() if name in self.options}
                return old.render(self, messages, tools, known, **options)

            return render

        return lambda source, special, **options: other(base(source, special, **options), render=lax)


class GgufTemplate(Planted, TemplateConformance):
    plugin = "template:gguf"


class RaisesWhatPythonRaises(GgufTemplate):
    """A file that is damaged raises UnicodeDecodeError"""

    fails = "test_damage"

    @classmethod
    def wrong(cls, base: Any) -> Any:
        return lambda path, checkpoint: path.read_bytes().decode()


class WithoutCheckpoint(GgufTemplate):
    """The target takes the file alone, as interface 1 had it"""

    fails = "test_signatures_are_those_of_the_protocol"

    @classmethod
    def wrong(cls, base: Any) -> Any:
        return lambda path: ""


class Masks(Planted, StructuredOutputConformance):
    plugin = "structured_output:masks"

    @pytest.fixture(scope="class")
    @classmethod
    def output(cls) -> Any:
        from lmkit_structured_output_masks.output import ConstrainedOutput
        from lmkit_testing.grammars import StairsCompiler
        from lmkit_testing.structured_outputs import vocabulary

        return cls.wrong(ConstrainedOutput)(StairsCompiler(vocabulary()))


class MasksOfOthers(Masks):
    """Masks are given to the row before"""

    fails = "test_masks_belong_to_their_rows"

    class Fault:
        def fill(self, plan: Any) -> Any:
            masks = super().fill(plan)
            masks.rows = [row - 1 for row in masks.rows]
            return masks


class AllAllowed(Masks):
    """Masks of all rows are those of no grammar"""

    fails = "test_masks_belong_to_their_rows"

    class Fault:
        def fill(self, plan: Any) -> Any:
            masks = super().fill(plan)
            masks.bits = np.full(len(masks.bits), 255, np.uint8).tobytes()
            return masks


class FollowsTheDead(Masks):
    """Requests that have ended are followed"""

    fails = "test_masks_belong_to_their_rows"

    class Fault:
        def release(self, ids: Any) -> None:
            """Nothing."""
