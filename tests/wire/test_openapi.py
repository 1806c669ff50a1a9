"""Every answer and every streamed chunk of the OpenAI routes fits the published OpenAPI description."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from lmkit_dialect_batches.dialect import Batches
from lmkit_dialect_openai.extensions import RESPONSE
from lmkit_http.app import build_app
from lmkit_run_batch.lines import Fault
from lmkit_testing.serving import ServedLLM, scripted

_spec = importlib.util.spec_from_file_location("wire_openapi", Path(__file__).with_name("openapi.py"))
assert _spec is not None
assert _spec.loader is not None
openapi = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(openapi)

EXTENSIONS = frozenset().union(*RESPONSE.values())
HELLO = {"messages": [{"role": "user", "content": "Hello"}]}
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
CALL = '<think>hm</think>Ok.<tool_call>{"name": "f", "arguments": {"a": "é"}}</tool_call>'
CHATS: dict[str, dict[str, Any]] = {
    "plain": {},
    "tools": {"tools": TOOLS},
    "logprobs": {"logprobs": True, "top_logprobs": 3},
    "n": {"n": 3, "seed": 1},
    "stop": {"stop": ["O"]},
    "length": {"max_completion_tokens": 2},
    "usage": {"stream_options": {"include_usage": True}},
    "everything": {"tools": TOOLS, "n": 2, "logprobs": True, "top_logprobs": 2, "return_token_ids": True},
}
FUNCTION = {"type": "function", "name": "f", "parameters": {"type": "object"}, "strict": False}
RESPONSES: dict[str, dict[str, Any]] = {
    "plain": {},
    "tools": {"tools": [FUNCTION], "tool_choice": "auto", "metadata": {"a": "b"}},
    "logprobs": {"top_logprobs": 2},
    "length": {"max_output_tokens": 20},
    "schema": {"text": {"format": {"type": "json_schema", "name": "x", "schema": {"type": "object"}}}},
    "sealed": {"include": ["reasoning.encrypted_content"], "instructions": "Be brief.", "store": False},
}
EVENTS = {
    "response.created": "ResponseCreatedEvent", "response.in_progress": "ResponseInProgressEvent",
    "response.completed": "ResponseCompletedEvent", "response.incomplete": "ResponseIncompleteEvent",
    "response.output_item.added": "ResponseOutputItemAddedEvent",
    "response.output_item.done": "ResponseOutputItemDoneEvent",
    "response.content_part.added": "ResponseContentPartAddedEvent",
    "response.content_part.done": "ResponseContentPartDoneEvent",
    "response.output_text.delta": "ResponseTextDeltaEvent", "response.output_text.done": "ResponseTextDoneEvent",
    "response.reasoning_text.delta": "ResponseReasoningTextDeltaEvent",
    "response.reasoning_text.done": "ResponseReasoningTextDoneEvent",
    "response.function_call_arguments.delta": "ResponseFunctionCallArgumentsDeltaEvent",
    "response.function_call_arguments.done": "ResponseFunctionCallArgumentsDoneEvent",
}  # fmt: skip
# Open Responses has the penalties in each answer
RESPONSE_EXTRA = frozenset({"store", "presence_penalty", "frequency_penalty"})
COMPLETIONS: dict[str, dict[str, Any]] = {
    "plain": {"prompt": "x"},
    "ids": {"prompt": [[1, 2], [3]], "n": 2},
    "logprobs": {"prompt": "x", "logprobs": 2},
    "echo": {"prompt": "é x", "echo": True, "logprobs": 1},
    "score": {"prompt": "é x", "echo": True, "logprobs": 1, "max_tokens": 0},
    "usage": {"prompt": "x", "stream_options": {"include_usage": True}},
    "everything": {"prompt": "x", "return_token_ids": True, "stop": ["m"]},
}


async def ask(llm: ServedLLM, path: str, body: dict[str, Any] | None = None) -> httpx.Response:
    transport = httpx.ASGITransport(build_app(llm))
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        return await (client.get(path) if body is None else client.post(path, json=body))


async def chunks(response: httpx.Response) -> AsyncIterator[Any]:
    for line in response.text.split("\n\n"):
        if line and line != "data: [DONE]":
            yield json.loads(line.removeprefix("data: "))


def without(body: dict[str, Any], name: str) -> dict[str, Any]:
    return {k: v for k, v in body.items() if k != name}


@pytest.mark.parametrize("extra", CHATS.values(), ids=CHATS.keys())
async def test_chat(extra: dict[str, Any]) -> None:
    response = await ask(scripted(CALL), "/v1/chat/completions", HELLO | without(extra, "stream_options"))
    assert response.status_code == 200, response.text
    openapi.check("CreateChatCompletionResponse", response.json(), EXTENSIONS)


@pytest.mark.parametrize("per_event", [1, 4])
@pytest.mark.parametrize("extra", CHATS.values(), ids=CHATS.keys())
async def test_chat_chunks(extra: dict[str, Any], per_event: int) -> None:
    body = HELLO | extra | {"stream": True}
    response = await ask(scripted(CALL, per_event=per_event), "/v1/chat/completions", body)
    assert response.status_code == 200, response.text
    count = 0
    async for chunk in chunks(response):
        openapi.check("CreateChatCompletionStreamResponse", chunk, EXTENSIONS)
        count += 1
    assert count > 2


@pytest.mark.parametrize("extra", COMPLETIONS.values(), ids=COMPLETIONS.keys())
async def test_completion(extra: dict[str, Any]) -> None:
    response = await ask(scripted(CALL), "/v1/completions", without(extra, "stream_options"))
    assert response.status_code == 200, response.text
    openapi.check("CreateCompletionResponse", response.json(), EXTENSIONS)


@pytest.mark.parametrize("extra", COMPLETIONS.values(), ids=COMPLETIONS.keys())
async def test_completion_chunks(extra: dict[str, Any]) -> None:
    response = await ask(scripted(CALL), "/v1/completions", extra | {"stream": True})
    assert response.status_code == 200, response.text
    async for chunk in chunks(response):
        openapi.check("CreateCompletionResponse", chunk, EXTENSIONS)


@pytest.mark.parametrize("per_event", [1, 4])
@pytest.mark.parametrize("extra", RESPONSES.values(), ids=RESPONSES.keys())
async def test_responses(extra: dict[str, Any], per_event: int) -> None:
    llm = scripted(CALL, per_event=per_event)
    response = await ask(llm, "/v1/responses", {"input": "Hello"} | extra)
    assert response.status_code == 200, response.text
    openapi.check("Response", response.json(), RESPONSE_EXTRA)
    stream = await ask(llm, "/v1/responses", {"input": "Hello", "stream": True} | extra)
    for block in stream.text.strip().split("\n\n"):
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        if "usage" in event.get("response", {}) and event["response"]["status"] == "in_progress":
            assert event["response"].pop("usage") is None  # as the API says it, which its description does not know
        openapi.check(EVENTS[name.removeprefix("event: ")], event, RESPONSE_EXTRA)


async def test_counts_and_lists_of_responses() -> None:
    transport = httpx.ASGITransport(build_app(scripted(CALL)))
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        counted = await client.post("/v1/responses/input_tokens", json={"input": "Hello"})
        openapi.check("TokenCountsResource", counted.json(), frozenset())
        compacted = await client.post("/v1/responses/compact", json={"input": "Hello"})
        openapi.check("CompactResource", compacted.json(), frozenset())
        first = (await client.post("/v1/responses", json={"input": "Hello"} | RESPONSES["tools"])).json()
        result = {"type": "function_call_output", "call_id": first["output"][-1]["call_id"], "output": "x"}
        more = {"input": [result], "previous_response_id": first["id"]}
        second = (await client.post("/v1/responses", json=more)).json()
        listed = await client.get(f"/v1/responses/{second['id']}/input_items")
        openapi.check("ResponseItemList", listed.json(), frozenset({"status"}))


async def test_models() -> None:
    openapi.check("ListModelsResponse", (await ask(scripted("a"), "/v1/models")).json(), EXTENSIONS)
    openapi.check("Model", (await ask(scripted("a"), "/v1/models/scripted")).json(), EXTENSIONS)


async def test_files_and_batches(tmp_path: Path) -> None:
    """A batch says null of what it has not, as the API itself does; the description knows no nulls there."""
    batches = Batches(str(tmp_path))
    assert batches.store is not None
    transport = httpx.ASGITransport(build_app(scripted("a"), dialects=[batches]))
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost/v1") as client:
        form: dict[str, Any] = {"files": {"file": ("a.jsonl", b"{}")}, "data": {"purpose": "batch"}}
        file = (await client.post("/files", **form)).json()
        asked = {"input_file_id": file["id"], "endpoint": "/v1/completions", "completion_window": "24h"}
        batch = (await client.post("/batches", json=asked | {"metadata": {"a": "b"}})).json()
        openapi.check("OpenAIFile", file, frozenset())
        openapi.check("ListFilesResponse", (await client.get("/files")).json(), frozenset())
        openapi.check("Batch", {k: v for k, v in batch.items() if v is not None}, frozenset())
        batches.store.fail(batches.store.batch("", batch["id"]), [Fault("code", "message", 1, "body")])
        failed = (await client.get("/batches")).json()["data"][0]
        openapi.check("Batch", {k: v for k, v in failed.items() if v is not None}, frozenset())
        openapi.check("DeleteFileResponse", (await client.delete(f"/files/{file['id']}")).json(), frozenset())
    batches.store.close()


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {}),
        ("/v1/chat/completions", HELLO | {"guided_json": {"a": 1}}),
        ("/v1/chat/completions", HELLO | {"model": "other"}),
        ("/v1/chat/completions", HELLO | {"temperature": -1, "stream": True}),
        ("/v1/completions", {"prompt": "x" * 9999}),
        ("/v1/models/other", None),
        ("/nope", None),
    ],
)
async def test_errors(path: str, body: dict[str, Any] | None) -> None:
    response = await ask(scripted("a"), path, body)
    assert response.status_code in (400, 404)
    openapi.check("ErrorResponse", response.json(), frozenset())


def test_the_checker_checks() -> None:
    """A validator that accepts everything would pass all of the above."""
    good = {"id": "m", "object": "model", "created": 1, "owned_by": "x"}
    openapi.check("Model", good, frozenset())
    for bad in (good | {"created": "1"}, without(good, "id"), good | {"object": "thing"}, good | {"colour": 1}):
        with pytest.raises(AssertionError):
            openapi.check("Model", bad, frozenset())
