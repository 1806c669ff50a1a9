"""The Responses API: what templates see of a conversation, what clients see of an answer, what is kept and refused."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import httpx
import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from lmkit.api import ErrorInfo, RequestError
from lmkit_dialect_responses.conversation import Reader, sealed
from lmkit_dialect_responses.dialect import COUNT, CREATE, Responses
from lmkit_dialect_responses.schema import ResponsesRequest
from lmkit_dialect_responses.store import Kept, NotKept, Store
from lmkit_http.app import build_app
from lmkit_http.dialect import Incoming, Served
from lmkit_http.settings import ServerSettings
from lmkit_http.strict import parse
from lmkit_testing import Asked, DialectConformance
from lmkit_testing.serving import ServedLLM, byte_tokenizer, hashed, listening, scripted
from pydantic import BaseModel

PROMPTS = int(os.environ.get("RESPONSE_PROMPTS", "20"))
SERVED = Served(("scripted",), (), byte_tokenizer(), {}, 4096, 8, 1 << 17)
HELLO: dict[str, Any] = {"model": "scripted", "input": "Hello"}
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = {"type": "function", "name": "get_weather", "description": "the weather", "parameters": PARAMETERS}
SAID = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Zürich"}}\n</tool_call>'
CALL = f"<think>the user\nasks</think>Let me see.{SAID}"
SCRIPTS = {
    "text": "Good day.", "nothing": "", "call": SAID, "all": CALL, "two calls": CALL + SAID,
    "text last": f"{SAID}And so.", "thought last": "So.<think>or not</think>Yes.",
}  # fmt: skip


class TestResponses(DialectConformance):
    plugin = "dialect:responses"
    body = {"input": "Hello", "store": False}
    asked = (Asked("POST /v1/responses", body, body | {"stream": True}),)

    def text(self, answer: bytes, streamed: bool) -> str:
        if streamed:
            events = events_of(answer.decode())
            return "".join(event["delta"] for event in events if event["type"] == "response.output_text.delta")
        return "".join(part["text"] for item in json.loads(answer)["output"] for part in item["content"])


class Client:
    """Asks an application in memory."""

    def __init__(self, llm: ServedLLM, key: str = "", settings: ServerSettings | None = None) -> None:
        dialects = [Responses()]
        transport = httpx.ASGITransport(build_app(llm, settings, dialects), raise_app_exceptions=False)
        headers = {"authorization": f"Bearer {key}"} if key else {}
        self.http = httpx.AsyncClient(transport=transport, base_url="http://localhost", headers=headers)

    async def post(self, body: Any, path: str = "/v1/responses", **options: Any) -> httpx.Response:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        return await self.http.post(path, content=content, **options)

    async def events(self, body: dict[str, Any]) -> list[dict[str, Any]]:
        answer = await self.post(body | {"stream": True})
        assert answer.status_code == 200, answer.text
        return list(events_of(answer.text))


def events_of(text: str) -> Iterator[dict[str, Any]]:
    for block in text.strip().split("\n\n"):
        name, _, data = block.partition("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        yield event


def seen(*items: Any, **more: Any) -> tuple[list[dict[str, Any]], set[str]]:
    """What a template sees of the items, and what was dropped."""
    request = parse(ResponsesRequest, json.dumps({"input": items, **more}).encode())
    reader = Reader(request.dropped)
    return reader.messages(request.instructions, [(f"input.{i}", x) for i, x in enumerate(request.items())]), (
        reader.dropped
    )


def prompt_of(llm: ServedLLM, number: int) -> str:
    return llm.text.decode_all(llm.client.requests[number].token_ids)


def alike(body: dict[str, Any]) -> dict[str, Any]:
    """An answer without what differs between two with the same items."""
    key = body["id"].removeprefix("resp_")
    shown = json.loads(json.dumps(body).replace(key, "ID"))
    for item in shown["output"]:
        item.pop("call_id", None)
    return shown | {"created_at": 0, "completed_at": 0}


# ---------------------------------------------------------------------------------------------- conversations


def test_a_conversation_with_calls() -> None:
    found, dropped = seen(
        {"role": "developer", "content": "Be kind."},
        {"role": "user", "content": [{"type": "input_text", "text": "Weather?", "cache_control": {"a": 1}}]},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"type": "message", "id": "m", "role": "assistant", "status": "completed", "phase": "commentary",
         "content": [{"type": "output_text", "text": "I look.", "annotations": [], "logprobs": []}]},
        {"type": "function_call", "id": "f", "call_id": "a", "name": "get_weather", "arguments": "{}", "status": "x"},
        {"type": "function_call", "call_id": "b", "name": "get_time", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "a", "output": "sunny"},
        {"type": "function_call_output", "call_id": "b", "output": [{"type": "input_text", "text": "9"}]},
        {"type": "reasoning", "id": "rs_2", "summary": [], "encrypted_content": sealed("so é")},
        {"type": "reasoning", "id": "rs_3", "summary": [], "encrypted_content": "of another server"},
        {"type": "message", "role": "assistant", "content": "Sunny."},
        {"role": "user", "content": "Thanks."},
        instructions="Be brief.",
    )  # fmt: skip
    both = [{"type": "text", "text": "Be brief."}, {"type": "text", "text": "Be kind."}]
    calls = [
        {"id": id, "type": "function", "function": {"name": name, "arguments": "{}"}}
        for id, name in (("a", "get_weather"), ("b", "get_time"))
    ]
    assert found == [
        {"role": "system", "content": both},
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "reasoning_content": "hm", "content": "I look.", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "a", "name": "get_weather", "content": "sunny"},
        {"role": "tool", "tool_call_id": "b", "name": "get_time", "content": "9"},
        {"role": "assistant", "reasoning_content": "so é", "content": "Sunny."},
        {"role": "user", "content": "Thanks."},
    ]
    assert dropped == {"input.content.cache_control", "input.encrypted_content"}


def test_two_answers_in_a_row_stay_two() -> None:
    said = [{"role": "assistant", "content": text} for text in "ab"]
    found, _ = seen({"role": "user", "content": "x"}, *said, {"type": "reasoning", "summary": [
        {"type": "summary_text", "text": "hm"}]})  # fmt: skip
    assert found[1:] == [*said, {"role": "assistant", "reasoning_content": "hm", "content": ""}]


ASKS = {"role": "user", "content": "x"}
ASKED = {"type": "function_call", "call_id": "a", "name": "f", "arguments": "{}"}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"input": []}, "input is required"),
        ({"input": [{"role": "user"}]}, "input.0.content is required"),
        ({"input": [{"type": "message", "content": "x"}]}, "input.0.role is required"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "no images"),
        ({"input": [{"role": "user", "content": [{"type": "input_file", "file_id": "x"}]}]}, "no files"),
        ({"input": [{"role": "user", "content": [{"type": "input_text"}]}]}, "input.0.content.0.text is required"),
        ({"input": [ASKS, ASKED]}, "has no result"),
        ({"input": [ASKS, {"type": "function_call_output", "call_id": "a", "output": ""}]}, "no call 'a'"),
        ({"input": [ASKS, {"type": "function_call", "call_id": "a", "name": "f"}]}, "input.1.arguments is required"),
        ({"input": [ASKS, {"type": "function_call_output", "call_id": "a"}]}, "input.1.output is required"),
        ({"input": [ASKS, ASKED, ASKED]}, "two calls"),
        ({"input": [ASKS, {"type": "compaction", "encrypted_content": "x"}]}, "by another server"),
        ({"input": [{"type": "computer_call", "id": "x"}]}, "'computer_call'"),
        ({"input": [ASKS, {"type": "custom_tool_call", "call_id": "a", "name": "f"}]}, "input.1.input is required"),
        ({"input": [ASKS, {"type": "custom_tool_call_output", "call_id": "a", "output": ""}]}, "no call 'a'"),
        ({"input": [ASKS, ASKED, {"type": "function_call_output", "call_id": "a", "output": [{"a": 1}]}]},
         "input.2.output needs a text"),
        ({"input": [ASKS, {"type": "additional_tools", "tools": [{"name": "f"}]}]}, "input.1.tools.0.type"),
        ({"input": [{"type": "item_reference", "id": "rs_x_0"}]}, "'rs_x_0'"),
        ({"input": [{"role": "tool", "content": "x"}]}, "input.0.role"),
        *(({"tools": [{"type": kind}, WEATHER], "tool_choice": "required"}, f"{kind!r}. Declare a tool of type")
          for kind in ("web_search", "web_search_preview", "file_search", "code_interpreter", "computer_use_preview",
            "image_generation", "local_shell", "shell", "apply_patch")),
        ({"tools": [{"type": "mcp", "server_url": "x"}]}, "server_label is required"),
        ({"tools": [{"type": "custom"}]}, "tools.0.name is required"),
        ({"tools": [{"type": "namespace", "tools": [WEATHER]}]}, "tools.0.name is required"),
        ({"tools": [{"type": "namespace", "name": "a", "tools": [{"type": "function"}]}]}, "tools.0.tools.0.name"),
        ({"tools": [{"type": "web_search"}], "tool_choice": "required"}, "'web_search'"),
        ({"tools": [{"type": "function"}]}, "tools.0.name is required"),
        ({"tool_choice": "required"}, "tool_choice needs tools"),
        ({"tool_choice": {"type": "function", "name": "g"}, "tools": [WEATHER]}, "no tool 'g'"),
        ({"tool_choice": {"type": "function"}, "tools": [WEATHER]}, "tool_choice.name is required"),
        ({"tool_choice": {"type": "web_search"}, "tools": [WEATHER]}, "tools of type 'web_search'"),
        ({"tool_choice": {"type": "allowed_tools", "tools": [{"type": "function", "name": "g"}]}}, "no tool 'g'"),
        ({"background": True, "stream": True}, "ask for it by its id"),
        ({"background": True, "store": False}, "kept until it is read"),
        ({"conversation": "conv_1"}, "Send previous_response_id"),
        ({"prompt": {"id": "x"}}, "instructions"),
        ({"previous_response_id": "resp_1"}, "no answer 'resp_1' is kept"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"temperature": 3}, "temperature"),
        ({"max_tokens": 3}, "Send max_output_tokens"),
        ({"include": ["everything"]}, "include"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema is required"),
        ({"truncation": "middle"}, "truncation"),
        ({"model": "other"}, "no model 'other'"),
    ],
    ids=str,
)  # fmt: skip
async def test_what_is_refused(change: dict[str, Any], words: str) -> None:
    answer = await Client(scripted("x")).post(HELLO | change)
    error = answer.json()["error"]
    assert answer.status_code == (404 if "model" in change else 400), error
    assert words in error["message"]
    assert set(error) == {"message", "type", "param", "code"}


async def test_what_changes_nothing_is_named() -> None:
    labels = {"user": "u", "service_tier": "flex", "prompt_cache_key": "k"}
    nothing = {"background": False, "conversation": None, "moderation": None, "safety_identifier": None}
    body = HELLO | labels | nothing | {"reasoning": {"summary": "auto"}, "metadata": {"a": "b"}}
    answer = await Client(scripted("x")).post(body | {"include": ["file_search_call.results"]})
    assert answer.status_code == 200, answer.text
    names = "prompt_cache_key, reasoning.summary, service_tier, user"
    assert answer.headers["x-lmkit-warnings"] == f"dropped: {names}"
    assert answer.json()["metadata"] == {"a": "b"}


async def test_max_output_tokens_is_a_ceiling() -> None:
    llm = scripted("ok")
    answer = await Client(llm).post(HELLO | {"max_output_tokens": 1 << 20})
    assert answer.status_code == 200, answer.text
    request = llm.client.requests[0]
    assert request.params.max_tokens == llm.facts.max_length - len(request.token_ids)


async def test_a_long_conversation_is_refused_or_cut() -> None:
    llm = scripted("ok", max_length=100)
    client, body = Client(llm), {"input": "x" * 90 + "end", "max_output_tokens": 20}
    assert (await client.post(body)).status_code == 400
    answer = await client.post(body | {"truncation": "auto"})
    assert (answer.json()["truncation"], answer.json()["usage"]["input_tokens"]) == ("auto", 80)
    assert "end" in prompt_of(llm, 0)


async def test_only_allowed_tools_are_declared() -> None:
    llm = scripted("ok")
    other = WEATHER | {"name": "get_time"}
    choice = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "get_time"}]}
    answer = await Client(llm).post(HELLO | {"tools": [WEATHER, other], "tool_choice": choice})
    assert answer.status_code == 200, answer.text
    assert "get_time" in prompt_of(llm, 0)
    assert "get_weather" not in prompt_of(llm, 0)
    assert [tool["name"] for tool in answer.json()["tools"]] == ["get_weather", "get_time"]


async def test_a_conversation_is_compacted_and_goes_on() -> None:
    llm = scripted("<think>hm</think>They greeted.", "ok")
    client = Client(llm)
    items = [{"role": "developer", "content": "Be kind."}, ASKS, ASKED,
             {"type": "function_call_output", "call_id": "a", "output": "sunny"}]  # fmt: skip
    answer = await client.post({"model": "scripted", "input": items, "tools": [WEATHER]}, "/v1/responses/compact")
    assert answer.status_code == 200, answer.text
    body = answer.json()
    assert body["object"] == "response.compaction"
    assert [(item["type"], item.get("role")) for item in body["output"]] == [
        ("message", "developer"), ("message", "user"), ("compaction", None)]  # fmt: skip
    assert body["usage"]["output_tokens"] > 0
    assert "sunny" in prompt_of(llm, 0)
    answer = await client.post({"model": "scripted", "input": [*body["output"], {"role": "user", "content": "And?"}]})
    assert answer.status_code == 200, answer.text
    assert "They greeted." in prompt_of(llm, 1)
    assert "sunny" not in prompt_of(llm, 1)


RESPONSE_KEYS = {
    "id", "object", "created_at", "completed_at", "status", "incomplete_details", "model", "previous_response_id",
    "instructions", "output", "error", "tools", "tool_choice", "truncation", "parallel_tool_calls", "text", "top_p",
    "presence_penalty", "frequency_penalty", "top_logprobs", "temperature", "reasoning", "usage",
    "max_output_tokens", "max_tool_calls", "store", "background", "service_tier", "metadata", "safety_identifier",
    "prompt_cache_key",
}  # fmt: skip


async def test_a_response_has_every_key_at_every_time() -> None:
    labels = {"safety_identifier": "s", "prompt_cache_key": "k", "user": "u"}
    whole = (await Client(scripted("ok")).post(HELLO | labels)).json()
    assert set(whole) >= RESPONSE_KEYS
    assert {name: whole[name] for name in labels} == labels
    client = Client(scripted("ok"))
    first, second, *_, last = await client.events(HELLO)
    for event in (first, second):
        assert set(event["response"]) >= RESPONSE_KEYS
        assert event["response"]["usage"] is None
    assert last["response"]["usage"]["total_tokens"] > 0
    told = await client.http.get(f"/v1/responses/{last['response']['id']}", params={"stream": "true"})
    begun = next(events_of(told.text))
    assert (begun["type"], begun["response"]["usage"]) == ("response.created", None)
    queued = (await Client(scripted("ok")).post(HELLO | {"background": True})).json()
    assert (set(queued) >= RESPONSE_KEYS, queued["usage"]) == (True, None)


# ------------------------------------------------------------------------------------------------------ streams


def folded(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The items that events tell of, each taken together from its beginning and its pieces."""
    items: list[dict[str, Any]] = []
    ended = 0
    for event in events:
        kind, at = event["type"], event.get("output_index")
        if kind == "response.output_item.added":
            assert (at, ended) == (len(items), len(items)), "the one before has ended"
            items.append(event["item"])
        elif kind == "response.content_part.added":
            items[at]["content"].append(event["part"])
        elif kind == "response.function_call_arguments.delta":
            items[at]["arguments"] += event["delta"]
        elif kind.endswith(".delta"):
            part = items[at]["content"][event["content_index"]]
            part["text"] += event["delta"]
            part.setdefault("logprobs", []).extend(event.get("logprobs", ()))
        elif kind == "response.function_call_arguments.done":
            assert event["arguments"] == items[at]["arguments"]
        elif kind.endswith("_text.done"):
            assert event["text"] == items[at]["content"][0]["text"]
            assert event.get("logprobs", []) == items[at]["content"][0].get("logprobs", [])
        elif kind == "response.output_item.done":
            ended += 1
            assert event["item"]["id"] == items[at]["id"]
            items[at] = event["item"] | {"told": items[at]}
    assert ended == len(items)
    return items


