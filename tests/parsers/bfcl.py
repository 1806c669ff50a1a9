"""Calls of the Berkeley Function-Calling Leaderboard: tools, and the ground truth as values."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lmkit.api import ToolDef

DATA = Path(__file__).resolve().parents[2].parent / "shared" / "data"
FILES = ("simple_python", "multiple", "parallel_multiple")
TYPES = {"dict": "object", "float": "number", "tuple": "array", "any": None}  # what BFCL calls the types of JSON


@dataclass(frozen=True)
class Question:
    id: str
    tools: tuple[ToolDef, ...]
    calls: list[tuple[str, dict[str, Any]]]


def questions() -> list[Question]:
    found = []
    for name in FILES:
        asked, answers = DATA / "bfcl" / f"BFCL_v4_{name}.json", DATA / "bfcl" / f"BFCL_v4_{name}.answers.json"
        if asked.is_file() and answers.is_file():
            pairs = zip(_lines(asked), _lines(answers), strict=True)
            found += [Question(q["id"], tuple(map(_tool, q["function"])), _calls(a)) for q, a in pairs]
    return found


def _lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def _tool(function: dict[str, Any]) -> ToolDef:
    return ToolDef(function["name"], function["description"], _schema(function["parameters"]))


def _schema(value: Any) -> Any:
    if isinstance(value, list):
        return [_schema(v) for v in value]
    if not isinstance(value, dict):
        return value
    schema = {key: _schema(v) for key, v in value.items()}
    kind = schema.get("type")
    if isinstance(kind, str) and kind in TYPES:
        schema["type"] = TYPES[kind]
        if TYPES[kind] is None:
            del schema["type"]
    return schema


def _calls(answer: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """The first of the values that are right, for each argument; "" stands for leaving it out."""
    calls = [next(iter(call.items())) for call in answer["ground_truth"]]
    return [(name, {key: v[0] for key, v in arguments.items() if v[0] != ""}) for name, arguments in calls]
