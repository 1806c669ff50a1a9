"""Names and types of a tool's arguments, from a JSON schema, in whatever language it spells them.

Schemas come from clients, written by pydantic, zod or by hand: what is said of one argument may be spread over
references, combinations and patterns. All formats that turn text into values ask here.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from itertools import islice
from typing import Any
from urllib.parse import unquote

_MAX_DEPTH = 16  # of references and combinations that are looked into
_MAX_PARTS = 2000  # of a schema that are looked at to answer one question
_MAX_ALTERNATIVES = 64  # ways to choose between the options of a schema
_MAX_PATTERN = 256  # characters of a pattern for names, and of four names
_REFERENCE = re.compile(r"\\[1-9]")
_KINDS: dict[str, tuple[type, ...]] = {
    "integer": (int,), "number": (int, float), "boolean": (bool,), "null": (type(None),),
    "object": (dict,), "array": (list,),
}  # fmt: skip
# types as other languages spell them, with or without a size: int64, unsigned long, float32, dict[str, int]
_SPELLED = re.compile(
    r"(?:(?P<integer>u?int|integer|u?long|u?short|unsigned)|(?P<number>num|number|numeric|float|double|decimal)"
    r"|(?P<boolean>bool|boolean)|(?P<object>dict|dictionary|map|mapping|obj|object|struct)"
    r"|(?P<array>list|arr|array|tuple|set|sequence|vector)|(?P<string>str|string|text|char|varchar)"
    r"|(?P<null>none|nonetype|null|nil))(?![a-z_])"
)


@dataclass(frozen=True, slots=True)
class ValueType:
    """The kinds and listed values that a schema allows for a value."""

    kinds: frozenset[str] | None = None  # the JSON types that are allowed; None: it does not say
    values: tuple[Any, ...] | None = None  # the values that are allowed, where it lists them

    def and_(self, more: ValueType) -> ValueType:
        """Both at once; where they contradict each other, `self` alone."""
        if self.kinds is None or more.kinds is None:
            kinds = self.kinds or more.kinds
        else:
            kinds = frozenset(k for k in _narrowest(self.kinds, more.kinds)) or self.kinds
        lists = [values for values in (self.values, more.values) if values is not None]
        values = None if not lists else lists[0] if len(lists) == 1 else _common(*lists)
        if values is not None and kinds is not None:
            values = tuple(v for v in values if allows(kinds, kind_of(v))) or None
        return ValueType(kinds, values)

    def or_(self, more: ValueType) -> ValueType:
        """Either of the two. An option that says nothing does not make the others say less."""
        if self.kinds is None or more.kinds is None:
            return ValueType(self.kinds or more.kinds)
        both = self.values is not None and more.values is not None
        return ValueType(self.kinds | more.kinds, (*self.values, *more.values) if both else None)  # type: ignore[misc]


ANY = ValueType()


@dataclass(frozen=True)
class Arguments:
    """One way to choose between the options of a tool's schema: its arguments by name, and which of them must be."""

    properties: Mapping[str, Any] = field(default_factory=dict)
    required: tuple[str, ...] = ()

    def and_(self, more: Arguments) -> Arguments:
        properties = dict(self.properties)
        for name, schema in more.properties.items():
            properties[name] = {"allOf": [properties[name], schema]} if name in properties else schema
        return Arguments(properties, tuple(dict.fromkeys((*self.required, *more.required))))


def value_type(schema: object, root: Mapping[str, Any]) -> ValueType:
    """The values that `schema`, a part of `root`, allows."""
    return _Reader(root).value(schema, 0)


def kinds_of(schema: object, root: Mapping[str, Any]) -> frozenset[str] | None:
    """The JSON types that a schema allows, as far as it says so; None = it does not."""
    return value_type(schema, root).kinds


def argument_type(root: Mapping[str, Any], name: str) -> ValueType | None:
    """The values that a tool's schema allows for the argument `name`, wherever it says so; None: an unknown name."""
    return _Reader(root).argument(root, name, 0)


def alternatives(schema: Mapping[str, Any], root: Mapping[str, Any]) -> list[Arguments]:
    """The properties of an object, for each way to choose between the options of its schema, a part of `root`."""
    found = _Reader(root).alternatives(schema, 0)
    return [Arguments(a.properties, tuple(name for name in a.required if name in a.properties)) for a in found]


def allows(kinds: frozenset[str], kind: str) -> bool:
    return kind in kinds or (kind == "integer" and "number" in kinds)


