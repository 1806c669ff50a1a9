"""Tools that are no plain functions: how the model sees them, and how clients hear of their calls."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from lmkit.text.constrain import TOOL_NAME
from lmkit_dialect_responses.dialect import Responses
from lmkit_dialect_responses.offers import MAX_NAME, Offer, Offers
from lmkit_http.app import build_app
from lmkit_testing.serving import ServedLLM, scripted

PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}}
WEATHER = {"type": "function", "name": "weather", "description": "The weather", "parameters": PARAMETERS}
PATCH = {"type": "custom", "name": "patch", "description": "Changes files",
         "format": {"type": "grammar", "syntax": "lark", "definition": "start: /.+/"}}  # fmt: skip
SPACE = {"type": "namespace", "name": "sky", "description": "", "tools": [WEATHER, PATCH]}
SEARCH = {"type": "tool_search", "execution": "client", "description": "Finds tools",
          "parameters": {"type": "object", "properties": {"query": {"type": "string"}}}}  # fmt: skip
HOSTED = {"type": "web_search", "external_web_access": True}
ASKS = {"role": "user", "content": "Hello"}


def said(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


async def post(llm: ServedLLM, **body: Any) -> httpx.Response:
    transport = httpx.ASGITransport(build_app(llm, None, [Responses()]), raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        return await client.post("/v1/responses", json={"model": "scripted", "input": [ASKS], **body})


async def answered(script: str, **body: Any) -> list[dict[str, Any]]:
    """The items of an answer, which are the same when it is streamed and when it is told again."""
    whole = await post(scripted(script), **body)
    assert whole.status_code == 200, whole.text
    streamed = await post(scripted(script), stream=True, **body)
    assert streamed.status_code == 200, streamed.text
    events = list(events_of(streamed.text))
    items, last = whole.json()["output"], events[-1]["response"]["output"]
    assert list(map(plain, last)) == list(map(plain, items))
    assert list(map(plain, folded(events))) == list(map(plain, items))
    return [plain(item) for item in items]


def plain(item: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in item.items() if name not in ("id", "call_id")}


def events_of(text: str) -> Iterator[dict[str, Any]]:
    for block in text.strip().split("\n\n"):
        yield json.loads(block.partition("\n")[2].removeprefix("data: "))


def folded(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The items as a client puts them together from the events."""
    items: list[dict[str, Any]] = []
    for event in events:
        kind = event["type"]
        if kind == "response.output_item.added":
            items.append(event["item"])
        elif kind == "response.custom_tool_call_input.delta":
            items[event["output_index"]]["input"] += event["delta"]
        elif kind == "response.custom_tool_call_input.done":
            assert items[event["output_index"]]["input"] == event["input"]
        elif kind == "response.output_item.done":
            before = items[event["output_index"]]
            assert before["id"] == event["item"]["id"]
            if before["type"] == "custom_tool_call":
                assert before["input"] == event["item"]["input"]
            items[event["output_index"]] = event["item"]
    return items


def prompt_of(llm: ServedLLM) -> str:
    return llm.text.decode_all(llm.client.requests[0].token_ids)


async def test_a_tool_in_a_namespace_is_called_by_its_own_names() -> None:
    items = await answered(said("sky__weather", city="Oslo"), tools=[WEATHER, SPACE])
    assert items == [{"type": "function_call", "status": "completed", "namespace": "sky", "name": "weather",
                      "arguments": '{"city": "Oslo"}'}]  # fmt: skip
    outside = await answered(said("weather", city="Oslo"), tools=[WEATHER, SPACE])
    assert (outside[0]["name"], "namespace" in outside[0]) == ("weather", False)


@pytest.mark.parametrize("name", ["patch", "sky__patch"])
async def test_a_custom_tool_gets_its_text(name: str) -> None:
    text = '*** Begin\n"+x"\n*** End é'
    items = await answered(said(name, input=text), tools=[PATCH, SPACE])
    space = {"namespace": "sky"} if name != "patch" else {}
    assert items == [{"type": "custom_tool_call", "status": "completed", **space, "name": "patch", "input": text}]