@pytest.mark.parametrize(
    "more", [{}, {"max_output_tokens": 6}, {"max_output_tokens": 45}, {"top_logprobs": 2}], ids=str
)
@pytest.mark.parametrize("per_event", [1, 3])
@pytest.mark.parametrize("script", SCRIPTS.values(), ids=SCRIPTS)
async def test_streamed_is_whole(script: str, per_event: int, more: dict[str, Any]) -> None:
    client, body = Client(scripted(script, per_event=per_event)), HELLO | {"tools": [WEATHER]} | more
    whole = (await client.post(body)).json()
    events = await client.events(body)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    first, second, *between, last = events
    assert (first["type"], second["type"]) == ("response.created", "response.in_progress")
    assert first["response"] == second["response"]
    assert (first["response"]["status"], first["response"]["output"]) == ("in_progress", [])
    assert last["type"] == f"response.{whole['status']}"
    assert alike(last["response"]) == alike(whole)
    items = folded(between)
    for item in items:
        told = item.pop("told")
        for a, b in zip(told.get("content", ()), item.get("content", ()), strict=True):
            assert a["text"] == b["text"]
            assert [e["token"] for e in a.get("logprobs", ())] == [e["token"] for e in b.get("logprobs", ())]
        assert told.get("arguments") == item.get("arguments")
    assert items == last["response"]["output"]
    if "top_logprobs" not in more:
        assert not any(part.get("logprobs") for item in items for part in item.get("content", ()))
    elif script == SCRIPTS["text"]:
        assert len(items[0]["content"][0]["logprobs"]) == len(script)
        assert len(items[0]["content"][0]["logprobs"][0]["top_logprobs"]) == 2