def followed(schema: object, root: Mapping[str, Any]) -> Mapping[str, Any]:
    """The schema with what its references say beside what it says itself."""
    made = dict(schema) if isinstance(schema, Mapping) else {}
    for _ in range(_MAX_DEPTH):
        parts = items_of(made.get("allOf"))
        if isinstance(made.get("$ref"), str):
            target = resolve(made.pop("$ref"), root)
        elif len(parts) == 1:
            del made["allOf"]
            target = parts[0]
        else:
            break
        if isinstance(target, Mapping):
            made = {**target, **made}
    return made


def referring(schema: object, root: Mapping[str, Any]) -> Mapping[str, Any]:
    """A part of `root` as a schema of its own, with all that it may refer to."""
    if not isinstance(schema, Mapping):
        return {}
    if not _refers(schema):
        return schema
    whole = "root"
    return {**_moved(schema, whole), "$defs": {whole: _moved(root, whole)}}


_DATA = frozenset({"const", "default", "enum", "example", "examples"})


def _refers(schema: object) -> bool:
    if isinstance(schema, Mapping):
        return "$ref" in schema or any(_refers(part) for key, part in schema.items() if key not in _DATA)
    return isinstance(schema, list) and any(map(_refers, schema))


def _moved(schema: Any, place: str) -> Any:
    """The schema where what its references name is a definition of another."""
    if isinstance(schema, list):
        return [_moved(part, place) for part in schema]
    if not isinstance(schema, Mapping):
        return schema
    made = {key: part if key in _DATA else _moved(part, place) for key, part in schema.items()}
    ref = schema.get("$ref")
    if isinstance(ref, str) and (ref == "#" or ref.startswith("#/")):
        made["$ref"] = f"#/$defs/{place}{ref[1:]}"
    return made


class _Reader:
    """Answers one question about a schema, with bounded work."""

    def __init__(self, root: Mapping[str, Any]) -> None:
        self._root = root
        self._num_parts = 0

    def _enter(self, schema: object, depth: int) -> Mapping[str, Any] | None:
        self._num_parts += 1
        if not isinstance(schema, Mapping) or depth > _MAX_DEPTH or self._num_parts > _MAX_PARTS:
            return None
        return schema

    def _together(self, schema: Mapping[str, Any]) -> Iterator[object]:
        """Schemas that hold beside this one."""
        if isinstance(ref := schema.get("$ref"), str):
            yield resolve(ref, self._root)
        yield from items_of(schema.get("allOf"))

    def _choices(self, schema: Mapping[str, Any]) -> Iterator[Sequence[object]]:
        """Options of which one holds: of each keyword that has some."""
        for key in ("anyOf", "oneOf"):
            if options := items_of(schema.get(key)):
                yield options
        if "if" in schema:
            yield [schema.get("then", {}), schema.get("else", {})]

    def value(self, schema: object, depth: int) -> ValueType:
        entered = self._enter(schema, depth)
        if entered is None:
            return ANY
        found = ValueType(_stated_kinds(entered.get("type"))).and_(_listed(entered))
        for part in self._together(entered):
            found = found.and_(self.value(part, depth + 1))
        for options in self._choices(entered):
            found = found.and_(reduce(ValueType.or_, (self.value(option, depth + 1) for option in options)))
        if found.kinds is None:
            for kind, words in (("object", ("properties", "patternProperties")), ("array", ("items", "prefixItems"))):
                if any(word in entered for word in words):
                    return ValueType(frozenset((kind,)))
        return found

    def argument(self, schema: object, name: str, depth: int) -> ValueType | None:
        entered = self._enter(schema, depth)
        if entered is None:
            return None
        parts = _said_of(entered, name)
        found = [self.value(part, depth + 1) for part in parts]
        found += _known(self.argument(part, name, depth + 1) for part in self._together(entered))
        dependent = entered.get("dependentSchemas")
        options = [*self._choices(entered), *([part] for part in _values_of(dependent))]
        for choice in options:
            known = _known(self.argument(option, name, depth + 1) for option in choice)
            found += [reduce(ValueType.or_, known)] if known else []
        if "if" in entered and not found:
            found += _known([self.argument(entered["if"], name, depth + 1)])
        return reduce(ValueType.and_, found) if found else None

    def alternatives(self, schema: object, depth: int) -> list[Arguments]:
        entered = self._enter(schema, depth)
        if entered is None:
            return [Arguments()]
        properties = entered.get("properties")
        required = tuple(n for n in items_of(entered.get("required"), 1024) if isinstance(n, str))
        found = [Arguments(properties if isinstance(properties, Mapping) else {}, required)]
        for part in self._together(entered):
            found = _all_of(found, self.alternatives(part, depth + 1))
        choices = [*self._choices(entered)]
        if "if" in entered:
            choices[-1] = [{"allOf": [entered["if"], entered.get("then", {})]}, entered.get("else", {})]
        for options in choices:
            found = _all_of(found, [a for option in options for a in self.alternatives(option, depth + 1)])
        return found