@pytest.mark.parametrize("tokens", range(60, 100, 3))
async def test_a_custom_tool_never_gets_a_part_of_its_text(tokens: int) -> None:
    text = "rm -rf /data/work/old"
    script = said("patch", input=text)
    for item in await answered(script, tools=[PATCH], max_output_tokens=tokens):
        if item["type"] == "custom_tool_call":
            assert (item["status"], item["input"]) in (("completed", text), ("incomplete", ""))


async def test_a_search_for_tools_is_the_clients() -> None:
    items = await answered(said("tool_search", query="rain"), tools=[SEARCH])
    assert items == [{"type": "tool_search_call", "status": "completed", "execution": "client",
                      "arguments": {"query": "rain"}}]  # fmt: skip


async def test_what_a_service_would_run_is_left_out() -> None:
    llm = scripted("ok")
    unknown = {"type": "x_next", "name": "x"}
    answer = await post(llm, tools=[HOSTED, WEATHER, unknown, {"type": "tool_search"}], text={"verbosity": "low"})
    assert answer.status_code == 200, answer.text
    named = answer.headers["x-lmkit-warnings"]
    assert {"tools.web_search", "tools.x_next", "tools.tool_search", "text.verbosity"} <= set(
        named.removeprefix("dropped: ").split(", ")
    )
    assert "weather" in prompt_of(llm)
    assert "web_search" not in prompt_of(llm)
    assert [tool["type"] for tool in answer.json()["tools"]] == ["web_search", "function", "x_next", "tool_search"]


async def test_nothing_but_such_tools_is_no_tool_at_all() -> None:
    answer = await post(scripted("ok"), tools=[HOSTED])
    assert answer.status_code == 200, answer.text
    for choice in (
        "required",
        {"type": "web_search"},
        {"type": "allowed_tools", "mode": "required", "tools": [HOSTED]},
    ):
        refused = await post(scripted("ok"), tools=[HOSTED], tool_choice=choice)
        assert refused.status_code == 400
        assert "web_search" in refused.json()["error"]["message"]


async def test_tools_may_come_with_the_input() -> None:
    added = {"type": "additional_tools", "role": "developer", "tools": [SPACE, HOSTED]}
    items = await answered(said("sky__weather", city="Oslo"), input=[added, ASKS])
    assert (items[0]["namespace"], items[0]["name"]) == ("sky", "weather")
    found = {"type": "tool_search_output", "call_id": "a", "execution": "client", "tools": [WEATHER]}
    searched = {"type": "tool_search_call", "call_id": "a", "execution": "client", "arguments": {"query": "rain"}}
    items = await answered(said("weather", city="Oslo"), input=[ASKS, searched, found], tools=[SEARCH])
    assert (items[0]["type"], items[0]["name"]) == ("function_call", "weather")


async def test_one_tool_may_be_demanded_by_its_own_names() -> None:
    llm = scripted(said("sky__patch", input="x"))
    choice = {"type": "custom", "namespace": "sky", "name": "patch"}
    answer = await post(llm, tools=[SPACE], tool_choice=choice)
    assert answer.status_code == 200, answer.text
    assert answer.json()["output"][0]["type"] == "custom_tool_call"
    choices = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "namespace", "name": "sky"}, HOSTED]}
    llm = scripted("ok")
    answer = await post(llm, tools=[SPACE, WEATHER | {"name": "elsewhere"}], tool_choice=choices)
    assert answer.status_code == 200, answer.text
    assert "sky__weather" in prompt_of(llm)
    assert "elsewhere" not in prompt_of(llm)