async def test_parts_keep_their_order() -> None:
    order = [item["type"] for item in (await Client(scripted(SCRIPTS["text last"])).post(
        HELLO | {"tools": [WEATHER]})).json()["output"]]  # fmt: skip
    assert order == ["function_call", "message"]
    thought = (await Client(scripted(CALL)).post(HELLO | {"tools": [WEATHER], "max_output_tokens": 12})).json()
    assert (thought["status"], thought["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert [(item["type"], item["status"]) for item in thought["output"]] == [("reasoning", "incomplete")]


async def test_the_client_hears_of_an_engine_that_fails() -> None:
    llm = scripted("a long answer", delay=0.05)
    async with listening(llm) as url, connect(url) as client:
        stream = await client.responses.create(model="scripted", input="x", stream=True)
        events = []

        async def read() -> None:
            async for event in stream:
                events.append(event)
                if event.type == "response.output_text.delta":
                    llm.client.fail_next(ErrorInfo("step-failed", "a step failed", status=503))

        with pytest.raises(openai.APIError, match="step failed"):
            await read()
    assert events[-1].type == "response.failed"
    assert events[-1].response.error.message == "a step failed"
    assert events[-1].response.status == "failed"


# --------------------------------------------------------------------------------------------------------- kept


class StoreMachine(RuleBasedStateMachine):
    """A small store against a list of all that was kept, in order of use."""

    def __init__(self) -> None:
        super().__init__()
        self.store, self.used, self.number = Store(3, 100), {}, 0  # type: ignore[var-annotated]

    @rule(tenant=st.sampled_from("ab"), size=st.integers(0, 120))
    def put(self, tenant: str, size: int) -> None:
        self.number += 1
        kept = Kept(f"r{self.number}", None, b"x" * (size // 2), b"y" * (size - size // 2))
        self.store.put(tenant, kept)
        those = [*self.used.get(tenant, []), kept]
        while len(those) > 3 or sum(one.size for one in those) > 100:
            those.pop(0)
        self.used[tenant] = those

    @rule(tenant=st.sampled_from("ab"), number=st.integers(1, 9), delete=st.booleans())
    def use(self, tenant: str, number: int, delete: bool) -> None:
        those = self.used.get(tenant, [])
        kept = next((one for one in those if one.id == f"r{number}"), None)
        do = self.store.delete if delete else self.store.get
        if kept is None:
            with pytest.raises(NotKept):
                do(tenant, f"r{number}")
            return
        found = do(tenant, kept.id)
        assert delete or found == kept
        those.remove(kept)
        if not delete:
            those.append(kept)

    @rule(tenant=st.sampled_from("ab"), number=st.integers(1, 9), size=st.integers(0, 120))
    def replace(self, tenant: str, number: int, size: int) -> None:
        """An answer goes on where it is kept still; it does not come back."""
        self.store.replace(tenant, f"r{number}", lambda _: b"z" * size)
        those = self.used.get(tenant, [])
        kept = next((one for one in those if one.id == f"r{number}"), None)
        if kept is None:
            return
        those.remove(kept)
        those.append(Kept(kept.id, kept.previous, kept.input, b"z" * size))
        while sum(one.size for one in those) > 100:
            those.pop(0)

    @invariant()
    def right(self) -> None:
        self.store.check()
        for tenant, those in self.used.items():
            assert list(self.store._kept.get(tenant, {}).values()) == those


TestStore = StoreMachine.TestCase
TestStore.settings = settings(max_examples=50, deadline=None)


async def test_an_answer_is_found_continued_and_deleted() -> None:
    llm = scripted("one", "two", "three")
    client = Client(llm)
    first = (await client.post(HELLO | {"instructions": "Be brief."})).json()
    body = {"input": [{"role": "user", "content": "And?"}], "previous_response_id": first["id"]}
    second = (await client.post(body | {"instructions": "Be kind."})).json()
    assert prompt_of(llm, 1) == "<|system|>Be kind.<|end|><|user|>Hello<|end|><|assistant|>one<|end|><|user|>And?" \
        "<|end|><|assistant|>"  # fmt: skip
    path = f"/v1/responses/{second['id']}"
    assert (await client.http.get(path)).json() == second
    items = (await client.http.get(f"{path}/input_items?order=asc")).json()
    texts = [item["content"][0]["text"] for item in items["data"]]
    assert (texts, items["has_more"]) == (["Hello", "one", "And?"], False)
    latest = (await client.http.get(f"{path}/input_items?limit=1")).json()
    assert (latest["data"], latest["has_more"]) == (items["data"][-1:], True)
    rest = (await client.http.get(f"{path}/input_items?after={latest['last_id']}")).json()
    assert rest["data"] == items["data"][-2::-1]
    for query in ("limit=0", "limit=x", "order=up", "after=x"):
        assert (await client.http.get(f"{path}/input_items?{query}")).status_code == 400
    assert (await client.http.get(f"{path}?stream=true&starting_after=x")).status_code == 400
    cancelled = await client.http.post(f"{path}/cancel")
    assert (cancelled.status_code, "background" in cancelled.text) == (400, True)
    assert (await client.http.delete(f"/v1/responses/{first['id']}")).json()["deleted"]
    assert (await client.http.delete(f"/v1/responses/{first['id']}")).status_code == 404
    assert (await client.http.get(f"{path}/input_items")).status_code == 404
    gone = await client.post({"input": "x", "previous_response_id": second["id"]})
    assert gone.json()["error"]["code"] == "previous_response_not_found"
    assert (await client.http.get(path)).json() == second


async def test_what_is_not_to_be_kept_is_not() -> None:
    client = Client(scripted("one"))
    for stream in (False, True):
        answer = await client.post(HELLO | {"store": False, "stream": stream})
        id = answer.headers["x-request-id"]
        assert (await client.http.get(f"/v1/responses/{id}")).status_code == 404
    assert (await client.post({"input": "x", "previous_response_id": id})).status_code == 400


async def test_streamed_answers_are_kept() -> None:
    client = Client(scripted("one"))
    *_, last = await client.events(HELLO)
    assert (await client.http.get(f"/v1/responses/{last['response']['id']}")).json() == last["response"]


async def test_tenants_do_not_see_each_other() -> None:
    llm, keys = scripted("one"), ServerSettings(api_keys=("a", "b"))
    client = Client(llm, "a", keys)
    kept = (await client.post(HELLO)).json()
    assert (await client.http.get(f"/v1/responses/{kept['id']}")).status_code == 200
    other = {"authorization": "Bearer b"}
    for method, path in (("GET", ""), ("DELETE", ""), ("GET", "/input_items"), ("POST", "/cancel")):
        answer = await client.http.request(method, f"/v1/responses/{kept['id']}{path}", headers=other)
        assert answer.status_code == 404
    body = {"input": "x", "previous_response_id": kept["id"]}
    assert (await client.post(body, headers=other)).status_code == 400
    assert (await client.post(body)).status_code == 200


async def test_items_are_referred_to() -> None:
    """As the AI SDK does with kept answers."""
    llm = scripted(CALL, "Sunny.")
    client = Client(llm)
    first = (await client.post(HELLO | {"tools": [WEATHER]})).json()
    items = [{"type": "item_reference", "id": item["id"]} for item in first["output"]]
    result = {"type": "function_call_output", "call_id": first["output"][-1]["call_id"], "output": "sun"}
    answer = await client.post({"input": [{"role": "user", "content": "Hello"}, *items, result], "tools": [WEATHER]})
    assert answer.status_code == 200, answer.text
    assert "<|tool|>sun" in prompt_of(llm, 1)
    assert "Let me see." in prompt_of(llm, 1)
    other = await client.post({"input": [{"id": first["output"][0]["id"] + "0"}]})
    assert (other.status_code, other.json()["error"]["param"]) == (400, "input.0.id")


# ------------------------------------------------------------------------------------------- the official client


def connect(url: str, key: str = "none") -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0)


async def test_the_client_creates_streams_and_counts() -> None:
    async with listening(scripted(CALL, CALL, "It is sunny.")) as url, connect(url) as client:
        asked: dict[str, Any] = HELLO | {"tools": [WEATHER], "include": ["reasoning.encrypted_content"], "store": False}
        whole = await client.responses.create(**asked)
        async with client.responses.stream(**asked) as stream:
            kinds = [event.type async for event in stream]
            final = await stream.get_final_response()
        for answer in (whole, final):
            thought, said, call = answer.output
            assert (thought.type, thought.content[0].text) == ("reasoning", "the user\nasks")
            assert (said.type, answer.output_text) == ("message", "Let me see.")
            assert (call.type, call.name, json.loads(call.arguments)) == (
                "function_call", "get_weather", {"city": "Zürich"})  # fmt: skip
        assert kinds.count("response.output_item.added") == kinds.count("response.output_item.done") == 3
        assert final.usage == whole.usage
        result = {"type": "function_call_output", "call_id": whole.output[2].call_id, "output": "sun"}
        after = await client.responses.create(**asked | {"input": [ASKS, *whole.output, result]})
        assert after.output_text == "It is sunny."
        counted = await client.responses.input_tokens.count(model="scripted", input="Hello", tools=[WEATHER])
        assert counted.input_tokens == whole.usage.input_tokens > 0


class City(BaseModel):
    name: str
    people: int


async def test_the_client_parses() -> None:
    """The engine of the script knows no grammar: that a schema is kept is proven with a model (tests/e2e)."""
    said = '{"name": "Zürich", "people": 4}'
    llm = scripted(said, "<think>hm</think>" + said)
    async with listening(llm) as url, connect(url) as client:
        for _ in range(2):
            parsed = await client.responses.parse(model="scripted", input="Which city?", text_format=City)
            assert parsed.output_parsed == City(name="Zürich", people=4)
    grammar = llm.client.requests[0].params.grammar
    assert json.loads(grammar.source)["properties"]["people"] == {"title": "People", "type": "integer"}


async def test_the_client_keeps_a_conversation() -> None:
    async with listening(scripted("one", "two")) as url, connect(url) as client:
        first = await client.responses.create(**HELLO)
        second = await client.responses.create(input="And?", model="scripted", previous_response_id=first.id)
        assert (await client.responses.retrieve(second.id)).output_text == "two"
        listed = [item async for item in client.responses.input_items.list(second.id, order="asc", limit=1)]
        assert [item.type for item in listed] == ["message"] * 3
        await client.responses.delete(second.id)
        with pytest.raises(openai.NotFoundError):
            await client.responses.retrieve(second.id)
        with pytest.raises(openai.BadRequestError, match="background"):
            await client.responses.cancel(first.id)


async def test_the_client_knows_errors() -> None:
    async with listening(scripted("x"), ServerSettings(api_keys=("secret",))) as url:
        async with connect(url, "wrong") as client:
            with pytest.raises(openai.AuthenticationError):
                await client.responses.create(**HELLO)
        async with connect(url, "secret") as client:
            with pytest.raises(openai.BadRequestError) as found:
                await client.responses.create(**HELLO | {"temperature": 9.0})
            assert (found.value.param, found.value.code) == ("temperature", "invalid-param")
            with pytest.raises(openai.BadRequestError, match="streamed"):
                await client.responses.create(**HELLO, background=True, stream=True)


async def test_streamed_is_whole_on_many_prompts() -> None:
    """A model that says something else to each prompt, and nothing in particular; RESPONSE_PROMPTS prompts."""
    async with hashed() as llm:
        client = Client(llm)
        for seed in range(PROMPTS):
            body = {"max_output_tokens": 5 + seed % 40, "temperature": seed % 2, "seed": seed, "input": f"No. {seed}"}
            whole = (await client.post(body)).json()
            *_, last = events = await client.events(body)
            a, b = alike(last["response"]), alike(whole)
            for usage in (a.pop("usage"), b.pop("usage")):
                usage.pop("input_tokens_details")  # the second one finds the prompt in the cache
            assert a == b
            assert [item | {"told": 0} for item in last["response"]["output"]] == [
                item | {"told": 0} for item in folded(events)]  # fmt: skip


# ------------------------------------------------------------------------------------- what other clients send


async def test_codex() -> None:
    """The request of a coding agent: instructions, messages of the developer, functions, nothing kept."""
    llm = scripted("<think>hm</think>Done.")
    schema = {"type": "object", "properties": {"command": {"type": "array", "items": {"type": "string"}}},
              "required": ["command"], "additionalProperties": False}  # fmt: skip
    body = {
        "model": "scripted", "instructions": "You are a coding agent.", "stream": True, "store": False,
        "input": [
            {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "<permissions>"}]},
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "<environment>"}]},
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "List the files."}]},
            {"type": "reasoning", "summary": [], "content": None, "encrypted_content": sealed("ls will do")},
            {"type": "function_call", "name": "shell", "arguments": '{"command":["ls"]}', "call_id": "call_1"},
            {"type": "function_call_output", "call_id": "call_1", "output": '{"output":"a.py"}'},
        ],
        "tools": [{"type": "function", "name": "shell", "description": "Runs a command.", "strict": False,
                   "parameters": schema}],
        "tool_choice": "auto", "parallel_tool_calls": False, "reasoning": None,
        "include": ["reasoning.encrypted_content"], "prompt_cache_key": "0199",
    }  # fmt: skip
    answer = await Client(llm).post(body, headers={"originator": "codex_cli_rs", "session_id": "0199"})
    assert answer.status_code == 200, answer.text
    *_, last = events_of(answer.text)
    assert last["response"]["output"][0]["encrypted_content"] == sealed("hm")
    assert prompt_of(llm, 0).startswith("<|system|>You are a coding agent.\n<permissions><|end|><|user|>")