def _said_of(schema: Mapping[str, Any], name: str) -> list[object]:
    """The schemas that `schema` itself has for the property `name`."""
    found: list[object] = []
    properties, patterns = schema.get("properties"), schema.get("patternProperties")
    if isinstance(properties, Mapping) and name in properties:
        found.append(properties[name])
    if isinstance(patterns, Mapping):
        found += [part for pattern, part in patterns.items() if matches(pattern, name)]
    if not found:
        for key in ("additionalProperties", "unevaluatedProperties"):
            if isinstance(part := schema.get(key), Mapping) and part:
                found.append(part)
    return found


def _listed(schema: Mapping[str, Any]) -> ValueType:
    """The values that `enum` and `const` list."""
    values = [*([schema["const"]] if "const" in schema else items_of(schema.get("enum"), 1024))]
    if not values:
        return ANY
    return ValueType(frozenset(map(kind_of, values)), tuple(values))


def _stated_kinds(kind: object) -> frozenset[str] | None:
    if isinstance(kind, str):
        return _spelled(kind)
    if isinstance(kind, Sequence):
        return frozenset().union(*(_spelled(k) or () for k in kind if isinstance(k, str))) or None
    return None


def _spelled(kind: str) -> frozenset[str] | None:
    """The JSON type that a schema means; None where the name says nothing."""
    if kind in _KINDS or kind == "string":
        return frozenset((kind,))
    match = _SPELLED.match(kind.lower())
    return frozenset((str(match.lastgroup),)) if match else None


def _narrowest(a: frozenset[str], b: frozenset[str]) -> Iterator[str]:
    for one, two in ((a, b), (b, a)):
        yield from (kind for kind in one if allows(two, kind))


def _common(a: Sequence[Any], b: Sequence[Any]) -> tuple[Any, ...]:
    return tuple(value for value in a if any(same(value, w) for w in b)) or tuple(a)


def same(a: object, b: object) -> bool:
    """Whether both are one value of JSON: 1 is 1.0, and no boolean."""
    return isinstance(a, bool) == isinstance(b, bool) and a == b


def _known(found: Iterable[ValueType | None]) -> list[ValueType]:
    return [said for said in found if said is not None]


def _all_of(a: list[Arguments], b: list[Arguments]) -> list[Arguments]:
    return list(islice((x.and_(y) for x in a for y in b), _MAX_ALTERNATIVES))


def _values_of(value: object) -> list[object]:
    return list(value.values())[:64] if isinstance(value, Mapping) else []


def items_of(value: object, most: int = 64) -> Sequence[Any]:
    """The first items of what a schema should have a list for."""
    return value[:most] if isinstance(value, (list, tuple)) else ()


def matches(pattern: object, name: str) -> bool:
    """Whether a pattern of a client is found in `name`. What could take long to find out is not found."""
    if not isinstance(pattern, str) or max(len(pattern), 4 * len(name)) > _MAX_PATTERN or not _is_quick(pattern):
        return False
    try:
        return re.search(pattern, name) is not None
    except (re.error, RecursionError, OverflowError):
        return False


def _is_quick(pattern: str) -> bool:
    """No group is repeated or referred to, and few things are: the work is a small power of a name's length."""
    bare = re.sub(r"\\.|\[(?:\\.|[^\]\\])*\]", "x", pattern, flags=re.DOTALL).replace("(?:", "(")
    is_plain = not re.search(r"\)[*+{?]|\(\?", bare) and not _REFERENCE.search(pattern)
    return is_plain and len(re.findall(r"[*+{]", bare)) <= 2


def resolve(ref: str, root: Mapping[str, Any]) -> object:
    """The part of `root` that a reference names, a JSON pointer in a URI fragment (RFC 6901, 6), or None."""
    if not ref.startswith("#"):
        return None
    node: Any = root
    pointer = unquote(ref[1:])
    if pointer and not pointer.startswith("/"):
        return _anchored(root, pointer)
    for part in pointer.split("/")[1:]:
        part = part.replace("~1", "/").replace("~0", "~")
        if isinstance(node, (list, tuple)):
            node = node[int(part)] if part.isascii() and part.isdigit() and int(part) < len(node) else None
        else:
            node = node.get(part) if isinstance(node, Mapping) else None
    return node


def _anchored(root: Mapping[str, Any], name: str) -> object:
    parts = [root, *_values_of(root.get("$defs")), *_values_of(root.get("definitions"))]
    return next((p for p in parts if isinstance(p, Mapping) and p.get("$anchor") == name), None)


def kind_of(value: object) -> str:
    if isinstance(value, bool):
        return "boolean"
    return next((k for k, types in _KINDS.items() if isinstance(value, types)), "string")
