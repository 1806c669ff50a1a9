"""JSON schemas in the words that llguidance enforces: rewritten to schemas that mean the same, or less.

`oneOf`, `not`, `if`, `dependentRequired`, `contains` and others become alternatives that each exclude what must not
hold beside them. Where that cannot be said in full, the alternatives that can be said are kept: whatever is written
then fits the schema as it was given. What leaves nothing is refused.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from itertools import combinations, islice, permutations
from typing import Any

from lmkit.api import GrammarError

from lmkit_grammar_llguidance.logic import Logic, names
from lmkit_grammar_llguidance.numbers import with_exact_numbers
from lmkit_grammar_llguidance.patterns import with_names
from lmkit_grammar_llguidance.references import TYPES, References, Schema

MAX_PARTS = 50_000  # of the schema that is made
MAX_DEPTH = 24  # what is nested deeper gets a name: the library reads 128 levels of JSON
MAX_BRANCHES = 64  # that one keyword becomes
_ANY = "$any"  # in what is made here: alternatives of which some may be beyond enforcing
_COUNT = "$count"  # the same: a keyword that llguidance understands as it is
_INSTEAD = "$instead"  # the same: what stands there says all that `items` says
_AS_IT_IS = frozenset({
    "const", "enum", "exclusiveMaximum", "exclusiveMinimum", "format", "maxItems", "maxLength", "maximum", "minItems",
    "minLength", "minimum", "multipleOf", "pattern", "required", "type",
})  # fmt: skip
_NESTED = {"additionalProperties": "one", "items": "one", "prefixItems": "list", "properties": "map",
           "patternProperties": "map"}  # fmt: skip


def rewrite(schema: Any) -> dict[str, Any]:
    """A schema for llguidance. Raises GrammarError with the reason for what cannot be enforced."""
    return Rewriter(References(schema)).build()


class Rewriter:
    """One schema. Each keyword that needs it becomes a further part of an allOf."""

    def __init__(self, references: References) -> None:
        self._root, self._targets = references.root, references.targets
        self._logic = Logic(references.targets)
        self._made: dict[str, Any] = {}
        self._waiting: list[str] = []
        self._num_parts = 0
        self._depth = 0

    def build(self) -> dict[str, Any]:
        root = self._rewrite(self._root)
        while self._waiting:
            name = self._waiting.pop()
            self._made[name] = self._rewrite(self._targets[name])
        if not can_end(root, self._made):
            raise GrammarError("nothing satisfies it")
        root = {} if root is True else root
        return with_exact_numbers({**root, "$defs": self._made} if self._made else root)

    def _rewrite(self, schema: Schema) -> Any:
        if isinstance(schema, bool):
            return schema
        self._num_parts += 1
        if self._num_parts > MAX_PARTS:
            raise GrammarError(f"with all its alternatives it has more than {MAX_PARTS} parts")
        if self._depth > MAX_DEPTH:
            name = f"p{self._num_parts}"
            self._targets[name], self._made[name] = schema, True
            self._waiting.append(name)
            return {"$ref": f"#/$defs/{name}"}
        self._depth += 1
        try:
            return self._in_other_words(schema)
        finally:
            self._depth -= 1

    def _in_other_words(self, schema: Mapping[str, Any]) -> Any:
        schema = with_names(schema)
        hard = [key for key in schema if key in _HARD]
        if hard:
            values = self._logic.values(schema)
            if values is not None and all(self._logic.holds(schema, value) for value in values):
                return {"enum": values} if values else False
        made: dict[str, Any] = {key: value for key, value in schema.items() if key in _AS_IT_IS}
        if "$ref" in schema:
            name = schema["$ref"]
            if name not in self._made:
                self._made[name] = True
                self._waiting.append(name)
            made["$ref"] = f"#/$defs/{name}"
        for key, form in _NESTED.items():
            if key in schema:
                made[key] = self._nested(form, schema[key])
        if "anyOf" in schema:
            made["anyOf"] = [self._rewrite(part) for part in schema["anyOf"]]
        parts = [self._rewrite(part) for part in schema.get("allOf", ())]
        if _ANY in schema:
            parts.append({"anyOf": self._possible(schema[_ANY])})
        for key in hard:
            for part in _HARD[key](self, schema):
                if isinstance(part, dict) and _COUNT in part:
                    made[key] = part[_COUNT]
                    made["required"] = [*made.get("required", []), *part["required"]]
                    continue
                if isinstance(part, dict) and _INSTEAD in part:
                    made.pop("items", None)
                    part = part[_INSTEAD]
                parts.append(self._rewrite(part))
        return _with_parts(made, parts)

    def _possible(self, schemas: Sequence[Schema]) -> list[Any]:
        """Those of our own alternatives that can be enforced. Raises GrammarError when none can."""
        found, error = [], None
        for schema in schemas:
            try:
                found.append(self._rewrite(schema))
            except GrammarError as e:
                error = e
        if not found and error is not None:
            raise error
        return found

    def _nested(self, form: str, value: Any) -> Any:
        if form == "one":
            return self._rewrite(value)
        if form == "list":
            return [self._rewrite(part) for part in value]
        return {name: self._rewrite(part) for name, part in value.items()}

    # ------------------------------------------------------------------- each returns what must hold instead of it

    def _not(self, schema: Mapping[str, Any]) -> list[Schema]:
        base = {key: value for key, value in schema.items() if key != "not"}
        found = self._apart(base, schema["not"])
        if found is None:
            raise GrammarError("`not` cannot be enforced here: what it leaves cannot be said in other words")
        return found

    def _apart(self, schema: Schema, other: Schema, most: int = MAX_BRANCHES) -> list[Schema] | None:
        """What must hold beside `schema` so that `other` does not; None: no words for it."""
        if self._logic.disjoint(schema, other):
            return []
        found = [n for n in self._logic.negations(other) if not self._logic.disjoint(schema, n)]
        return [{_ANY: found[:most]}] if found else None

    def _one_of(self, schema: Mapping[str, Any]) -> list[Schema]:
        base = {key: value for key, value in schema.items() if key != "oneOf"}
        options = [option for option in schema["oneOf"] if option is not False]
        found: list[Schema] = []
        for i, option in enumerate(options):
            here: Schema = {"allOf": [base, option]} if base else option
            others = [o for j, o in enumerate(options) if j != i and not self._logic.disjoint(here, o)]
            most = max(1, int(MAX_BRANCHES ** (1 / max(1, len(others)))))
            apart = [self._apart(here, other, most) for other in others]
            if None not in apart:
                beside = [part for parts in apart for part in parts or ()]
                found.append({"allOf": [option, *beside]} if beside else option)
        if not found:
            raise GrammarError("`oneOf` cannot be enforced here: its options cannot be told apart while one is written")
        return [{"anyOf": found}]

    def _if(self, schema: Mapping[str, Any]) -> list[Schema]:
        condition, yes, no = schema["if"], schema.get("then", True), schema.get("else", True)
        if yes is True and no is True:
            return []
        base = {key: value for key, value in schema.items() if key not in ("if", "then", "else")}
        found: list[Schema] = []
        if yes is not False and not self._logic.disjoint(base, condition):
            found.append(condition if yes is True else {"allOf": [condition, yes]})
        if no is not False and (apart := self._apart(base, condition)) is not None:
            found.append({"allOf": [*apart, no]} if apart else no)
        if not found:
            raise GrammarError("`if` cannot be enforced here: its opposite cannot be said in other words")
        return [{"anyOf": found}]

    def _dependent_required(self, schema: Mapping[str, Any]) -> list[Schema]:
        for key, needed in schema["dependentRequired"].items():
            if not isinstance(needed, list) or not all(isinstance(name, str) for name in needed):
                raise GrammarError(f"dependentRequired: what {key!r} needs must be a list of names")
        schemas = {key: {"required": needed} for key, needed in schema["dependentRequired"].items() if needed}
        return self._dependent_schemas({**schema, "dependentSchemas": schemas})

    def _dependent_schemas(self, schema: Mapping[str, Any]) -> list[Schema]:
        required = {name for part in self._logic.parts(schema, 0) for name in names(part)}
        found: list[Schema] = []
        for key, needed in schema["dependentSchemas"].items():
            if needed is True:
                continue
            with_it: Schema = {"allOf": [{"type": ["object"], "required": [key]}, needed]}
            if key in required:
                found.append({"anyOf": [with_it, _NO_OBJECT]})
            elif needed is False:
                found.append({"properties": {key: False}})
            else:
                found.append({"anyOf": [{"properties": {key: False}}, with_it]})
        return found

    def _contains(self, schema: Mapping[str, Any]) -> list[Schema]:
        wanted, least, most = schema["contains"], schema.get("minContains", 1), schema.get("maxContains")
        beside: dict[str, Any] = {}
        other: Schema = True
        if most is not None:
            found = self._logic.negations(wanted)
            if not found or most < least:
                raise GrammarError("maxContains cannot be enforced here")
            other = {"anyOf": found}
            beside["items"] = other
        if least > MAX_BRANCHES:
            raise GrammarError(f"minContains above {MAX_BRANCHES} is not supported")
        places = range(max(4, min(len(schema.get("prefixItems", ())) + 1, 8)) if least else 1)
        return [{"anyOf": [{"prefixItems": [*[other] * i, *[wanted] * least], "minItems": i + least, **beside}
                           for i in places]}]  # fmt: skip

    def _property_names(self, schema: Mapping[str, Any]) -> list[Schema]:
        rule = schema["propertyNames"]
        if isinstance(rule, dict) and set(rule) <= {"type", "format"}:
            rule = "string" in rule.get("type", TYPES)
        if isinstance(rule, bool):
            return [] if rule else [_only([])]
        allowed = self._logic.values(rule)
        if allowed is not None:
            return [_only([name for name in allowed if isinstance(name, str)])]
        rules = self._logic.negations(rule["not"]) if set(rule) == {"not"} else [rule]
        for part in rules:
            if isinstance(part, dict) and (pattern := _one_pattern(part)) is not None:
                return [{"patternProperties": {pattern: True}, "additionalProperties": False}]
        known = [name for part in self._logic.parts(schema, 0) for name in part.get("properties", {})]
        known = [name for name in known if self._logic.holds(rule, name)]
        if not known:
            raise GrammarError("propertyNames of this kind cannot be enforced")
        return [_only(known)]

    def _min_properties(self, schema: Mapping[str, Any]) -> list[Schema]:
        least = schema["minProperties"]
        listed, required = self._listed(schema)
        optional = [name for name in listed if name not in required]
        missing = least - len(required)
        if missing <= 0:
            return []
        if missing > len(optional):
            if missing > len(optional) + 1:  # the names of others could be written twice
                raise GrammarError(f"minProperties {least} needs more properties than the schema names")
            return [{_COUNT: least, "required": optional}]
        return [{"anyOf": [{"required": list(choice)} for choice in _choices(optional, missing)]}]

    def _max_properties(self, schema: Mapping[str, Any]) -> list[Schema]:
        most = schema["maxProperties"]
        listed, required = self._listed(schema)
        optional = [name for name in listed if name not in required]
        room = most - len(required)
        if room < 0:
            return [_NO_OBJECT]
        if not optional:
            return [{_COUNT: most, "required": []}]
        if room >= len(optional):
            return [_only([*required, *optional])]
        return [{"anyOf": [_only([*required, *choice]) for choice in _choices(optional, room)]}]

    def _listed(self, schema: Mapping[str, Any]) -> tuple[list[str], list[str]]:
        """Properties by name: those that may be there, and those that must."""
        parts = self._logic.parts(schema, 0)
        listed = dict.fromkeys(name for part in parts for name in part.get("properties", {}))
        banned = {name for part in parts for name, p in part.get("properties", {}).items() if p is False}
        required = list(dict.fromkeys(name for part in parts for name in names(part)))
        return [name for name in listed if name not in banned], required

    def _unique(self, schema: Mapping[str, Any]) -> list[Schema]:
        if schema["uniqueItems"] is not True or schema.get("maxItems", 2) <= 1:
            return []
        prefix, rest = schema.get("prefixItems", []), schema.get("items", True)
        apart = all(self._logic.disjoint(a, b) for a, b in combinations(prefix[:MAX_BRANCHES], 2))
        if apart and prefix and (rest is False or schema.get("maxItems", len(prefix) + 1) <= len(prefix)):
            return []
        values = None if prefix else self._logic.values(rest)
        if values is None:
            raise GrammarError(
                "uniqueItems is enforced for lists whose items are of few known values, and for no others"
            )
        length, num = 1, 1  # of lists that are told apart by all but their last items
        while length < min(len(values), schema.get("maxItems", len(values))) and num * len(values) <= 2 * MAX_BRANCHES:
            num *= len(values) - length + 1
            length += 1
        if schema.get("minItems", 0) > length:
            raise GrammarError(f"uniqueItems: lists of {len(values)} values may have up to {length} items")
        found: list[Schema] = []
        for first in permutations(values, length - 1):
            others = [value for value in values if not any(value is f for f in first)]
            items = [*({"enum": [value]} for value in first), {"enum": others}]
            found.append({"prefixItems": items, "items": False, "maxItems": length})
        known = all(self._logic.holds(rest, value) for value in values)
        return [{_INSTEAD: {"anyOf": found}} if known else {"anyOf": found}]

    def _unevaluated(self, schema: Mapping[str, Any]) -> list[Schema]:
        if schema.get("unevaluatedProperties", True) is True and schema.get("unevaluatedItems", True) is True:
            return []
        parts = self._logic.parts(schema, 0)
        if any(
            key in part for part in parts for key in ("anyOf", "oneOf", "if", "dependentSchemas", "contains", "not")
        ):
            raise GrammarError("unevaluatedProperties and unevaluatedItems are supported beside allOf and $ref only")
        found: dict[str, Any] = {}
        if "unevaluatedProperties" in schema and not any("additionalProperties" in part for part in parts):
            for key in ("properties", "patternProperties"):
                found[key] = {name: True for part in parts for name in part.get(key, {})}
            found["additionalProperties"] = schema["unevaluatedProperties"]
        if "unevaluatedItems" in schema and not any("items" in part for part in parts):
            found["prefixItems"] = [True] * max(len(part.get("prefixItems", ())) for part in parts)
            found["items"] = schema["unevaluatedItems"]
        return [found]


_NO_OBJECT: Schema = {"type": [kind for kind in TYPES if kind not in ("object", "integer")]}
_HARD = {
    "not": Rewriter._not, "oneOf": Rewriter._one_of, "if": Rewriter._if, "contains": Rewriter._contains,
    "dependentRequired": Rewriter._dependent_required, "dependentSchemas": Rewriter._dependent_schemas,
    "propertyNames": Rewriter._property_names, "minProperties": Rewriter._min_properties,
    "maxProperties": Rewriter._max_properties, "uniqueItems": Rewriter._unique,
    "unevaluatedProperties": Rewriter._unevaluated, "unevaluatedItems": Rewriter._unevaluated,
}  # fmt: skip


def _only(allowed: Sequence[str]) -> Schema:
    return {"properties": dict.fromkeys(allowed, True), "additionalProperties": False}


def _one_pattern(rule: Mapping[str, Any]) -> str | None:
    """For the texts that fit `rule`; None where one pattern cannot say it."""
    if not set(rule) <= {"type", "format", "pattern", "minLength", "maxLength"} or "string" not in rule.get(
        "type", TYPES
    ):
        return None
    if "minLength" not in rule and "maxLength" not in rule:
        return rule.get("pattern")
    found = re.fullmatch(r"\^(\[[^\[\]\\]+\])([+*])\$", rule.get("pattern", "^[^\n]*$"))
    if found is None:
        return None
    least = max(rule.get("minLength", 0), found[2] == "+")
    return f"^{found[1]}{{{least:d},{rule.get('maxLength', '')}}}$"


def _choices(items: Sequence[str], num: int) -> list[tuple[str, ...]]:
    """All choices of `num`, or the first, and those that stand together."""
    found = list(islice(combinations(items, num), MAX_BRANCHES + 1))
    if len(found) <= MAX_BRANCHES:
        return found
    return [tuple(items[i : i + num]) for i in range(len(items) - num + 1)][:MAX_BRANCHES]


def _with_parts(made: dict[str, Any], parts: list[Any]) -> Any:
    parts = [part for part in parts if part is not True and part != {}]
    if False in parts:
        return False
    for part in parts:
        if set(part) == {"anyOf"}:
            part["anyOf"] = [branch for branch in part["anyOf"] if branch is not False]
            if not part["anyOf"]:
                return False
            if len(parts) == 1 and "anyOf" not in made:
                return {**made, **part}
    return {**made, "allOf": parts} if parts else made


def can_end(root: Any, definitions: Mapping[str, Any]) -> bool:
    """Whether some text of the schema is finite. Only what is sure makes it False."""
    ends: set[str] = set()

    def ending(schema: Any, depth: int = 0) -> bool:
        if isinstance(schema, bool):
            return schema
        if "$ref" in schema and schema["$ref"].removeprefix("#/$defs/") not in ends:
            return False
        if not all(ending(part) for part in schema.get("allOf", ())):
            return False
        if "anyOf" in schema and not any(ending(part) for part in schema["anyOf"]):
            return False
        kinds = set(schema.get("type", TYPES))
        if kinds == {"object"}:
            parts = [schema.get("properties", {}).get(name, True) for name in schema.get("required", ())]
            return all(ending(part) for part in parts)
        if kinds == {"array"} and schema.get("minItems", 0) > 0:
            prefix = schema.get("prefixItems", [])[: schema["minItems"]]
            rest = [schema.get("items", True)] if schema["minItems"] > len(prefix) else []
            return all(ending(part) for part in [*prefix, *rest])
        return True

    while True:
        more = {name for name, schema in definitions.items() if name not in ends and ending(schema)}
        if not more:
            return ending(root)
        ends |= more
