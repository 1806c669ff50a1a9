"""The published OpenAPI description as a validator: values against schemas, and which fields it does not know."""

from __future__ import annotations

import gzip
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

FILE = Path(__file__).resolve().parents[2].parent / "shared" / "data" / "wire" / "openai-openapi.yaml.gz"

# Where the description forbids what the API itself sends: (schema, path of the value), and why.
DEVIATIONS = {
    ("CreateCompletionResponse", "choices/*/finish_reason"): "null in every streamed chunk but the last",
    ("CreateCompletionResponse", "choices/*/logprobs/token_logprobs/*"): "null for the first token of an echoed prompt",
    ("CreateCompletionResponse", "choices/*/logprobs/top_logprobs/*"): "null for the first token of an echoed prompt",
    ("CreateCompletionResponse", "usage"): "null in every streamed chunk but the last with include_usage",
}


@cache
def document() -> dict[str, Any]:
    if not FILE.is_file():
        pytest.skip(f"the OpenAPI description ({FILE.name}) is not beside the repository")
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    return _nullable(yaml.load(gzip.decompress(FILE.read_bytes()), loader))


def _nullable(node: Any) -> Any:
    """`nullable: true` is OpenAPI 3.0's way to allow null; the document mixes it with 3.1."""
    if isinstance(node, list):
        return [_nullable(n) for n in node]
    if not isinstance(node, dict):
        return node
    made = {k: _nullable(v) for k, v in node.items()}
    return {"anyOf": [made, {"type": "null"}]} if made.pop("nullable", None) is True else made


@cache
def validator(schema: str) -> jsonschema.Draft202012Validator:
    root = {"$ref": f"#/components/schemas/{schema}", "components": document()["components"]}
    return jsonschema.Draft202012Validator(root)


def check(schema: str, value: Any, extensions: frozenset[str]) -> None:
    """Raises AssertionError: the value does not fit, or has a field that neither side knows."""
    for error in validator(schema).iter_errors(value):
        assert _deviates(schema, error), f"{schema} at {_path(error)}: {error.message[:300]}"
    unknown = set(_unknown({"$ref": f"#/components/schemas/{schema}"}, value, ""))
    extra = {u for u in unknown if u.rpartition("/")[2] not in extensions}
    assert not extra, f"{schema}: fields that are neither in the API nor listed as extensions: {sorted(extra)}"


def _path(error: jsonschema.ValidationError) -> str:
    return "/".join("*" if isinstance(p, int) else p for p in error.absolute_path)


def _deviates(schema: str, error: jsonschema.ValidationError) -> bool:
    """Whether the error is one of DEVIATIONS, or a choice of which one branch has no other errors."""
    if error.instance is None and (schema, _path(error)) in DEVIATIONS:
        return True
    branches: dict[Any, list[jsonschema.ValidationError]] = {}
    for e in error.context or ():
        branches.setdefault(e.relative_schema_path[0], []).append(e)
    return any(all(_deviates(schema, e) for e in errors) for errors in branches.values())


def _unknown(schema: dict[str, Any], value: Any, path: str) -> list[str]:
    """Paths of fields that no fitting branch of the schema describes."""
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        return _unknown(document()["components"]["schemas"][name], value, path)
    branches = [*schema.get("anyOf", ()), *schema.get("oneOf", ())]
    if branches:
        found = [_unknown(b, value, path) for b in branches if _fits(b, value)]
        return min(found, key=len) if found else []
    if isinstance(value, list) and isinstance(schema.get("items"), dict):
        return [u for v in value for u in _unknown(schema["items"], v, path)]
    if not isinstance(value, dict):
        return []
    known = dict(schema.get("properties", {}))
    for part in schema.get("allOf", ()):
        while "$ref" in part:
            part = document()["components"]["schemas"][part["$ref"].rpartition("/")[2]]
        known |= part.get("properties", {})
    if isinstance(schema.get("additionalProperties"), dict) or (not known and schema.get("type") == "object"):
        return []
    unknown = [f"{path}/{k}" for k in value if k not in known]
    return unknown + [u for k, v in value.items() if k in known for u in _unknown(known[k], v, f"{path}/{k}")]


def _fits(schema: dict[str, Any], value: Any) -> bool:
    root = {**schema, "components": document()["components"]}
    return jsonschema.Draft202012Validator(root).is_valid(value)
