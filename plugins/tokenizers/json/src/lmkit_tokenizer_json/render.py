"""Chat messages to a prompt with the checkpoint's own template, in a sandbox with a budget.

A template is data from a stranger: it cannot reach Python, and what it may spend is bounded (see lmkit_tokenizer_json.budget).
Every failure is a TemplateFailed that names the template's line.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Literal

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.parser

from lmkit.api import ChatWriter, ConfigError, InvalidParam, TemplateFailed
from lmkit_tokenizer_json.budget import Budget, BudgetSpent
from lmkit.prompts import breaker, marker
from lmkit_tokenizer_json.origin import concat, theirs_of_request
from lmkit.text.renderer import ChatRenderer
from lmkit_tokenizer_json.tracked import TrackedEnvironment

_NAME = "chat template"
_END = "\u2061lmkit-end\u2061"  # marks the end of a message that is to be continued
_PROBE = "lmkitprobe"
_USER = [{"role": "user", "content": _PROBE}]
_PARTS = [{"role": "user", "content": [{"type": "text", "text": f"{_PROBE}{i}"} for i in (1, 2)]}]
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


class Renderer(ChatRenderer):
    """One compiled template. `render` is thread-safe and may be called on the event loop: it is bounded."""

    def __init__(
        self, source: str | ChatWriter, special_tokens: Mapping[str, str], *, tools_source: str | None = None,
        control_tokens: Iterable[str] = (), fold: Callable[[str], str] | None = None,
    ) -> None:  # fmt: skip
        """`tools_source`: another template, for requests with tools. `control_tokens`: what must not come from clients
        (see lmkit.prompts), whoever of them is said to have written it; `fold`: what else spells them.

        Raises ConfigError.
        """
        self._special = dict(special_tokens)
        self._generate: Callable[[Mapping[str, Any]], Iterator[str]]
        self.control_tokens = frozenset(control_tokens)
        self._mark, self._broken = marker(self.control_tokens, fold), breaker(self.control_tokens, fold)
        self._is_written = not isinstance(source, str)
        if isinstance(source, str):
            self._compile(source)
        else:
            self._generate = partial(_written, source)
            self.takes_tools, self.options, self.takes_documents = source.takes_tools, source.options, False
        self.content = "string"
        self.content = self._find_content()
        self._with_tools = None
        if tools_source is not None:
            self._with_tools = Renderer(tools_source, special_tokens, control_tokens=self.control_tokens, fold=fold)
            self.takes_tools = self._with_tools.takes_tools
            self.options |= self._with_tools.options

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
        if documents and not self.takes_documents:
            raise InvalidParam("documents", len(documents), "a chat template that reads them, and this one does not")
        for key in kwargs or ():
            if key not in self.options:
                known = ", ".join(sorted(self.options)) or "none"
                raise InvalidParam("chat_template_kwargs", key, f"a variable of the chat template ({known})")
        shaped = [self._shape(m) for m in messages]
        if continue_final_message:
            add_generation_prompt = False
            _mark_end(shaped)
        text = self._guarded(shaped, list(tools), dict(kwargs or {}), list(documents), add_generation_prompt)
        if continue_final_message:
            text, found, _ = text.rpartition(_END)
            if not found:
                raise TemplateFailed("the chat template drops the final message, it cannot be continued")
        return self._broken(text)

    def _guarded(self, messages: list[dict], tools: list, kwargs: dict, documents: list, add_prompt: bool) -> str:
        """A writer gets marked texts. So does a template that refuses what it was given, as some do with texts that
        spell their control tokens: those do no harm any more."""
        refused = None
        if not self._is_written:
            try:
                return self._run(messages, tools, kwargs, add_prompt, documents)
            except TemplateFailed as e:
                if not isinstance(e.__cause__, jinja2.TemplateError):
                    raise
                refused = e
        given = [messages, tools, kwargs, documents]
        marked = [self._mark(value) for value in given]
        if refused is not None and marked == given:
            raise refused
        messages, tools, kwargs, documents = marked
        return self._run(messages, tools, kwargs, add_prompt, documents)

    def _run(
        self, messages: list[dict], tools: Sequence[Mapping], kwargs: Mapping, add_prompt: bool,
        documents: Sequence[Mapping] = (),
    ) -> str:  # fmt: skip
        budget = Budget()
        given = {**kwargs, "messages": messages, "tools": list(tools) or None, "documents": list(documents) or None}
        if not self._is_written:
            given = theirs_of_request(given)
        variables = {**self._special, **given, "add_generation_prompt": add_prompt}
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
            raise TemplateFailed(_explain(e)) from e

    def _shape(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """Content as this template wants it; arguments of earlier calls as objects; None as "nothing"."""
        shaped = {k: v for k, v in message.items() if v is not None}
        content = message.get("content")
        if isinstance(content, list) and self.content == "string":
            shaped["content"] = "\n".join(part["text"] for part in content)
        elif isinstance(content, str) and self.content == "list":
            shaped["content"] = [{"type": "text", "text": content}]
        elif content is None:
            shaped["content"] = ""
        if message.get("tool_calls"):
            shaped["tool_calls"] = [_shape_call(c) for c in message["tool_calls"]]
        return {"role": None, **shaped}

    def _find_content(self) -> Literal["string", "list", "both"]:
        """Asked by rendering: a list that is shown part by part, and not as Python would print it, is understood."""
        strings = self._shows(_USER)
        self.content = "both"
        try:
            text = self._run([dict(m) for m in _PARTS], (), {}, True)
        except TemplateFailed:
            text = ""
        lists = f"{_PROBE}1" in text and f"{_PROBE}2" in text and "'type'" not in text and '"type"' not in text
        return "both" if strings and lists else "list" if lists else "string"

    def _shows(self, messages: Sequence[Mapping[str, Any]]) -> bool:
        """Whether the template renders these messages, and the probe in them is seen."""
        try:
            return _PROBE in self._run([self._shape(m) for m in messages], (), {}, True)
        except TemplateFailed:
            return False


def _written(writer: ChatWriter, variables: Mapping[str, Any]) -> Iterator[str]:
    options = {key: variables[key] for key in writer.options if key in variables}
    yield writer.write(
        variables["messages"], variables["tools"] or (), options,
        add_generation_prompt=variables["add_generation_prompt"],
    )  # fmt: skip


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


def _shape_call(call: Mapping[str, Any]) -> dict[str, Any]:
    function = dict(call["function"])
    try:
        arguments = json.loads(function.get("arguments") or "{}")
    except (ValueError, TypeError):
        arguments = None
    if isinstance(arguments, dict):
        function["arguments"] = arguments
    return {**call, "function": function}


def _mark_end(messages: list[dict[str, Any]]) -> None:
    last = messages[-1]
    if isinstance(last["content"], list):
        parts = [dict(p) for p in last["content"]]
        parts[-1]["text"] += _END
        last["content"] = parts
    else:
        last["content"] += _END


def _explain(error: Exception) -> str:
    line, frame = 0, error.__traceback__
    while frame is not None:
        if frame.tb_frame.f_code.co_filename in ("<template>", "<unknown>"):
            line = frame.tb_lineno
        frame = frame.tb_next
    where = f"the chat template, line {line}" if line else "the chat template"
    if isinstance(error, jinja2.TemplateError):
        return f"{where}: {str(error.message or error)[:500]}"
    return f"{where}: {type(error).__name__} ({str(error)[:200]})"
