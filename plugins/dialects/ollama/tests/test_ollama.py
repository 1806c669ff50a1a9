"""The Ollama API with its own client over a real socket, streamed and not, and what is wrong with bodies."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from lmkit.api import ErrorInfo
from lmkit_dialect_ollama.schema import ChatRequest
from lmkit_http.app import build_app
from lmkit_http.strict import parse
from lmkit_testing import Asked, DialectConformance
from lmkit_testing.pooling import pooling_checkpoint
from lmkit_testing.serving import ServedLLM, listening, real, scripted

ollama = pytest.importorskip("ollama", reason="the official client is not installed")

ASKED = [{"role": "user", "content": "Hi"}]
CALL = '<tool_call>{"name": "add", "arguments": {"a": 2, "b": 3}}</tool_call>'
ANSWER = f"<think>two calls</think>Let me see.{CALL}{CALL}"


class TestConformance(DialectConformance):
    plugin = "dialect:ollama"
    body = {"model": "scripted", "messages": [{"role": "user", "content": "Hello"}]}
    asked = (Asked("POST /api/chat", body | {"stream": False}, body),)

    def text(self, answer: bytes, streamed: bool) -> str:
        return "".join(json.loads(line)["message"]["content"] for line in answer.splitlines())


def add(a: int, b: int) -> int:
    """Adds two numbers.

    Args:
        a: one
        b: another
    """
    return a + b


@asynccontextmanager
async def client_of(llm: ServedLLM) -> AsyncIterator[ollama.AsyncClient]:
    async with listening(llm) as url:
        client = ollama.AsyncClient(host=url)
        try:
            yield client
        finally:
            await client._client.aclose()


async def test_chat_with_tools_and_thoughts_is_the_same_streamed() -> None:
    async with client_of(scripted(ANSWER)) as client:
        options = {"num_predict": 512, "seed": 1, "temperature": 0, "stop": ["never"], "num_ctx": 512}
        asked: dict[str, Any] = {"messages": ASKED, "tools": [add], "think": True, "options": options}
        whole = await client.chat("scripted:latest", **asked)
        assert (whole.message.content, whole.message.thinking) == ("Let me see.", "two calls")
        assert [call.function.arguments for call in whole.message.tool_calls or ()] == [{"a": 2, "b": 3}] * 2
        assert (whole.done, whole.done_reason, whole.model) == (True, "stop", "scripted:latest")
        assert (whole.total_duration or 0) > 0
        chunks = [chunk async for chunk in await client.chat("scripted", stream=True, **asked)]
        assert "".join(c.message.content or "" for c in chunks) == whole.message.content
        assert "".join(c.message.thinking or "" for c in chunks) == whole.message.thinking
        assert [call for c in chunks for call in c.message.tool_calls or ()] == whole.message.tool_calls
        last = chunks[-1]
        assert [c.done for c in chunks] == [False] * (len(chunks) - 1) + [True]
        assert (last.eval_count, last.prompt_eval_count) == (whole.eval_count, whole.prompt_eval_count)
        assert (last.eval_duration or 0) > 0
        assert (last.prompt_eval_duration or 0) > 0


async def test_the_conversation_goes_on_after_a_call() -> None:
    llm = scripted("Five.")
    async with client_of(llm) as client:
        call = {"function": {"name": "add", "arguments": {"a": 2, "b": 3}}}
        messages = [*ASKED, {"role": "assistant", "content": "", "thinking": "x", "tool_calls": [call]},
                    {"role": "tool", "content": "5", "tool_name": "add"}]  # fmt: skip
        assert (await client.chat("scripted", messages=messages)).message.content == "Five."
        prompt = llm.text.decode_all(llm.client.requests[0].token_ids)  # type: ignore[attr-defined]
        assert '"add"' in prompt
        assert "<|tool|>5" in prompt
        goes_on = await client.chat("scripted", messages=[*ASKED, {"role": "assistant", "content": "Fi"}])
        assert goes_on.message.content == "Five."
        assert llm.text.decode_all(llm.client.requests[1].token_ids).endswith("Fi")  # type: ignore[attr-defined]


async def test_generate_formats_and_logprobs() -> None:
    llm = scripted("<think>hm</think>It is 4.")
    async with client_of(llm) as client:
        whole = await client.generate("scripted", "2+2?", system="Be brief", logprobs=True, top_logprobs=2)
        assert (whole.response, whole.thinking, whole.done_reason) == ("It is 4.", "hm", "stop")
        assert [len(entry.top_logprobs or ()) for entry in whole.logprobs or ()] == [2] * 8
        chunks = [c async for c in await client.generate("scripted", "2+2?", stream=True, think=True)]
        assert "".join(c.response or "" for c in chunks) == whole.response
        quiet = await client.generate("scripted", "2+2?", options={"num_predict": -1})
        assert quiet.response == "It is 4."
        raw = await client.generate("scripted", "2+2?", raw=True, options={"num_predict": 3})
        assert (raw.response, raw.done_reason, raw.eval_count) == ("<th", "length", 3)
        requests = llm.client.requests  # type: ignore[attr-defined]
        assert llm.text.decode_all(requests[-1].token_ids) == "2+2?"
        assert "<|system|>Be brief" in llm.text.decode_all(requests[0].token_ids)
        loaded = await client.generate("scripted", keep_alive=5)
        assert (loaded.response, loaded.done, loaded.done_reason) == ("", True, "load")


async def test_a_schema_constrains_the_answer() -> None:
    """What is asked of the engine is enough here: grammars have tests of their own."""
    served = build_app(scripted("x")).state.backend.served
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    body = json.dumps({"model": "scripted", "messages": ASKED, "format": schema}).encode()
    grammar = parse(ChatRequest, body).params(served).grammar
    assert grammar is not None
    assert (grammar.kind, json.loads(grammar.source)) == ("json_schema", schema | {"additionalProperties": False})
    body = json.dumps({"model": "scripted", "messages": ASKED, "format": "json"}).encode()
    grammar = parse(ChatRequest, body).params(served).grammar
    assert grammar is not None
    assert grammar.kind == "json_object"


async def test_what_clients_ask_of_models() -> None:
    async with client_of(scripted("x")) as client:
        (listed,) = (await client.list()).models
        (running,) = (await client.ps()).models
        assert (listed.model, running.model, running.context_length) == ("scripted", "scripted", 4096)
        shown = await client.show("scripted")
        assert shown.capabilities == ["completion", "tools", "thinking"]
        assert shown.modelinfo == {"general.architecture": "lmkit", "lmkit.context_length": 4096}
        assert shown.template
        for work in (client.pull("x"), client.push("x"), client.delete("x"), client.copy("x", "y"),
                     client.create("x", from_="y")):  # fmt: skip
            with pytest.raises(ollama.ResponseError, match="models is not done here") as refused:
                await work
            assert refused.value.status_code == 400
        with pytest.raises(ollama.ResponseError, match="there is no model 'y' here") as missing:
            await client.show("y")
        assert missing.value.status_code == 404


async def test_vectors(tmp_path: Any) -> None:
    path = pooling_checkpoint("BertConfig", "BertModel", tmp_path)
    async with real(str(path), served_name="m", dtype="float32", kv_memory="8MiB") as llm, client_of(llm) as client:
        found = await client.embed("m", ["one", "two"], dimensions=8)
        assert [len(vector) for vector in found.embeddings] == [8, 8]
        whole = await client.embed("m", "one " * 2000)  # cut, unless told otherwise
        alone = await client.embeddings("m", "one " * 2000)
        assert list(alone.embedding) == pytest.approx(list(whole.embeddings[0]))
        with pytest.raises(ollama.ResponseError, match="tokens"):
            await client.embed("m", "one " * 2000, truncate=False)
        assert "embedding" in (await client.show("m")).capabilities  # type: ignore[operator]
        with pytest.raises(ollama.ResponseError, match="cannot generate"):
            await client.chat("m", messages=ASKED)


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        ({"options": {"mirostat": 1}}, "Send temperature"),
        ({"options": {"temperature": -1}}, "temperature"),
        ({"messages": [{"role": "user", "content": "x", "images": ["aGk="]}]}, "images"),
        ({"think": "wildly"}, "low, medium, high"),
        ({"top_logprobs": 2}, "logprobs=true"),
        ({"format": "yaml"}, "format"),
        ({"model": ""}, "model"),
    ],
)
async def test_refusals_name_the_field(extra: dict[str, Any], words: str) -> None:
    transport = httpx.ASGITransport(build_app(scripted("x")))
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        body = {"model": "scripted", "messages": ASKED, "stream": False, **extra}
        answer = await client.post("/api/chat", json=body)
        assert (answer.status_code, list(answer.json())) == (400, ["error"])
        assert words in answer.json()["error"]


async def test_what_is_dropped_is_named() -> None:
    transport = httpx.ASGITransport(build_app(scripted("x")))
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        options = {"num_ctx": 64, "num_gpu": 1, "mirostat": 0, "typical_p": 1.0}
        body = {"model": "scripted", "messages": ASKED, "stream": False, "keep_alive": "5m", "options": options}
        answer = await client.post("/api/chat", json=body)
        assert answer.status_code == 200
        assert answer.headers["x-lmkit-warnings"] == "dropped: keep_alive, options.num_ctx, options.num_gpu"


async def test_an_error_in_the_middle_is_a_line() -> None:
    llm = scripted("a long answer " * 20, delay=0.01)
    async with client_of(llm) as client:
        chunks = await client.chat("scripted", messages=ASKED, stream=True)
        await anext(chunks)
        llm.client.fail_next(ErrorInfo("engine", "it broke"))  # type: ignore[attr-defined]
        with pytest.raises(ollama.ResponseError, match="internal server error"):
            _ = [chunk async for chunk in chunks]


FIELDS = [
    "model",
    "messages",
    "prompt",
    "input",
    "options",
    "format",
    "tools",
    "think",
    "stream",
    "raw",
    "truncate",
    "role",
    "content",
    "tool_calls",
    "function",
    "name",
    "arguments",
    "stop",
    "num_predict",
    "keep_alive",
]
APP = build_app(scripted("ok"))
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.sampled_from(["", "scripted", "user"])
    | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(FIELDS), inner, max_size=5),
    max_leaves=20,
)  # fmt: skip


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(body=VALUES, path=st.sampled_from(["chat", "generate", "embed", "embeddings", "show", "pull"]))
async def test_any_body_has_an_answer(body: Any, path: str) -> None:
    if isinstance(body, dict):
        body = {"model": "scripted", "options": {"num_predict": 4}, **body}
    async with httpx.AsyncClient(transport=httpx.ASGITransport(APP), base_url="http://localhost") as client:
        answer = await client.post(f"/api/{path}", content=json.dumps(body))
        assert answer.status_code in (200, 400, 404, 413)
        if answer.status_code != 200:
            assert list(answer.json()) == ["error"]
