"""Structural tags as Lark grammars for llguidance, whose dialect is described in its docs/syntax.md.

Each format becomes a rule or an expression. Text that spells a control token of the vocabulary becomes that token,
because llguidance keeps control tokens out of plain text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from lmkit.api import GrammarError, Vocabulary

MAX_FORMATS = 20_000  # in one structural tag
MAX_DEPTH = 32


class TagGrammar:
    """Builds the Lark text of one structural tag."""

    def __init__(self, vocab: Vocabulary, enforceable: Callable[[object], object]) -> None:
        """`enforceable`: a schema in the words of llguidance. Raises GrammarError."""
        self._special = {
            vocab.pieces[t].decode(errors="replace"): t for t in vocab.special_ids if t < len(vocab.pieces)
        }
        self._special.pop("", None)
        names = sorted(map(re.escape, self._special), key=len, reverse=True)
        self._split = re.compile(f"({'|'.join(names)})") if names else None
        self._enforceable = enforceable
        self._lines: list[str] = []
        self._num_formats = 0
        self._where = "in the structural tag"

    def build(self, tag: object) -> str:
        """Raises GrammarError."""
        root = _mapping(tag, "a structural tag")
        if root.get("type") != "structural_tag":
            raise GrammarError('a structural tag has "type": "structural_tag"')
        body = root.get("format") if "format" in root else _from_structures(root)
        start = self._format(body, 0)
        return "\n".join(["%llguidance {}", f"start: {start}", *self._lines])

    def _rule(self, body: str, name: str = "r") -> str:
        """A rule of its own. Returns its name."""
        rule = f"{name}{len(self._lines)}"
        self._lines.append(f"{rule}: {body}")
        return rule

    def literal(self, text: str) -> str:
        """An expression for exactly this text."""
        parts = self._split.split(text) if self._split else [text]
        found = [f"<[{self._special[p]}]>" if p in self._special else json.dumps(p, ensure_ascii=False)
                 for p in parts if p]  # fmt: skip
        return " ".join(found) or '""'

    def _format(self, value: object, depth: int) -> str:
        spec = _mapping(value, "a format")
        kind = spec.get("type")
        self._num_formats += 1
        if depth > MAX_DEPTH or self._num_formats > MAX_FORMATS:
            raise GrammarError(f"the structural tag is deeper than {MAX_DEPTH} or has more than {MAX_FORMATS} formats")
        build = _FORMATS.get(kind) if isinstance(kind, str) else None
        if build is None:
            raise GrammarError(f"structural tag: unknown format type {kind!r} (known: {', '.join(sorted(_FORMATS))})")
        known, method = build
        unknown = set(spec) - {"type", *known}
        if unknown:
            raise GrammarError(f"structural tag: {kind} does not take {', '.join(sorted(unknown))}")
        return method(self, spec, depth)

    def _const(self, spec: Mapping[str, Any], depth: int) -> str:
        return self.literal(_text(spec, "value"))

    def _schema(self, spec: Mapping[str, Any], depth: int) -> str:
        schema = spec.get("json_schema")
        try:
            schema = self._enforceable(schema)
        except GrammarError as e:
            raise GrammarError(f"{self._where}: {e.message}") from None
        return self._rule(f"%json {json.dumps(_closed(schema), ensure_ascii=False)}")

    def _regex(self, spec: Mapping[str, Any], depth: int) -> str:
        pattern = _text(spec, "pattern")
        return self._rule("/" + re.sub(r"(?<!\\)((?:\\\\)*)/", r"\1\\/", pattern).replace("\n", "\\n") + "/")

    def _any_text(self, spec: Mapping[str, Any], depth: int) -> str:
        return self._rule(r"/(.|\n)*/")

    def _sequence(self, spec: Mapping[str, Any], depth: int) -> str:
        return self._rule(" ".join(self._format(e, depth + 1) for e in _list(spec, "elements")))

    def _or(self, spec: Mapping[str, Any], depth: int) -> str:
        elements = _list(spec, "elements")
        if texts := self._plain_texts(elements):
            return self._rule(" | ".join(texts), "WORD")  # one lexeme: thousands of rules are too many for the parser
        return self._rule(" | ".join(self._format(e, depth + 1) for e in elements))

    def _plain_texts(self, elements: Sequence[Any]) -> list[str]:
        """The elements as expressions if all are texts without control tokens, and none is empty."""
        found = []
        for element in elements:
            text = element.get("value") if isinstance(element, Mapping) else None
            if not (text and isinstance(text, str) and set(element) == {"type", "value"}):
                return []
            if element["type"] != "const_string" or (self._split and self._split.search(text)):
                return []
            found.append(json.dumps(text, ensure_ascii=False))
        self._num_formats += len(found)
        if self._num_formats > MAX_FORMATS:
            raise GrammarError(f"the structural tag has more than {MAX_FORMATS} formats")
        return found

    def _tag(self, spec: Mapping[str, Any], depth: int) -> str:
        begin, end, content = _text(spec, "begin"), _text(spec, "end"), spec.get("content")
        self._where = f"in the tag {begin[:100]!r}"
        if isinstance(content, Mapping) and content.get("type") == "any_text":
            if not end:
                return self._rule(f"{self.literal(begin)} {self._any_text(content, depth)}")
            return self._rule(f"{self.literal(begin)} {self._until(end)}")
        return self._rule(f"{self.literal(begin)} {self._format(content, depth + 1)} {self.literal(end)}")

    def _until(self, end: str) -> str:
        """Any text to the first `end`, and that."""
        if end in self._special:
            return f"{self._any_text({}, 0)} {self.literal(end)}"
        text = self._rule(r"/(.|\n)*/", "until")
        self._lines[-1] = self._lines[-1].replace(f"{text}:", f"{text}[suffix={json.dumps(end)}]:")
        return text

    def _separated(self, spec: Mapping[str, Any], depth: int) -> str:
        tags = self._rule(" | ".join(self._format(t, depth + 1) for t in _list(spec, "tags")))
        body = tags
        if not spec.get("stop_after_first"):
            body = f"{tags} ({self.literal(_text(spec, 'separator'))} {tags})*"
        return self._rule(body if spec.get("at_least_one") else f"({body})?")

    def _triggered(self, spec: Mapping[str, Any], depth: int) -> str:
        """Free text in which no trigger occurs but as the beginning of a tag."""
        triggers = _list(spec, "triggers")
        starts: dict[str, list[str]] = {t: [] for t in triggers if isinstance(t, str) and t}
        if len(starts) != len(triggers):
            raise GrammarError("structural tag: triggers are different texts that are not empty")
        for tag in _list(spec, "tags"):
            begin = _text(_mapping(tag, "a tag"), "begin")
            trigger = next((t for t in starts if begin.startswith(t)), None)
            if trigger is None:
                raise GrammarError(f"structural tag: no trigger begins the tag {begin!r}")
            rest = {**_mapping(tag, "a tag"), "type": "tag", "begin": begin[len(trigger) :]}
            starts[trigger].append(self._format(rest, depth + 1))
        calls = [self._rule(f"{self._up_to(trigger)} ({' | '.join(tags)})") for trigger, tags in starts.items() if tags]
        call = self._rule(" | ".join(calls))
        if spec.get("stop_after_first"):
            return call if spec.get("at_least_one") else self._rule(f"{call} | {self._any_text({}, 0)}")
        return self._rule(f"{call}{'+' if spec.get('at_least_one') else '*'} {self._any_text({}, 0)}")

    def _up_to(self, trigger: str) -> str:
        """Text that ends with the first `trigger`."""
        if trigger in self._special:
            return f"{self._any_text({}, 0)} {self.literal(trigger)}"
        rule = self._rule(r"/(.|\n)*/ " + json.dumps(trigger), "trigger")
        self._lines[-1] = self._lines[-1].replace(f"{rule}:", f"{rule}[lazy]:")
        return rule


_FORMATS: dict[str, tuple[tuple[str, ...], Callable[[TagGrammar, Mapping[str, Any], int], str]]] = {
    "const_string": (("value",), TagGrammar._const),
    "json_schema": (("json_schema",), TagGrammar._schema),
    "regex": (("pattern",), TagGrammar._regex),
    "any_text": ((), TagGrammar._any_text),
    "sequence": (("elements",), TagGrammar._sequence),
    "or": (("elements",), TagGrammar._or),
    "tag": (("begin", "content", "end"), TagGrammar._tag),
    "tags_with_separator": (("tags", "separator", "at_least_one", "stop_after_first"), TagGrammar._separated),
    "triggered_tags": (("triggers", "tags", "at_least_one", "stop_after_first"), TagGrammar._triggered),
}


def _from_structures(root: Mapping[str, Any]) -> Mapping[str, Any]:
    """The older form: {"structures": [{"begin", "schema", "end"}], "triggers": [...]}."""
    tags = []
    for item in _list(root, "structures"):
        part = _mapping(item, "a structure")
        content = {"type": "json_schema", "json_schema": part.get("schema")}
        tags.append({"type": "tag", "begin": part.get("begin"), "content": content, "end": part.get("end")})
    return {"type": "triggered_tags", "triggers": root.get("triggers"), "tags": tags}


def _closed(schema: object) -> object:
    """No options of llguidance from inside a schema."""
    return {**schema, "x-guidance": OPTIONS} if isinstance(schema, dict) else schema


# Escapes by code point are left out: with them a property can be written twice under one name. Blanks are bounded: a
# model that has lost its way writes them without end.
OPTIONS = {
    "lenient": False, "coerce_one_of": False, "json_allowed_escapes": '"\\bfnrt',
    "whitespace_pattern": r"[\x20\n\r\t]{1,32}",
}  # fmt: skip


def _mapping(value: object, what: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise GrammarError(f"structural tag: {what} is an object")
    return value


def _text(spec: Mapping[str, Any], key: str) -> str:
    value = spec.get(key)
    if not isinstance(value, str):
        raise GrammarError(f"structural tag: {key} must be a text")
    return value


def _list(spec: Mapping[str, Any], key: str) -> Sequence[Any]:
    value = spec.get(key)
    if not isinstance(value, list) or not value:
        raise GrammarError(f"structural tag: {key} must be a list that is not empty")
    return value
