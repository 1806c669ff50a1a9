"""What can be said of schemas without an instance: whether a value fits, whether two exclude each other, what the
negation of one is. Everything here errs on the safe side: None, False and an empty list mean "not known".
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from itertools import combinations, pairwise
from typing import Any

from lmkit_grammar_llguidance.references import TYPES, Schema

MAX_DEPTH = 12  # how far references and parts are followed
MAX_VALUES = 1000  # of a schema that lists all its values
MAX_BAN = 4000  # characters of the texts that a pattern keeps out
MAX_CALLS = 50_000  # of `disjoint`
BACKSLASHED = re.compile(r"\\(.)")
_BOUNDS = {"minimum": (-1, False), "exclusiveMinimum": (-1, True), "maximum": (1, False), "exclusiveMaximum": (1, True)}


class Logic:
    """`targets`: of references, by name."""

    def __init__(self, targets: Mapping[str, Schema]) -> None:
        self._targets = targets
        self._num_calls = 0

    # ------------------------------------------------------------------------------------------------ one value

    def holds(self, schema: Schema, value: Any, depth: int = 0) -> bool | None:
        """Whether `value` fits; None where that is not known."""
        if isinstance(schema, bool):
            return schema
        if depth > MAX_DEPTH:
            return None
        answers = [self._asserts(key, schema, value, depth + 1) for key in schema]
        return _all(answers)

    def _asserts(self, key: str, schema: Mapping[str, Any], value: Any, depth: int) -> bool | None:
        body = schema[key]
        match key:
            case "$ref":
                return self.holds(self._targets[body], value, depth)
            case "type":
                return any(kind in body for kind in kinds(value))
            case "const":
                return same(body, value)
            case "enum":
                return any(same(item, value) for item in body)
            case "allOf":
                return _all([self.holds(part, value, depth) for part in body])
            case "anyOf":
                return _any([self.holds(part, value, depth) for part in body])
            case "oneOf":
                answers = [self.holds(part, value, depth) for part in body]
                return None if None in answers else answers.count(True) == 1
            case "not":
                found = self.holds(body, value, depth)
                return None if found is None else not found
        return self._asserts_by_type(key, schema, value, depth)

    def _asserts_by_type(self, key: str, schema: Mapping[str, Any], value: Any, depth: int) -> bool | None:
        body = schema[key]
        if key in ("minLength", "maxLength", "pattern", "format"):
            if not isinstance(value, str):
                return True
            if key == "minLength":
                return len(value) >= body
            if key == "maxLength":
                return len(value) <= body
            return matches(body, value) if key == "pattern" else True
        if key in _BOUNDS:
            if isinstance(value, bool) or not isinstance(value, (int, float)):
                return True
            side, strict = _BOUNDS[key]
            return value != body if value == body and strict else (value - body) * side <= 0
        if key in ("required", "properties", "minProperties", "maxProperties"):
            if not isinstance(value, dict):
                return True
            if key == "required":
                return all(name in value for name in body)
            if key == "properties":
                return _all([self.holds(part, value[n], depth) for n, part in body.items() if n in value])
            return len(value) >= body if key == "minProperties" else len(value) <= body
        if key in ("items", "prefixItems", "minItems", "maxItems"):
            if not isinstance(value, list):
                return True
            if key == "minItems":
                return len(value) >= body
            if key == "maxItems":
                return len(value) <= body
            if key == "prefixItems":
                return _all([self.holds(part, item, depth) for part, item in zip(body, value, strict=False)])
            rest = value[len(schema.get("prefixItems", ())) :]
            return _all([self.holds(body, item, depth) for item in rest])
        mine = {"dependentRequired": dict, "dependentSchemas": dict, "patternProperties": dict, "propertyNames": dict,
                "additionalProperties": dict, "unevaluatedProperties": dict, "uniqueItems": list, "contains": list,
                "unevaluatedItems": list}  # fmt: skip
        return True if key in mine and not isinstance(value, mine[key]) else None

    def values(self, schema: Schema, depth: int = 0) -> list[Any] | None:
        """All values that fit, or a few more; None: more than can be listed."""
        if isinstance(schema, bool):
            return None if schema else []
        if depth > MAX_DEPTH:
            return None
        found = self._listed(schema, depth + 1)
        if found is None or len(found) > MAX_VALUES:
            return None
        return [value for value in unique(found) if self.holds(schema, value, depth + 1) is not False]

    def _listed(self, schema: Mapping[str, Any], depth: int) -> list[Any] | None:
        if "const" in schema:
            return [schema["const"]]
        if isinstance(schema.get("enum"), list):
            return schema["enum"]
        if "$ref" in schema and (found := self.values(self._targets[schema["$ref"]], depth)) is not None:
            return found
        for part in schema.get("allOf", ()):
            if (found := self.values(part, depth)) is not None:
                return found
        for key in ("anyOf", "oneOf"):
            lists = [self.values(part, depth) for part in schema.get(key, ())]
            if lists and None not in lists:
                return [value for found in lists for value in found or ()]
        kind = schema.get("type")
        if kind and set(kind) <= {"boolean", "null"}:
            return [*([False, True] if "boolean" in kind else []), *([None] if "null" in kind else [])]
        if kind == ["integer"]:
            low, high = schema.get("minimum"), schema.get("maximum")
            if isinstance(low, int) and isinstance(high, int) and high - low < MAX_VALUES:
                return list(range(low, high + 1))
        return None

    # --------------------------------------------------------------------------------------------- two schemas

    def disjoint(self, a: Schema, b: Schema, depth: int = 0) -> bool:
        """True: no value fits both."""
        if a is False or b is False:
            return True
        self._num_calls += 1
        if isinstance(a, bool) or isinstance(b, bool) or depth > MAX_DEPTH or self._num_calls > MAX_CALLS:
            return False
        for one, other in ((a, b), (b, a)):
            values = self.values(one, depth)
            if values is not None and all(self.holds(other, v, depth) is False for v in values):
                return True
        parts_a, parts_b = self.parts(a, depth), self.parts(b, depth)
        if any(self._exclude(x, y, depth) for x in parts_a for y in parts_b):
            return True
        sides: tuple[tuple[list[Mapping[str, Any]], Schema], ...] = ((parts_a, b), (parts_b, a))
        for parts, whole in sides:
            for part in parts:
                for key in ("anyOf", "oneOf"):
                    if part.get(key) and all(self.disjoint(branch, whole, depth + 1) for branch in part[key]):
                        return True
        return self._differ_in_a_property(parts_a, parts_b, depth)

    def parts(self, schema: Schema, depth: int) -> list[Mapping[str, Any]]:
        """All that must hold together."""
        if isinstance(schema, bool) or depth > MAX_DEPTH:
            return []
        found: list[Mapping[str, Any]] = [schema]
        if "$ref" in schema:
            found += self.parts(self._targets[schema["$ref"]], depth + 1)
        for part in schema.get("allOf", ()):
            found += self.parts(part, depth + 1)
        return found[:64]

    def _exclude(self, a: Mapping[str, Any], b: Mapping[str, Any], depth: int) -> bool:
        common = types_of(a) & types_of(b)
        if not common:
            return True
        if common <= {"integer", "number"} and (_above(a, b) or _above(b, a)):
            return True
        if common == {"string"} and (
            a.get("minLength", 0) > b.get("maxLength", 1e9) or b.get("minLength", 0) > a.get("maxLength", 1e9)
        ):
            return True
        if common == {"array"}:
            return a.get("minItems", 0) > b.get("maxItems", 1e9) or b.get("minItems", 0) > a.get("maxItems", 1e9)
        return False

    def _differ_in_a_property(self, a: list[Mapping[str, Any]], b: list[Mapping[str, Any]], depth: int) -> bool:
        """Both are objects, and some required property cannot be as both want it."""
        if not any(types_of(p) == {"object"} for p in a) and not any(types_of(p) == {"object"} for p in b):
            return False
        needs_a, needs_b = ({n for p in side for n in names(p)} for side in (a, b))
        for name in needs_a | needs_b:
            of_a = [self._property(p, name) for p in a]
            of_b = [self._property(p, name) for p in b]
            if any(self.disjoint(x, y, depth + 1) for x in of_a for y in of_b if x is not True and y is not True):
                return True
            if (name in needs_a and False in of_b) or (name in needs_b and False in of_a):
                return True
        return False

    def _property(self, part: Mapping[str, Any], name: str) -> Schema:
        """What `part` says of a property; True where it is not known."""
        if name in part.get("properties", {}):
            return part["properties"][name]
        if any(matches(pattern, name) is not False for pattern in part.get("patternProperties", {})):
            return True
        return part.get("additionalProperties", True)

    # ---------------------------------------------------------------------------------------------- negation

    def negations(self, schema: Schema, depth: int = 0) -> list[Schema]:
        """Schemas that exclude `schema`, and that together have as much as possible of what it excludes."""
        if isinstance(schema, bool):
            return [] if schema else [True]
        if depth > MAX_DEPTH:
            return []
        found: list[Schema] = []
        for key in schema:
            found += self._negated(key, schema, depth + 1)
        return [s for i, s in enumerate(found) if s is not False and s not in found[:i]]

    def _either(self, schema: Schema, depth: int) -> Schema | None:
        found = self.negations(schema, depth)
        return None if not found else found[0] if len(found) == 1 else {"anyOf": found}

    def _negated(self, key: str, schema: Mapping[str, Any], depth: int) -> list[Schema]:
        body = schema[key]
        match key:
            case "$ref":
                return self.negations(self._targets[body], depth)
            case "type":
                return _other_types(body)
            case "const":
                return _without([body])
            case "enum":
                return _without(body)
            case "not":
                return [body]
            case "allOf":
                return [found for part in body for found in self.negations(part, depth)]
            case "anyOf" | "oneOf":
                sides = [self._either(part, depth) for part in body]
                found: list[Schema] = [{"allOf": sides}] if None not in sides else []
                if key == "oneOf":
                    found += [{"allOf": list(pair)} for pair in combinations(body, 2)][:16]
                return found
            case "if":
                other = self._either(body, depth)
                found = [{"allOf": [body, n]} for n in self.negations(schema.get("then", True), depth)]
                if other is not None:
                    found += [{"allOf": [other, n]} for n in self.negations(schema.get("else", True), depth)]
                return found
        if key in ("required", "properties", "minProperties", "maxProperties", "dependentRequired"):
            return self._negated_object(key, body, depth)
        if key in ("items", "prefixItems", "contains", "minItems", "maxItems"):
            return self._negated_list(key, schema, depth)
        return _negated_scalar(key, body)

    def _negated_object(self, key: str, body: Any, depth: int) -> list[Schema]:
        kind = {"type": ["object"]}
        match key:
            case "required":
                return [{**kind, "properties": {name: False}} for name in body]
            case "properties":
                pairs = [(name, self._either(part, depth)) for name, part in body.items()]
                return [{**kind, "properties": {n: p}, "required": [n]} for n, p in pairs if p is not None]
            case "minProperties":
                return [{**kind, "maxProperties": body - 1}] if body else []
            case "maxProperties":
                return [{**kind, "minProperties": body + 1}]
        return [{**kind, "required": [name], "properties": {other: False}} for name, o in body.items() for other in o]

    def _negated_list(self, key: str, schema: Mapping[str, Any], depth: int) -> list[Schema]:
        kind, body = {"type": ["array"]}, schema[key]
        match key:
            case "minItems":
                return [{**kind, "maxItems": body - 1}] if body else []
            case "maxItems":
                return [{**kind, "minItems": body + 1}]
            case "contains":
                other = self._either(body, depth)
                if other is None or "minContains" in schema or "maxContains" in schema:
                    return []
                return [{**kind, "items": other}]
            case "items":
                skipped = len(schema.get("prefixItems", ()))
                other = self._either(body, depth)
                wanted = [(skipped, other)]
            case _:
                wanted = [(i, self._either(part, depth)) for i, part in enumerate(body)]
        return [
            {**kind, "prefixItems": [*[True] * i, p], "minItems": i + 1} for i, p in wanted if p is not None and i < 64
        ]


def _negated_scalar(key: str, body: Any) -> list[Schema]:
    opposite = {"minimum": "exclusiveMaximum", "exclusiveMinimum": "maximum",
                "maximum": "exclusiveMinimum", "exclusiveMaximum": "minimum"}  # fmt: skip
    if key in opposite:
        return [{"type": ["number"], opposite[key]: body}]
    if key == "minLength":
        return [{"type": ["string"], "maxLength": body - 1}] if body else []
    if key == "maxLength":
        return [{"type": ["string"], "minLength": body + 1}]
    if key == "pattern" and (banned := _one_place(body)) is not None:
        return [{"type": ["string"], "pattern": banned}]
    return []


_CLASS = r"\[(\^?)((?:[^\[\]\\&~^-]|\\[^\w]|\\[dsw]|[a-zA-Z0-9]-[a-zA-Z0-9])+)\]"


def _one_place(pattern: str) -> str | None:
    """The opposite of a pattern that is a class of characters, anywhere or throughout, or a plain beginning."""
    if found := re.fullmatch(rf"\^{_CLASS}([+*])\$", pattern):
        flip, inside, times = found.groups()
        other = f"[{inside}]" if flip else f"[^{inside}\\n]"  # for some, $ stands before a last line break as well
        return other + ("|^$" if times == "+" else "")
    if found := re.fullmatch(_CLASS, pattern):
        flip, inside = found.groups()
        return f"^[{'' if flip else '^'}{inside}]*$"
    if found := re.fullmatch(r"\^((?:[\w @:/-]|\\[.*+?$(){}/|-])+)", pattern, re.ASCII):
        return f"^(?:{_not_beginning(re.sub(BACKSLASHED, lambda m: m[1], found[1]))})$"
    return None


def _not_beginning(text: str) -> str:
    """A pattern for texts that do not begin with `text`."""
    rest = ""
    for char in reversed(text):
        goes_on = f"|{_quoted(char)}{rest}" if rest else ""
        rest = f"(?:[^{_in_class(char)}][\\s\\S]*{goes_on})?"
    return rest


# ------------------------------------------------------------------------------------------------------- helpers


def kinds(value: Any) -> tuple[str, ...]:
    """The types that a value has."""
    if isinstance(value, bool):
        return ("boolean",)
    if isinstance(value, (int, float)):
        return ("integer", "number") if value == value // 1 else ("number",)
    names: dict[type, str] = {str: "string", list: "array", dict: "object"}
    return (names.get(type(value), "null"),)


def same(a: Any, b: Any) -> bool:
    """As JSON: 1 is 1.0, and no boolean."""
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    return isinstance(a, bool) == isinstance(b, bool) and a == b


def unique(values: Sequence[Any]) -> list[Any]:
    seen: dict[str, Any] = {}
    for value in values:
        key = json.dumps(int(value) if isinstance(value, float) and value == value // 1 else value, sort_keys=True)
        seen.setdefault(key, value)
    return list(seen.values())


def matches(pattern: Any, text: str) -> bool | None:
    """Whether `pattern` is found in `text`; None where dialects of expressions may differ."""
    if not text.isascii() or not text.isprintable() or re.search(r"\\[^dwDWsS.^$*+?()\[\]{}|/\\-]|\(\?", str(pattern)):
        return None
    try:
        return re.search(pattern, text, re.ASCII) is not None
    except (re.error, TypeError, RecursionError, OverflowError):
        return None


def types_of(schema: Mapping[str, Any]) -> set[str]:
    """The types that a value may have, as far as `type`, `const` and `enum` say it."""
    found = set(schema.get("type", TYPES))
    if "number" in found:
        found.add("integer")
    for values in ([schema["const"]] if "const" in schema else None, schema.get("enum")):
        if isinstance(values, list):
            found &= {kind for value in values for kind in kinds(value)}
    return found


def names(part: Mapping[str, Any]) -> list[str]:
    required = part.get("required", ())
    return [name for name in required if isinstance(name, str)] if isinstance(required, list) else []


def _all(answers: Sequence[bool | None]) -> bool | None:
    return False if False in answers else None if None in answers else True


def _any(answers: Sequence[bool | None]) -> bool | None:
    return True if True in answers else None if None in answers else False


def _above(a: Mapping[str, Any], b: Mapping[str, Any]) -> bool:
    """Numbers of `a` are above those of `b`."""
    lows = [(a[k], k == "exclusiveMinimum") for k in ("minimum", "exclusiveMinimum") if k in a]
    highs = [(b[k], k == "exclusiveMaximum") for k in ("maximum", "exclusiveMaximum") if k in b]
    return any(low > high or (low == high and (s or t)) for low, s in lows for high, t in highs)


def _other_types(kinds: Sequence[str]) -> list[Schema]:
    found = [t for t in TYPES if t not in kinds and not (t == "integer" and "number" in kinds)]
    if "integer" in kinds and "number" in found:
        found.remove("number")  # numbers that are not whole cannot be told apart while they are written
    if "integer" in found and "number" in found:
        found.remove("integer")
    return [{"type": found}] if found else []


def _without(values: Sequence[Any]) -> list[Schema]:
    """Everything but `values`, as far as it can be said."""
    by_kind: dict[str, list[Any]] = {}
    for value in values:
        by_kind.setdefault(kinds(value)[-1], []).append(value)
    rest = [t for t in TYPES if t not in by_kind and t != "integer"]
    found: list[Schema] = [{"type": rest}] if rest else []
    if texts := by_kind.get("string"):
        found += [{"type": ["string"], "pattern": p}] if (p := _banning(texts)) else []
    if numbers := sorted(by_kind.get("number", [])):
        edges = [None, *numbers, None]
        for low, high in pairwise(edges):
            bounds = {"exclusiveMinimum": low, "exclusiveMaximum": high}
            found.append({"type": ["number"], **{k: v for k, v in bounds.items() if v is not None}})
    if booleans := by_kind.get("boolean"):
        found += [{"const": other} for other in (True, False) if other not in booleans]
    if objects := by_kind.get("object"):
        found.append({"type": ["object"], "minProperties": 1 + max(map(len, objects))})
    if lists := by_kind.get("array"):
        found.append({"type": ["array"], "minItems": 1 + max(map(len, lists))})
    return found


def _banning(texts: Sequence[str]) -> str | None:
    """A pattern for all texts but these."""
    if sum(map(len, texts)) > MAX_BAN or max(map(len, texts)) > 200:
        return None
    tree: dict[str, Any] = {}
    for text in texts:
        at = tree
        for char in text:
            at = at.setdefault(char, {})
        at[""] = {}
    return f"^(?:{_not_in(tree)})$"


def _not_in(tree: Mapping[str, Any]) -> str:
    chars = [c for c in tree if c]
    others = f"[^{''.join(map(_in_class, chars))}][\\s\\S]*" if chars else "[\\s\\S]+"
    found = [*([] if "" in tree else [""]), others, *(_quoted(c) + f"(?:{_not_in(tree[c])})" for c in chars)]
    return "|".join(found)


def _in_class(char: str) -> str:
    return f"\\{char}" if char in "\\]^-[&~" else char


def _quoted(char: str) -> str:
    return f"\\{char}" if char in "\\.+*?()|[]{}^$/#&-~" else char