async def test_openai_agents_and_the_ai_sdk() -> None:
    llm = scripted("Done.")
    client = Client(llm)
    agents = {
        "model": "scripted", "instructions": "Help.", "include": [], "tools": [WEATHER | {"strict": True}],
        "input": [
            {"content": "Hi", "role": "user"},
            {"id": "fc_1", "call_id": "c", "name": "get_weather", "arguments": "{}", "type": "function_call",
             "status": "completed"},
            {"call_id": "c", "output": "sun", "type": "function_call_output"},
        ],
        "stream": False, "store": None, "metadata": None, "prompt": None, "conversation": None,
    }  # fmt: skip
    strict = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"],
              "additionalProperties": False, "$schema": "http://json-schema.org/draft-07/schema#"}  # fmt: skip
    ai = {
        "model": "scripted", "stream": True, "include": ["reasoning.encrypted_content"], "tool_choice": "auto",
        "input": [
            {"role": "system", "content": "Help."},
            {"role": "user", "content": [{"type": "input_text", "text": "Hi"}]},
            {"role": "assistant", "content": [{"type": "output_text", "text": "Hello."}], "id": "msg_1"},
            {"role": "user", "content": [{"type": "input_text", "text": "Weather?"}]},
        ],
        "tools": [{"type": "function", "name": "weather", "description": "x", "parameters": strict, "strict": False}],
    }  # fmt: skip
    for body in (agents, ai):
        answer = await client.post(body)
        assert answer.status_code == 200, answer.text
        assert "x-lmkit-warnings" not in answer.headers


