"""Templates that cannot compute, so that nothing has to keep them in bounds but a count of their steps:

    {{name}}               a variable; what is no text is written as JSON; what is not there fails the request
    {{#name}}...{{/name}}  once for each element of a list, once for another value, not at all for nothing
    {{^name}}...{{/name}}  once for nothing
    {{.}}                  the element itself

A name is looked up in the innermost value that has it: a message, then what a request says.
"""

import json
import re

from lmkit.api import ConfigError, TemplateFailed
from lmkit.prompts import PromptRenderer

TAG = re.compile(r"\{\{([#^/]?)\s*([\w.]*)\s*\}\}")
OURS = frozenset({"messages", "tools", "documents", "add_generation_prompt"})  # not for requests to set
MAX_STEPS = 100_000


class Sections(PromptRenderer):
    """Contract: lmkit.api.ChatRenderer. The library's base class shapes messages, finds out what the template takes,
    and marks what clients give before it is written, so that none of it is ever a control token."""

    def __init__(
        self, source, special_tokens, *, tools_source=None, control_tokens=(), tokenizer=None, trying=False
    ):  # fmt: skip
        super().__init__(control_tokens, getattr(tokenizer, "fold", None))  # what else a tokenizer takes for them
        self._special = dict(special_tokens)
        self._parts = parsed(source)
        self._with_tools = parsed(tools_source) if tools_source is not None else self._parts
        top, inner = names_in(self._parts)
        for_tools, inner_for_tools = names_in(self._with_tools)
        self.words = frozenset(top | inner | for_tools | inner_for_tools)
        self.takes_tools, self.takes_documents = "tools" in for_tools, "documents" in top
        self.options = frozenset(top | for_tools) - OURS - self._special.keys()
        self.content = self.find_content()

    def run(self, messages, tools, kwargs, documents, add_generation_prompt):
        given = {**kwargs, "messages": messages, "tools": tools, "documents": documents}
        values = {**self._special, **given, "add_generation_prompt": add_generation_prompt}
        steps, text = [0], []
        write(self._with_tools if tools else self._parts, [values], text, steps)
        return "".join(text)


def parsed(source):
    """A list of texts and of (sign, name, parts). Raises ConfigError."""
    stack = [("", "", [])]
    end = 0
    for tag in TAG.finditer(source):
        stack[-1][2].append(plain(source, end, tag.start()))
        end = tag.end()
        sign, name = tag.groups()
        if not name or (sign == "/" and name != stack[-1][1]):
            raise unreadable(source, tag.start(), f"{tag[0]} closes {{{{#{stack[-1][1]}}}}}" if name else "no name")
        if sign == "/":
            part = stack.pop()
            stack[-1][2].append(part)
        elif sign:
            stack.append((sign, name, []))
        else:
            stack[-1][2].append(("", name, []))
    stack[-1][2].append(plain(source, end, len(source)))
    if len(stack) > 1:
        raise unreadable(source, end, f"{{{{{stack[-1][0]}{stack[-1][1]}}}}} is never closed")
    return stack[0][2]


def plain(source, begin, end):
    text = source[begin:end]
    for sign in ("{{", "{%"):
        if sign in text:
            raise unreadable(source, begin + text.index(sign), f"{sign} begins nothing that this language has")
    return text


def unreadable(source, at, why):
    line = source.count("\n", 0, at) + 1
    return ConfigError(f"the chat template, line {line}: {why}", fix="give another with --chat-template FILE")


def names_in(parts, depth=0):
    """Names that stand outside of lists, and those that stand in sections: of a message, mostly."""
    top, inner = set(), set()
    for part in parts:
        if not isinstance(part, str):
            _, name, body = part
            (inner if depth else top).add(name.partition(".")[0])
            within = names_in(body, depth + (name in OURS - {"add_generation_prompt"} or bool(depth)))
            top, inner = top | within[0], inner | within[1]
    return top - {""}, inner - {""}


def write(parts, values, text, steps):
    for part in parts:
        steps[0] += 1
        if steps[0] > MAX_STEPS:
            raise TemplateFailed(f"the chat template takes more than {MAX_STEPS} steps")
        if isinstance(part, str):
            text.append(part)
            continue
        sign, name, body = part
        value = look_up(name, values)
        if sign == "" and value is None:
            raise TemplateFailed(f"the chat template wants {name}, which nobody has given")
        if sign == "":
            text.append(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False))
        elif sign == "^" and not value:
            write(body, values, text, steps)
        elif sign == "#" and value:
            for each in value if isinstance(value, list) else [value]:
                write(body, [*values, each], text, steps)


def look_up(name, values):
    if name == ".":
        return values[-1]
    first, *rest = name.split(".")
    found = next((v[first] for v in reversed(values) if isinstance(v, dict) and v.get(first) is not None), None)
    for key in rest:
        found = found.get(key) if isinstance(found, dict) else None
    return found
