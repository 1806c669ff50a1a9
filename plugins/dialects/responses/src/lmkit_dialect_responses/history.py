"""The items of a conversation: those of kept answers, those that refer to them, and how what was asked is kept."""

from __future__ import annotations

from contextlib import suppress
from typing import Any
from uuid import uuid4

import msgspec
from pydantic import TypeAdapter

from lmkit_dialect_responses.conversation import Placed
from lmkit_dialect_responses.schema import CountRequest, Item, Items, Part
from lmkit_dialect_responses.store import (
    UNFINISHED,
    Kept,
    NotFound,
    NotKept,
    PreviousNotFound,
    Store,
    Unfinished,
    progress,
)

_items: TypeAdapter[list[Item]] = TypeAdapter(Items)
# of the types of items that are read: the first part of an id, and which fields are kept
_KEPT = {
    "message": ("msg", ("role", "content")),
    "reasoning": ("rs", ("summary", "content", "encrypted_content")),
    "function_call": ("fc", ("call_id", "namespace", "name", "arguments")),
    "function_call_output": ("fco", ("call_id", "output")),
    "custom_tool_call": ("ctc", ("call_id", "namespace", "name", "input")),
    "custom_tool_call_output": ("ctco", ("call_id", "output")),
    "mcp_call": ("mcp", ("server_label", "name", "arguments", "output", "error")),
    "mcp_list_tools": ("mcpl", ("server_label", "tools")),
}


def items_of(request: CountRequest, store: Store, tenant: str) -> tuple[list[Placed], list[Item]]:
    """All items, those of kept answers first, and the request's own. Raises NotFound, Unfinished."""
    items: list[Placed] = []
    try:
        for kept in store.chain(tenant, request.previous_response_id):
            if progress(kept).status in UNFINISHED:
                raise Unfinished(kept.id)
            before = as_items(listed(kept) + answered(kept))
            items += [("previous_response_id", item) for item in before]
    except NotKept:
        raise PreviousNotFound(request.previous_response_id or "", "previous_response_id") from None
    own = []
    for i, item in enumerate(request.items()):
        own.append(_referred(store, tenant, item, f"input.{i}") if item.kind == "item_reference" else item)
        items.append((f"input.{i}", own[-1]))
    return items, own


def listed(kept: Kept) -> list[dict[str, Any]]:
    """The items that were asked with an answer, without those before."""
    found: list[dict[str, Any]] = msgspec.json.decode(kept.input)
    return found


def answered(kept: Kept) -> list[dict[str, Any]]:
    """The items of an answer."""
    found: list[dict[str, Any]] = msgspec.json.decode(kept.body)["output"]
    return found


def _referred(store: Store, tenant: str, item: Item, where: str) -> Item:
    """The item of a kept answer; its id says which answer that is. Raises NotFound."""
    id = item.id or ""
    with suppress(NotKept):
        kept = store.get(tenant, f"resp_{id.partition('_')[2].rpartition('_')[0]}")
        for found in answered(kept):
            if found["id"] == id:
                return as_items([found])[0]
    raise NotFound(id, f"{where}.id")


def as_items(found: list[dict[str, Any]]) -> list[Item]:
    """Items of an answer as those of a request."""
    return _items.validate_python(found)


def kept_item(item: Item) -> dict[str, Any]:
    """One of the request's own items as it is listed: with an id, and messages in parts."""
    if item.kind not in _KEPT:
        return {"id": f"item_{uuid4().hex}", **item.model_dump(exclude_none=True), "status": "completed"}
    prefix, names = _KEPT[item.kind]
    kept: dict[str, Any] = {"id": item.id or f"{prefix}_{uuid4().hex}", "type": item.kind, "status": "completed"}
    said = "output_text" if item.role == "assistant" else "input_text"
    for name in names:
        value = getattr(item, name)
        if name == "content" and isinstance(value, str):
            value = [_part(Part(type="text", text=value), said)]
        elif isinstance(value, list) and name != "tools":
            value = [_part(part, said) for part in value]
        if value is not None or name == "summary":
            kept[name] = value if value is not None else []
    return kept


def _part(part: Part, said: str) -> dict[str, Any]:
    kind = said if part.type in ("text", "input_text", "output_text") else part.type
    if kind == "refusal":
        return {"type": kind, "refusal": part.refusal}
    more = {"annotations": part.annotations or [], "logprobs": part.logprobs or []} if kind == "output_text" else {}
    return {"type": kind, "text": part.text, **more}