# ------------------------------------------------------------------------------------------------ hostile bodies

NAMES = ["type", "text", "role", "content", "input", "id", "name", "call_id", "arguments", "output", "summary", "x"]
json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(1 << 70), 1 << 70) | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(NAMES), inner, max_size=5),
    max_leaves=12,
)  # fmt: skip
FIELDS = [name for name in ResponsesRequest.model_fields if name != "model"]
bodies = st.dictionaries(st.sampled_from(FIELDS), json_values, max_size=5)
texts = st.text(max_size=5)
KINDS = ["message", "reasoning", "function_call", "function_call_output", "item_reference", "input_text", "x"]
parts = st.lists(st.fixed_dictionaries({"type": st.sampled_from(["input_text", "output_text", "refusal", "x"])},
                                       optional={"text": texts, "refusal": texts}), max_size=3)  # fmt: skip
items = st.lists(st.fixed_dictionaries({}, optional={
    "type": st.sampled_from(KINDS), "role": st.sampled_from(["user", "assistant", "system", "developer"]),
    "content": texts | parts, "call_id": st.sampled_from("ab"), "name": texts, "arguments": texts,
    "output": texts | parts, "summary": parts, "encrypted_content": texts | texts.map(sealed), "id": texts}),
    max_size=5)  # fmt: skip


