"""Chat messages to a prompt with the checkpoint's own template, in a sandbox with a budget.

A template is data from a stranger: it cannot reach Python, and what it may spend is bounded (see
lmkit_tokenizer_json.budget). Every failure is a TemplateFailed that names the template's line.
"""

from __future__ import annotations

import datetime
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.parser
from lmkit.api import ConfigError, TemplateFailed
from lmkit.prompts import PromptRenderer, breaker, shown

from lmkit_tokenizer_json.budget import Budget, BudgetSpent
from lmkit_tokenizer_json.origin import ClientText, Noted, Reads, concat, origins, theirs_of_request
from lmkit_tokenizer_json.tracked import TrackedEnvironment

_NAME = "chat template"
RESERVED = frozenset({
    "messages", "tools", "documents", "add_generation_prompt", "continue_final_message", "tokenize", "chat_template",
    "bos_token", "eos_token", "unk_token", "pad_token", "return_dict", "return_tensors", "return_assistant_tokens_mask",
    "padding", "truncation", "max_length", "conversation", "tokenizer_kwargs", "self", "loop",
})  # fmt: skip


class _Generation(jinja2.ext.Extension):
    """`{% generation %}...{% endgeneration %}` marks what the assistant wrote; for rendering it is its body."""

    tags = {"generation"}

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise(message: str) -> str:
    raise jinja2.TemplateError(message)


def _tojson(value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None,
            sort_keys: bool = False) -> str:  # fmt: skip
    """Plain JSON: unlike the builtin filter it does not escape for HTML."""
    if isinstance(indent, int) and indent > 16:
        raise jinja2.TemplateError("tojson: indent is larger than 16")
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _now(pattern: str) -> str:
    return datetime.datetime.now().strftime(pattern)


class Renderer(PromptRenderer):
    """One compiled template. `render` is thread-safe and may be called on the event loop: it is bounded."""

    def __init__(
        self, source: str, special_tokens: Mapping[str, str], *, tools_source: str | None = None,
        control_tokens: Iterable[str] = (), fold: Callable[[str], str] | None = None,
    ) -> None:  # fmt: skip
        """`tools_source`: another template, for requests with tools. `control_tokens`: what must not come from clients
        (see lmkit.prompts), whoever of them is said to have written it; `fold`: what else spells them.

        Raises ConfigError.
        """
        super().__init__(control_tokens, fold)
        self._special = dict(special_tokens)
        self._broken = breaker(self.control_tokens, fold)
        self._compile(source)
        self._no_tools: list[Any] | None = None
        if not self.shows_user():  # some templates walk over the tools without asking whether there are any
            self._no_tools = []
            if not self.shows_user():
                self._no_tools = None
        self.content = self.find_content()
        self._with_tools = None
        if tools_source is not None:
            self._with_tools = Renderer(tools_source, special_tokens, control_tokens=self.control_tokens, fold=fold)
            self.takes_tools = self._with_tools.takes_tools
            self.options |= self._with_tools.options
            self.words |= self._with_tools.words

    def _compile(self, source: str) -> None:
        env = TrackedEnvironment(extensions=["jinja2.ext.loopcontrols", _Generation])
        env.filters["tojson"] = env.checked(_tojson)
        env.globals["raise_exception"] = _raise
        env.globals["strftime_now"] = _now
        try:
            self._generate = env.from_string(source).generate
            tree = env.parse(source)
        except jinja2.TemplateSyntaxError as e:
            raise ConfigError(
                f"the chat template does not compile: line {e.lineno}: {e.message}",
                fix="give another one with --chat-template FILE",
            ) from e
        names = jinja2.meta.find_undeclared_variables(tree)
        self.takes_tools = "tools" in names
        # what a request may set: variables that the template reads and that have no meaning of their own
        own = _assigned(tree) - _with_default(tree)
        self.options = frozenset(names) - RESERVED - own - set(env.globals) - set(self._special)
        self.takes_documents = "documents" in names
        self.words = _words(tree)

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
        if tools and self._with_tools is not None:
            return self._with_tools.render(
                messages, tools, kwargs, add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message, documents=documents,
            )  # fmt: skip
        return super().render(
            messages, tools, kwargs, add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message, documents=documents,
        )  # fmt: skip

    def write(
        self, messages: list[dict[str, Any]], tools: list[Any], kwargs: dict[str, Any], documents: list[Any],
        add_generation_prompt: bool,
    ) -> str:  # fmt: skip
        """A template that refuses what it was given, as some do with texts that spell their control tokens, gets marked
        texts: those do no harm any more."""
        given: list[Any] = [messages, tools, kwargs, documents]
        try:
            return self.run(messages, tools, kwargs, documents, add_generation_prompt)
        except TemplateFailed as e:
            marked = [self._mark(value) for value in given]
            if not isinstance(e.__cause__, jinja2.TemplateError) or marked == given:
                raise
        messages, tools, kwargs, documents = marked
        return self.run(messages, tools, kwargs, documents, add_generation_prompt)

    def finished(self, text: str) -> str:
        return self._broken(str.__str__(text), origins(text))

    def run(
        self, messages: list[dict[str, Any]], tools: list[Any], kwargs: dict[str, Any], documents: list[Any],
        add_generation_prompt: bool,
    ) -> str:  # fmt: skip
        budget = Budget()
        reads = Reads()
        given = {**kwargs, "messages": messages, "tools": tools or self._no_tools, "documents": documents or None}
        given = theirs_of_request(given, reads)
        variables = {**self._special, **given, "add_generation_prompt": add_generation_prompt}
        try:
            with budget.running():
                parts = []
                for part in self._generate(variables):
                    budget.output(len(part))
                    parts.append(part)
                return concat(parts)
        except BudgetSpent as e:
            raise TemplateFailed(f"the chat template used more than it may: {e}") from e
        except (MemoryError, RecursionError) as e:
            what = "memory" if isinstance(e, MemoryError) else "nesting"
            raise TemplateFailed(f"the chat template used more than it may: {what}") from e
        except Exception as e:  # whatever a template does wrong is the request's or the template's fault, never ours
            index, key = (int(reads.last[0]), ".".join(reads.last[1:])[:200]) if reads.last else (None, "")
            raise TemplateFailed(_explain(e), index=index, key=key) from e


