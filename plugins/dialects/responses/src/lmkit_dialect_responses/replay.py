"""An answer that is kept, told as the events of its stream: each text in one piece."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

_DELTAS = {"function_call": "function_call_arguments", "mcp_call": "mcp_call_arguments",
           "custom_tool_call": "custom_tool_call_input"}  # fmt: skip
Event = dict[str, Any]


def replayed(body: dict[str, Any], after: int = -1) -> bytes:
    """The events of an answer that has ended, those up to the number `after` left out."""
    out = []
    for number, event in enumerate(_events(body)):
        if number > after:
            data = msgspec.json.encode({**event, "sequence_number": number})
            out.append(b"event: %b\ndata: %b\n\n" % (event["type"].encode(), data))
    return b"".join(out)


def _events(body: dict[str, Any]) -> Iterator[Event]:
    begun = body | {"usage": None}
    begun |= {"status": "in_progress", "output": [], "completed_at": None, "incomplete_details": None, "error": None}
    yield {"type": "response.created", "response": begun}
    yield {"type": "response.in_progress", "response": begun}
    for index, item in enumerate(body["output"]):
        yield from _of_item(item, {"item_id": item["id"], "output_index": index})
    yield {"type": f"response.{body['status']}", "response": body}


def _of_item(item: dict[str, Any], place: Event) -> Iterator[Event]:
    kind, index = item["type"], place["output_index"]
    empty: Event = {
        "arguments": {} if kind == "tool_search_call" else "",
        "input": "",
        "output": None,
        "error": None,
        "content": [],
        "tools": [],
    }
    begun = {**item, **{name: value for name, value in empty.items() if name in item}}
    begun.pop("encrypted_content", None)
    if "status" in item:
        begun["status"] = "in_progress"
    yield {"type": "response.output_item.added", "output_index": index, "item": begun}
    if kind == "mcp_list_tools":
        yield from ({"type": f"response.{kind}.{what}", **place} for what in ("in_progress", "completed"))
    elif kind == "tool_search_call":
        pass
    elif kind in _DELTAS:
        yield from _of_call(item, place)
    else:
        for number, part in enumerate(item["content"]):
            yield from _of_part(part, {**place, "content_index": number})
    yield {"type": "response.output_item.done", "output_index": index, "item": item}


def _of_call(item: dict[str, Any], place: Event) -> Iterator[Event]:
    kind = item["type"]
    field = "input" if kind == "custom_tool_call" else "arguments"
    text = item[field]
    if kind == "mcp_call":
        yield {"type": "response.mcp_call.in_progress", **place}
    if text:
        yield {"type": f"response.{_DELTAS[kind]}.delta", **place, "delta": text}
    named = {"name": item["name"]} if kind == "function_call" else {}
    yield {"type": f"response.{_DELTAS[kind]}.done", **place, field: text, **named}
    if kind == "mcp_call" and item["status"] != "incomplete":
        yield {"type": f"response.mcp_call.{item['status']}", **place}


def _of_part(part: dict[str, Any], place: Event) -> Iterator[Event]:
    what, text = f"response.{part['type']}", part["text"]
    told = {}
    if "logprobs" in part:
        told["logprobs"] = [
            {"token": e["token"], "logprob": e["logprob"],
             "top_logprobs": [{k: top[k] for k in ("token", "logprob")} for top in e["top_logprobs"]]}
            for e in part["logprobs"]
        ]  # fmt: skip
    empty = {**part, "text": "", **({"logprobs": []} if told else {})}
    yield {"type": "response.content_part.added", **place, "part": empty}
    if text:
        yield {"type": f"{what}.delta", **place, "delta": text, **told}
    yield {"type": f"{what}.done", **place, "text": text, **told}
    yield {"type": "response.content_part.done", **place, "part": part}