async def test_a_history_of_all_kinds_of_calls() -> None:
    llm = scripted("ok")
    items = [
        ASKS,
        {"type": "function_call", "call_id": "1", "namespace": "sky", "name": "weather", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "1", "output": "sunny"},
        {"type": "custom_tool_call", "call_id": "2", "namespace": "sky", "name": "patch", "input": "some text"},
        {"type": "custom_tool_call_output", "call_id": "2", "output": [{"type": "input_text", "text": "patched"}]},
        {"type": "function_call", "call_id": "3", "namespace": "gone", "name": "tool", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "3", "output": "3"},
        {"type": "local_shell_call", "id": "ls", "call_id": "4", "action": {"type": "exec", "command": ["ls"]}},
        {"type": "local_shell_call_output", "id": "4", "output": "a.txt"},
        {"type": "shell_call", "call_id": "5", "action": {"commands": ["pwd"]}},
        {"type": "shell_call_output", "call_id": "5", "output": [{"stdout": "/tmp", "stderr": ""}]},
        {"type": "apply_patch_call", "call_id": "6", "operation": {"type": "delete_file", "path": "a"}},
        {"type": "apply_patch_call_output", "call_id": "6", "output": "gone", "status": "completed"},
        {"type": "web_search_call", "id": "ws", "status": "completed", "action": {"type": "search", "query": "q"}},
        {"type": "tool_search_call", "call_id": None, "execution": "server", "arguments": {}},
        {"type": "tool_search_output", "call_id": None, "execution": "server", "tools": []},
    ]
    answer = await post(llm, input=items, tools=[SPACE])
    assert answer.status_code == 200, answer.text
    prompt = prompt_of(llm)
    for text in ("sky__weather", "sky__patch", "some text", "patched", "gone__tool", "local_shell", "a.txt", "pwd",
                 "/tmp", "delete_file"):  # fmt: skip
        assert text in prompt
    assert "input.web_search_call" in answer.headers["x-lmkit-warnings"]


async def test_kept_answers_go_on() -> None:
    dialect = Responses()

    async def ask(script: str, **body: Any) -> httpx.Response:
        transport = httpx.ASGITransport(build_app(scripted(script), None, [dialect]), raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            route, body = body.pop("route", None), {"model": "scripted", **body}
            return await (client.get(route) if route else client.post("/v1/responses", json=body))

    added = {"type": "additional_tools", "role": "developer", "tools": [SPACE]}
    first = (await ask(said("sky__patch", input="x"), input=[added, ASKS])).json()
    call = first["output"][0]
    output = {"type": "custom_tool_call_output", "call_id": call["call_id"], "output": "done"}
    second = await ask(said("sky__weather"), input=[output], previous_response_id=first["id"])
    assert second.status_code == 200, second.text
    assert second.json()["output"][0]["namespace"] == "sky"
    events = list(events_of((await ask("", route=f"/v1/responses/{first['id']}?stream=true")).text))
    assert folded(events) == first["output"]
    listed = (await ask("", route=f"/v1/responses/{second.json()['id']}/input_items")).json()["data"]
    assert [item["type"] for item in listed] == ["custom_tool_call_output", "custom_tool_call", "message",
                                                 "additional_tools"]  # fmt: skip


names = st.text(st.sampled_from("ab_. é"), min_size=1, max_size=80)


@given(st.lists(names), st.lists(st.tuples(names, names), unique=True))
def test_flat_names_are_bounded_and_no_two_are_the_same(plain: list[str], spaced: list[tuple[str, str]]) -> None:
    offers = Offers()
    for name in plain:
        assert offers.add(Offer(name)) == name
    flat = [offers.add(Offer(name, space)) for space, name in spaced]
    assert len({*flat, *plain}) == len(flat) + len(set(plain))
    for name, (space, tool) in zip(flat, spaced, strict=True):
        assert len(name) <= MAX_NAME
        assert TOOL_NAME.fullmatch(name)
        assert offers.get(name) == Offer(tool, space)
        assert offers.name_of(space, tool) == name
