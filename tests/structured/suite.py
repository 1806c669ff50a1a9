"""The official JSON Schema test suite (draft 2020-12) against a grammar backend: what is generated, what is refused.

python -m tests.structured.suite --write      renews docs/reference/json-schema.md
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice, permutations
from pathlib import Path
from typing import Any

from lmkit.api import Grammar, GrammarBackend, GrammarError, Vocabulary
from lmkit.plugins import load_target
from lmkit_structured_output_masks.sources import keywords
from lmkit_testing.grammars import allowed_ids, byte_vocabulary
from lmkit_testing.specs import find_plugin

ROOT = Path(__file__).resolve().parents[2]
SUITE = ROOT.parent / "shared" / "data" / "json_schema" / "tests" / "draft2020-12"
PAGE = ROOT / "docs" / "reference" / "json-schema.md"
VOCABULARY = byte_vocabulary("<|end|>")

# Valid instances that are not generated, although the schema is taken: narrower than the draft, and on purpose.
NARROWER = {
    "order": "properties come in the order of the schema",
    "number": "a number is written as the schema writes it: 1 and not 1.0",
    "format": "`format` is an assertion",
    "escape": "control characters other than \\b \\f \\n \\r \\t are not written",
    "words": "`not`, `oneOf`, `if`, `contains` and others are put in other words, which may exclude more",
    "dialect": "keywords hold whatever the `$vocabulary` of a dialect of its own says",
}


@dataclass
class File:
    """Results of one file of the suite. `wrong`: invalid instances that could be generated; there must be none."""

    name: str
    num_schemas: int = 0
    refused: dict[str, str] = field(default_factory=dict)  # schema -> reason
    num_valid: int = 0
    num_invalid: int = 0
    narrower: dict[str, str] = field(default_factory=dict)  # test -> key of NARROWER
    unexplained: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)


def backend_of(name: str, vocabulary: Vocabulary = VOCABULARY) -> GrammarBackend:
    return load_target(find_plugin(f"grammar:{name}")[2].target)(vocabulary)


def run(backend: GrammarBackend) -> Iterator[File]:
    for path in sorted(SUITE.glob("*.json")):
        found = File(path.stem)
        for case in json.loads(path.read_text(encoding="utf-8")):
            found.num_schemas += 1
            try:
                compiled = backend.load(backend.compile(Grammar("json_schema", json.dumps(case["schema"]))))
            except GrammarError as error:
                found.refused[case["description"]] = error.message.splitlines()[0]
                continue
            for test in case["tests"]:
                where = f"{case['description']}: {test['description']}"
                can = any(generated(compiled, text) for text in spellings(test["data"]))
                found.num_valid += test["valid"]
                found.num_invalid += not test["valid"]
                if can and not test["valid"]:
                    found.wrong.append(where)
                elif test["valid"] and not can:
                    reason = why(case["schema"], test["data"], compiled)
                    if reason:
                        found.narrower[where] = reason
                    else:
                        found.unexplained.append(where)
        yield found


def spellings(data: Any) -> tuple[str, str]:
    """Compact, and with blanks as Python writes it."""
    return (
        json.dumps(data, ensure_ascii=False, separators=(",", ":")),
        json.dumps(data, ensure_ascii=False),
    )


def generated(compiled: Any, text: str) -> bool:
    """Whether the masks let a sampler write `text` token by token, and then end."""
    matcher = compiled.matcher()
    for byte in text.encode():
        if byte not in allowed_ids(matcher, VOCABULARY.size) or not matcher.accept([byte]):
            return False
    return matcher.complete


def why(schema: Any, data: Any, compiled: Any) -> str | None:
    """The key of NARROWER that explains why this valid instance is not generated."""
    if isinstance(schema, dict) and "format" in json.dumps(schema):
        return "format"
    if any(generated(compiled, spellings(other)[0]) for other in _reordered(data)):
        return "order"
    if any(generated(compiled, spellings(other)[0]) for other in _integers(data)):
        return "number"
    if "\\u00" in json.dumps(data):
        return "escape"
    if _IN_OTHER_WORDS & keywords(schema):
        return "words"
    return "dialect" if "/draft/" not in schema.get("$schema", "/draft/") else None


_IN_OTHER_WORDS = {
    "contains", "dependentRequired", "dependentSchemas", "if", "maxProperties", "minProperties", "not", "oneOf",
    "propertyNames", "unevaluatedItems", "unevaluatedProperties", "uniqueItems",
}  # fmt: skip


def _reordered(data: Any) -> Iterator[Any]:
    """The same object in other orders."""
    if isinstance(data, dict):
        for items in islice(permutations(data.items()), 24):
            yield dict(items)


def _integers(data: Any) -> Iterator[Any]:
    """The same with 1 for 1.0."""
    if isinstance(data, float) and data == int(data):
        yield int(data)
    elif isinstance(data, list):
        yield [next(_integers(v), v) for v in data]


def page() -> str:
    """The coverage of all backends that are installed, as Markdown."""
    lines = [
        "# JSON schema",
        "",
        "What the grammar backends make of the official test suite, draft 2020-12: generated by",
        "`python -m tests.structured.suite --write`. A schema is taken as a whole or refused with a reason; of one",
        "that is taken no invalid instance can be generated, and every valid one can, but for the column on the right.",
        "",
    ]  # fmt: skip
    for name in ("llguidance", "xgrammar"):
        try:
            backend = backend_of(name)
        except Exception:  # not installed here
            continue
        files = list(run(backend))
        lines += [f"## {name}", "", "| file | schemas taken | invalid, generated | valid, generated | narrower |",
                  "|---|---|---|---|---|"]  # fmt: skip
        for f in files:
            kinds = sorted(set(f.narrower.values()))
            lines.append(
                f"| {f.name} | {f.num_schemas - len(f.refused)} of {f.num_schemas} | {len(f.wrong)} of {f.num_invalid} "
                f"| {f.num_valid - len(f.narrower) - len(f.unexplained)} of {f.num_valid} | {', '.join(kinds)} |"
            )
        total = [sum(x) for x in zip(*((f.num_schemas - len(f.refused), f.num_schemas, len(f.wrong), f.num_invalid,
                                        f.num_valid - len(f.narrower) - len(f.unexplained), f.num_valid)
                                       for f in files), strict=True)]  # fmt: skip
        lines.append(f"| **all** | {total[0]} of {total[1]} | {total[2]} of {total[3]} | {total[4]} of {total[5]} | |")
        lines += ["", "Why schemas are refused:", ""]
        reasons: dict[str, int] = {}
        for f in files:
            for reason in f.refused.values():
                for part in _general(reason):
                    reasons[part] = reasons.get(part, 0) + 1
        lines += [f"- {reason} ({count})" for reason, count in sorted(reasons.items(), key=lambda r: (-r[1], r[0]))]
        lines.append("")
    lines += ["Narrower than the draft:", "", *(f"- {key}: {text}" for key, text in NARROWER.items())]
    return "\n".join(lines) + "\n"


def _general(reason: str) -> list[str]:
    """Without what belongs to one schema only."""
    if reason.startswith("Unimplemented keys: "):
        return [f"keyword `{key}`" for key in json.loads(reason.partition(": ")[2])]
    for start, text in _REASONS.items():
        if reason.startswith(start):
            return [text]
    return [reason[:110].replace("|", "\\|")]


_REASONS = {
    "Resource '": "a `$ref` to another document",
    "$ref to another": "a `$ref` to another document",
    "Value for 'multipleOf'": "`multipleOf` with too many digits",
    "patternProperty regexes": "`patternProperties` that overlap",
    "Expected positive": "a limit written as a float (2.0)",
    "Unsatisfiable schema": "nothing satisfies it",
    "nothing satisfies": "nothing satisfies it",
    "oneOf constraints": "`oneOf` whose alternatives are not known to exclude each other",
    "Unknown format": "an unknown `format`",
}


if __name__ == "__main__":
    text = page()
    if "--write" in sys.argv:
        PAGE.write_text(text, encoding="utf-8")
    else:
        print(text)