@settings(max_examples=200, deadline=None)
@given(body=bodies, said=st.none() | texts | items, route=st.sampled_from([CREATE, COUNT]))
def test_any_body_is_read_or_refused(body: dict[str, Any], said: Any, route: str) -> None:
    """By a RequestError; nothing else is raised, whatever clients send."""
    given_body = body if said is None else {**body, "input": said}
    dialect = Responses()
    with suppress(RequestError):
        dialect.parse(Incoming(route, json.dumps(given_body).encode()), SERVED)


@pytest.mark.parametrize("body", [b"", b"[]", b"{", b"null", b'{"input": 1e999}', b'"' + b"[" * 9999])
async def test_what_is_no_request(body: bytes) -> None:
    answer = await Client(scripted("x")).post(body)
    assert answer.status_code == 400
    assert answer.json()["error"]["message"]


FUNCTION = {"type": "function", "name": "f"}
ALLOWED = {"type": "allowed_tools", "tools": [FUNCTION]}
tools = st.lists(st.fixed_dictionaries({"type": st.sampled_from(["function", "mcp"])}, optional={
    "name": texts | st.just("f"), "strict": st.booleans(),
    "parameters": st.dictionaries(texts, json_values, max_size=3) | st.just(PARAMETERS)}), max_size=2)  # fmt: skip