def _words(tree: jinja2.nodes.Template) -> frozenset[str]:
    """Names of attributes and short texts: all that the template may look for in a message."""
    texts = {n.value for n in tree.find_all(jinja2.nodes.Const) if isinstance(n.value, str) and len(n.value) <= 64}
    return frozenset(texts | {n.attr for n in tree.find_all(jinja2.nodes.Getattr)})


def _assigned(tree: jinja2.nodes.Template) -> set[str]:
    """Variables that the template itself sets."""
    return {n.name for n in tree.find_all(jinja2.nodes.Name) if n.ctx != "load"}


def _with_default(tree: jinja2.nodes.Template) -> set[str]:
    """Variables that may come from outside although the template sets them: it asks first whether they are there."""
    asked = {
        t.node.name
        for t in tree.find_all(jinja2.nodes.Test)
        if t.name in ("defined", "undefined") and isinstance(t.node, jinja2.nodes.Name)
    }
    filled = {
        f.node.name
        for f in tree.find_all(jinja2.nodes.Filter)
        if f.name in ("default", "d") and isinstance(f.node, jinja2.nodes.Name)
    }
    return asked | filled


def _explain(error: Exception) -> str:
    line, frame = 0, error.__traceback__
    while frame is not None:
        if frame.tb_frame.f_code.co_filename in ("<template>", "<unknown>"):
            line = frame.tb_lineno
        frame = frame.tb_next
    where = f"the chat template, line {line}" if line else "the chat template"
    if isinstance(error, jinja2.TemplateError):
        return f"{where}: {_plain(str(error.message or error)[:500])}"
    return f"{where}: {type(error).__name__} ({_plain(str(error)[:200])})"


_PLAIN_TYPES = {ClientText.__name__: "str", Noted.__name__: "dict"}
_OWN_TYPE = re.compile(rf"(?:\b{__name__.partition('.')[0]}(?:\.\w+)*\.)?\b({'|'.join(_PLAIN_TYPES)})\b")


def _plain(words: str) -> str:
    """The words of an error with the types that the template sees: a client's text is a str to it."""
    return shown(_OWN_TYPE.sub(lambda match: _PLAIN_TYPES[match[1]], words))
