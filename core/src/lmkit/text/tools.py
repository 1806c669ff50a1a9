"""Tool definitions of clients as ToolDef."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lmkit.api import InvalidParam, ToolDef


def tool_def(tool: object) -> ToolDef:
    """From {"type": "function", "function": {"name", ...}}, or with the name beside the type. Raises InvalidParam."""
    data: Any = tool
    function = data.get("function", data) if isinstance(data, Mapping) else None
    if (
        not isinstance(function, Mapping)
        or data.get("type", "function") != "function"
        or not isinstance(function.get("name"), str)
        or not function["name"]
    ):
        raise InvalidParam("tools", tool, '{"type": "function", "function": {"name": ..., "parameters": ...}}')
    parameters = function.get("parameters") or {}
    if not isinstance(parameters, Mapping):
        raise InvalidParam(f"tools: parameters of {function['name']}", parameters, "a JSON schema (an object)")
    strict = bool(function.get("strict"))
    return ToolDef(function["name"], str(function.get("description") or ""), parameters, strict)