formats = st.fixed_dictionaries({"type": st.sampled_from(["text", "json_object", "json_schema"])},
                                optional={"schema": st.dictionaries(texts, json_values, max_size=3)})  # fmt: skip
options = st.fixed_dictionaries({}, optional={
    "tools": tools, "text": st.fixed_dictionaries({"format": formats}), "instructions": texts, "stream": st.booleans(),
    "tool_choice": st.sampled_from(["auto", "none", "required", FUNCTION, ALLOWED]),
    "max_output_tokens": st.integers(1, 50), "truncation": st.sampled_from(["auto", "disabled"]),
    "include": st.lists(st.sampled_from(["reasoning.encrypted_content", "message.output_text.logprobs"])),
    "top_logprobs": st.integers(0, 5), "chat_template_kwargs": st.dictionaries(texts, json_values, max_size=2),
    "cache_salt": texts, "reasoning": st.fixed_dictionaries({"effort": texts})})  # fmt: skip


@settings(max_examples=50, deadline=None)
@given(said=texts | items, more=options, script=st.sampled_from([*SCRIPTS.values()]))
async def test_any_conversation_is_answered_or_refused(said: Any, more: dict[str, Any], script: str) -> None:
    """By the server, too: with 200 or a typed 4xx, and again over what is kept."""
    client = Client(scripted(script))
    body: dict[str, Any] = {"input": said}
    for extra in ({}, more):
        answer = await client.post(body | extra)
        assert answer.status_code == 200 or (400 <= answer.status_code < 500 and answer.json()["error"]["message"])
        if not extra and answer.status_code == 200:
            id = answer.json()["id"]
            assert (await client.http.get(f"/v1/responses/{id}/input_items")).status_code == 200
            body = {"input": "y", "previous_response_id": id}
