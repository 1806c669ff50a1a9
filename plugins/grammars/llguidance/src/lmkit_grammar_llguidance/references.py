"""JSON schemas of all drafts in one form: references resolved to names, old keywords in new words, annotations gone.

What a schema means is kept. Words of old drafts that a newer one passes over (`divisibleBy`, `extends`, `disallow`) are
taken at their word, which can only make a schema narrower.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from urllib.parse import unquote, urldefrag, urljoin

from lmkit.api import GrammarError, schema_keywords

Schema = Mapping[str, Any] | bool
MAX_PARTS = 50_000  # subschemas of one schema

# A validator looks at no other format unless it is told to (draft 2020-12, validation, 7.2.1): these can be enforced.
FORMATS = frozenset(
    {"date", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "time", "uri", "uuid"}
)  # fmt: skip
COUNTS = frozenset({
    "maxContains", "maxItems", "maxLength", "maxProperties", "minContains", "minItems", "minLength", "minProperties",
})  # fmt: skip
_PLAIN = COUNTS | frozenset({"const", "enum", "maximum", "minimum", "multipleOf", "pattern", "required", "uniqueItems"})
_ONE = frozenset({
    "additionalProperties", "contains", "else", "if", "not", "propertyNames", "then", "unevaluatedItems",
    "unevaluatedProperties",
})  # fmt: skip
_LIST = frozenset({"allOf", "anyOf", "oneOf", "prefixItems"})
_MAP = frozenset({"dependentSchemas", "patternProperties", "properties"})
_HERE = ("allOf", "anyOf", "oneOf")  # these, and `not`, `if`, `then`, `else` are about the same value
_SCHEMA_WORDS = frozenset({"$ref", "$schema", "definitions", "properties", "type"})  # beside an old `id`
_OLD_DRAFTS = ("draft-03", "draft-04", "draft-05", "draft-06", "draft-07")


class References:
    """`root` and every schema that a reference names. Raises GrammarError for what cannot be resolved or read."""

    def __init__(self, schema: Schema) -> None:
        self.targets: dict[str, Schema] = {}  # by name; a reference is {"$ref": name}
        self._raw = schema
        self._old = isinstance(schema, dict) and any(d in str(schema.get("$schema")) for d in _OLD_DRAFTS)
        self._named: dict[str, Any] = {"": schema}
        self._base: dict[int, str] = {}
        self._names: dict[int, str] = {}
        self._num_parts = 0
        self._index(schema, "", 0)
        self._waiting: list[tuple[str, Any, str]] = []
        self.root = self._read(schema, "")
        while self._waiting:
            name, target, base = self._waiting.pop()
            self.targets[name] = self._read(target, base)
        self._check_loops()

    def _index(self, value: Any, base: str, depth: int) -> None:
        """Where each identifier and anchor is, and the base of each subschema."""
        if isinstance(value, list):
            for item in value:
                self._index(item, base, depth + 1)
        if not isinstance(value, dict):
            return
        for key in ("$id", "id"):
            name = value.get(key)
            if isinstance(name, str) and (key == "$id" or not _SCHEMA_WORDS.isdisjoint(value)):
                full = _join(base, name)
                self._named.setdefault(full.removesuffix("#"), value)
                if not name.startswith("#"):
                    base = urldefrag(full)[0]
                break
        for key in ("$anchor", "$dynamicAnchor"):
            if isinstance(value.get(key), str):
                self._named.setdefault(f"{base}#{value[key]}", value)
        self._base[id(value)] = base
        for key, item in value.items():
            if key not in ("enum", "const", "default", "examples", "example"):
                self._index(item, base, depth + 1)

    def _resolve(self, ref: str, base: str) -> Schema:
        """The reference as {"$ref": name}; its target is read later."""
        full = _join(base, ref)
        document, fragment = urldefrag(full)
        target: Any = self._named.get(full.removesuffix("#"))
        if target is None:
            target = self._named.get(document)
            if target is None or (fragment and not fragment.startswith("/")):
                raise GrammarError(f"$ref to another document: {ref[:200]!r} is no part of the schema itself")
            for part in unquote(fragment).split("/")[1:]:
                part = part.replace("~1", "/").replace("~0", "~")
                if isinstance(target, list) and part.isdigit() and int(part) < len(target):
                    target = target[int(part)]
                elif isinstance(target, dict) and part in target:
                    target = target[part]
                else:
                    raise GrammarError(f"$ref {ref[:200]!r}: there is nothing at this place of the schema")
        if isinstance(target, bool):
            return target
        name = self._names.get(id(target))
        if name is None:
            name = self._names[id(target)] = f"d{len(self._names)}"
            self._waiting.append((name, target, self._base.get(id(target), document)))
        return {"$ref": name}

    def _read(self, schema: Any, base: str) -> Schema:
        self._num_parts += 1
        if self._num_parts > MAX_PARTS:
            raise GrammarError(f"the schema has more than {MAX_PARTS} parts")
        if isinstance(schema, bool):
            return schema
        if not isinstance(schema, dict):
            raise GrammarError(f"a JSON schema is an object, not {str(schema)[:60]!r}")
        base = self._base.get(id(schema), base)
        schema = schema_keywords(schema)  # a reference may lead to what is no part of the schema otherwise
        made: dict[str, Any] = {}
        if "$ref" in schema:
            if not isinstance(schema["$ref"], str):
                raise GrammarError("$ref must be a text")
            target = self._resolve(schema["$ref"], base)
            if self._old or not isinstance(target, dict):  # up to draft 7 nothing beside a reference counts
                if self._old or target is False:
                    return target
            else:
                made.update(target)
        for key in ("$dynamicRef", "$recursiveRef"):
            if key in schema:
                raise GrammarError(f"{key} is not supported")
        for key, value in schema.items():
            if key in _PLAIN:
                made[key] = _count(key, value) if key in COUNTS else value
            elif key in _ONE:
                made[key] = self._read(value, base)
            elif key in _LIST:
                made[key] = [self._read(item, base) for item in _of(list, key, value)]
            elif key in _MAP:
                made[key] = {name: self._read(item, base) for name, item in _of(dict, key, value).items()}
        self._read_others(schema, base, made)
        if made.get("not") is True or made.get("not") == {}:
            return False
        if made.get("not") is False:
            del made["not"]
        return made

    def _read_others(self, schema: Mapping[str, Any], base: str, made: dict[str, Any]) -> None:
        """Keywords whose form has changed."""
        more: list[Schema] = []
        items = schema.get("items")
        if isinstance(items, list) and "prefixItems" not in schema:
            made["prefixItems"] = [self._read(item, base) for item in items]
            if "additionalItems" in schema:
                made["items"] = self._read(schema["additionalItems"], base)
        elif items is not None:
            made["items"] = self._read(items, base)
        for low, strict in (("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")):
            if schema.get(strict) is True and low in made:
                made[strict] = made.pop(low)
            elif strict in schema and not isinstance(schema[strict], bool):
                made[strict] = schema[strict]
        if isinstance(schema.get("format"), str) and schema["format"] in FORMATS:
            made["format"] = schema["format"]
        if isinstance(schema.get("required"), bool):
            del made["required"]  # of draft 3: it speaks to the object around it
        called = [
            n for n, p in schema.get("properties", {}).items() if isinstance(p, dict) and p.get("required") is True
        ]
        if called:
            made["required"] = [*made.get("required", []), *called]
        for key, value in _of(dict, "dependencies", schema.get("dependencies", {})).items():
            if isinstance(value, (dict, bool)):
                made["dependentSchemas"] = {key: self._read(value, base), **made.get("dependentSchemas", {})}
            else:
                made["dependentRequired"] = {key: value if isinstance(value, list) else [value],
                                             **made.get("dependentRequired", {})}  # fmt: skip
        if "dependentRequired" in schema:
            made["dependentRequired"] = {**made.get("dependentRequired", {}), **schema["dependentRequired"]}
        if "type" in schema:
            self._read_type(schema["type"], base, made, more)
        if "divisibleBy" in schema:
            more.append({"multipleOf": schema["divisibleBy"]})
        if "extends" in schema:
            extends = schema["extends"]
            more += [self._read(item, base) for item in (extends if isinstance(extends, list) else [extends])]
        if "disallow" in schema:
            disallowed: dict[str, Any] = {}
            self._read_type(schema["disallow"], base, disallowed, more)
            more.append({"not": disallowed})
        if more:
            made["allOf"] = [*made.get("allOf", []), *more]

    def _read_type(self, kind: Any, base: str, made: dict[str, Any], more: list[Schema]) -> None:
        """Old drafts allow schemas among the types, and "any"."""
        kinds = kind if isinstance(kind, list) else [kind]
        parts = [k for k in kinds if isinstance(k, dict)]
        names = [k for k in kinds if not isinstance(k, dict)]
        if "any" in names:
            return
        if unknown := [k for k in names if k not in TYPES]:
            raise GrammarError(f"unknown type {unknown[0]!r}")
        if not kinds:
            raise GrammarError("a list of types must not be empty")
        if parts:
            more.append({"anyOf": [*({"type": [n]} for n in names), *(self._read(p, base) for p in parts)]})
        else:
            made["type"] = list(dict.fromkeys(names))

    def _check_loops(self) -> None:
        """Refuses a reference that leads back to itself with nothing to write on the way."""
        done: set[str] = set()
        for first in self.targets:
            path: list[str] = []
            stack = [(first, True)]
            while stack:
                name, enters = stack.pop()
                if not enters:
                    done.add(path.pop())
                elif name in path:
                    raise GrammarError("a $ref leads back to itself without an object or a list in between")
                elif name not in done:
                    path.append(name)
                    stack.append((name, False))
                    stack += [(ref, True) for ref in _refs_here(self.targets[name])]


TYPES = ("array", "boolean", "integer", "null", "number", "object", "string")


def here(schema: Mapping[str, Any]) -> list[Any]:
    """The subschemas that are about the same value."""
    found = [part for key in _HERE for part in schema.get(key, ())]
    found += [schema[key] for key in ("not", "if", "then", "else") if key in schema]
    return [*found, *schema.get("dependentSchemas", {}).values()]


def _refs_here(schema: Schema) -> list[str]:
    found, waiting = [], [schema]
    while waiting:
        part = waiting.pop()
        if isinstance(part, dict):
            found += [part["$ref"]] if "$ref" in part else []
            waiting += here(part)
    return found


def _join(base: str, ref: str) -> str:
    try:
        return base + ref if ref.startswith("#") else urljoin(base, ref) if base else ref
    except ValueError:
        raise GrammarError(f"{ref[:200]!r} is no URI") from None


def _of(kind: type, key: str, value: Any) -> Any:
    if not isinstance(value, kind):
        raise GrammarError(f"{key} must be {'a list' if kind is list else 'an object'}")
    return value


def _count(key: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or value != int(value) or value < 0:
        raise GrammarError(f"{key} must be a whole number, not {str(value)[:60]}")
    return int(value)
