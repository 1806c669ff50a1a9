"""Large requests: refused by what they would cost, before it is spent, and never in the way of small ones."""

from __future__ import annotations

import asyncio
import json
import threading
from typing import Any

import httpx
import pytest
from lmkit.api import PoolerInfo, RequestError
from lmkit.text.measure import PIECE, beginning, longer_than
from lmkit_dialect_openai.chat import Chat
from lmkit_dialect_openai.completions import Completions
from lmkit_dialect_openai.dialect import OpenAI
from lmkit_dialect_openai.schema import ChatRequest, CompletionRequest
from lmkit_http.backend import Backend
from lmkit_http.info_schema import DetokenizeRequest
from lmkit_http.settings import ServerSettings
from lmkit_http.shape import MAX_CONTAINERS, MAX_DEPTH, MAX_MEMBERS, shape_of
from lmkit_http.strict import parse
from lmkit_testing.serving import byte_tokenizer, listening, scripted, text_side
from lmkit_tokenizer_json.tokenizer import JsonTokenizer
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers

HELLO = {"messages": [{"role": "user", "content": "Hello"}]}
CALL = {"role": "assistant", "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f"}}]}


@pytest.mark.parametrize("piece", [7, 64, 1 << 18])
def test_the_shape_of_json(monkeypatch: pytest.MonkeyPatch, piece: int) -> None:
    """Whatever stands in texts does not count, however quotes are escaped and wherever pieces end."""
    monkeypatch.setattr("lmkit_http.shape._PIECE", piece)
    values: list[Any] = [
        {}, [], "", 1, {"a": 1, "b": [1, 2, {"c": []}]}, '{"[,:', "\\", '\\"', '\\\\"',
        ["\\" * n + '"[' for n in range(9)],
        [[[[]]], {"x": {"y": {"\\": "]"}}}], ["a,b", 'c"d', "\\\\"], [None] * 300, {str(i): [i] for i in range(50)},
    ]  # fmt: skip

    def count(value: Any) -> tuple[int, int, int, int]:
        inner = list(value.values()) if isinstance(value, dict) else value if isinstance(value, list) else []
        parts = [count(v) for v in inner]
        own = (
            len(value) if isinstance(value, dict) else 0,
            int(isinstance(value, (dict, list))),
            max(0, len(inner) - 1),
        )
        sums = [own[i] + sum(p[i] for p in parts) for i in range(3)]
        return sums[0], sums[1], sums[2], own[1] + max((p[3] for p in parts), default=0)

    for value in [*values, values]:
        shape = shape_of(json.dumps(value).encode())
        assert (shape.members, shape.containers, shape.commas, shape.depth) == count(value), value


def nested(depth: int, value: Any = 1) -> Any:
    for i in range(depth):
        value = {"a": value} if i % 2 else [value]
    return value


@pytest.mark.parametrize(
    "body",
    [
        HELLO | {f"k{i}": 1 for i in range(MAX_MEMBERS)},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}] * (MAX_CONTAINERS + 1)}]},
        {"messages": [{"role": "user", "content": "x"} | {f"k{i}": 1 for i in range(MAX_MEMBERS)}]},
        HELLO | {"documents": [{"a": [0] * 1_000_000}]},
        HELLO | {"documents": [nested(MAX_DEPTH)]},
        HELLO | {"chat_template_kwargs": {"a": nested(10_000)}},
        HELLO | {"stop": ["a"] * 1_000_000},
    ],
    ids=["fields", "parts", "nested fields", "documents", "deep", "very deep", "values"],
)  # fmt: skip
def test_counts_are_bounded_before_anything_is_made(monkeypatch: pytest.MonkeyPatch, body: dict[str, Any]) -> None:
    import sys

    monkeypatch.setattr(ChatRequest, "model_validate_json", None)
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(40_000)
    try:
        text = json.dumps(body).encode()
    finally:
        sys.setrecursionlimit(limit)
    with pytest.raises(RequestError, match="more than") as caught:
        parse(ChatRequest, text)
    assert caught.value.code == "too-complex"


@pytest.mark.parametrize(
    ("kind", "body", "field"),
    [
        (ChatRequest, HELLO | {f"k{i}": 1 for i in range(1000)}, "k0"),
        (ChatRequest, HELLO | {"k" * 100_000: 1}, "k" * 200),
        (ChatRequest, HELLO | {f"k{i}" * 10_000: 1 for i in range(100)}, ("k0" * 10_000)[:200]),
        (ChatRequest, HELLO | {"response_format": {"type": "text"} | {f"k{i}": 1 for i in range(1000)}},
         "response_format.k0"),
        (CompletionRequest, {"prompt": [1.5] * 100_000}, "prompt.0"),
        (CompletionRequest, {"prompt": [[1] * 100, ["a"] * 100_000]}, "prompt.1.0"),
        (DetokenizeRequest, {"tokens": [-1] * 100_000}, "tokens.0"),
        (ChatRequest, HELLO | {"logit_bias": {str(i): 1000 for i in range(1000)}}, None),
    ],
)  # fmt: skip
def test_many_mistakes_are_not_all_described(kind: Any, body: dict[str, Any], field: str | None) -> None:
    with pytest.raises(RequestError) as caught:
        parse(kind, json.dumps(body).encode(), lenient=False)
    assert caught.value.field == field
    assert len(caught.value.message) < 1000


@pytest.mark.parametrize(
    "arguments", [json.dumps(nested(MAX_DEPTH + 1)), "[" * 100_000, '{"a": "\\ud800"}', '{"\\uDFFF": 1}']
)
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/tokenize"])
async def test_arguments_that_no_template_could_show(connect: Any, path: str, arguments: str) -> None:
    call = json.loads(json.dumps(CALL))
    call["tool_calls"][0]["function"]["arguments"] = arguments
    response = await connect(scripted("a")).post(path, json={"messages": [*HELLO["messages"], call]})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "messages.1.tool_calls.0.function.arguments"


@pytest.mark.parametrize(
    "arguments", [json.dumps({"a": nested(MAX_DEPTH - 2)}), "not JSON", '{"a": "\\ud83d\\ude00"}', "\\ud800", ""]
)
async def test_arguments_that_can_be_shown(connect: Any, arguments: str) -> None:
    call = json.loads(json.dumps(CALL))
    call["tool_calls"][0]["function"]["arguments"] = arguments
    response = await connect(scripted("a")).post(
        "/v1/chat/completions", json={"messages": [*HELLO["messages"], call], "max_tokens": 1}
    )
    assert response.status_code == 200, response.text


# -- lengths


def blanks_dropped() -> JsonTokenizer:
    """Drops blanks, so that no number of bytes says that a text is long."""
    raw = Tokenizer(models.WordLevel({"a": 0, "[UNK]": 1}, "[UNK]"))
    raw.normalizer = normalizers.Replace(" ", "")
    raw.pre_tokenizer = pre_tokenizers.Whitespace()
    return JsonTokenizer(raw)


def test_longer_than() -> None:
    tokenizer = byte_tokenizer()
    assert not longer_than(tokenizer, ["a" * 300], 100)  # cheap to find out exactly
    assert longer_than(tokenizer, ["a" * (2 * PIECE)], 100)
    assert longer_than(tokenizer, ["a" * 1000] * 1000, 100)
    assert not longer_than(tokenizer, ["a" * (2 * PIECE)], 2 * PIECE)
    blanks = blanks_dropped()
    assert not longer_than(blanks, [" " * 4 * PIECE + "a"], 100)
    assert len(blanks.encode(" " * 4 * PIECE + "a")) == 1


def test_the_beginning_has_all_the_tokens() -> None:
    tokenizer = byte_tokenizer()
    text = "".join(chr(97 + i % 26) for i in range(8 * PIECE))
    cut = beginning(tokenizer, text, 500)
    assert len(cut) < 4 * PIECE
    assert tokenizer.encode(cut)[:500] == tokenizer.encode(text)[:500]
    assert beginning(tokenizer, "abc", 1) == "abc"


class Counting:
    """A tokenizer that counts the characters it is given."""

    def __init__(self) -> None:
        self._inner, self.num = byte_tokenizer(), 0

    def encode(self, text: str, **options: Any) -> list[int]:
        self.num += len(text)
        return self._inner.encode(text, **options)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


LONG = "word " * 600_000


@pytest.mark.parametrize(
    ("path", "body", "pooler"),
    [
        ("/v1/completions", {"prompt": LONG}, False),
        ("/v1/completions", {"prompt": ["a", LONG]}, False),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": LONG}]}, False),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "word " * 60}] * 8000}, False),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": [{"type": "text", "text": LONG}]}]}, False),
        ("/v1/chat/completions", HELLO | {"tools": [
            {"type": "function", "function": {"name": "f", "description": LONG}}]}, False),
        ("/tokenize", {"prompt": LONG}, False),
        ("/tokenize", {"messages": [{"role": "user", "content": LONG}]}, False),
        ("/v1/embeddings", {"input": LONG}, True),
        ("/pooling", {"input": ["a", LONG]}, True),
        ("/rerank", {"query": "a", "documents": ["b", LONG]}, True),
        ("/score", {"text_1": LONG, "text_2": "b"}, True),
    ],
)  # fmt: skip
async def test_long_texts_are_not_tokenized(connect: Any, path: str, body: dict[str, Any], pooler: bool) -> None:
    import dataclasses

    llm = scripted("a", max_length=1000)
    counting = Counting()
    llm.text = dataclasses.replace(text_side(), tokenizer=counting)  # type: ignore[arg-type]
    if pooler:
        import msgspec

        info = PoolerInfo("embed", 4)
        llm.client.facts = msgspec.structs.replace(llm.facts, pooler=info)  # type: ignore[misc]
    response = await connect(llm).post(path, json=body)
    error = response.json()["error"]
    assert (response.status_code, error["code"]) == (400, "context_length_exceeded"), error
    assert "1000" in error["message"]
    assert counting.num <= 4 * PIECE


async def test_long_texts_that_are_to_be_cut_are_cut_first(connect: Any) -> None:
    counting = Counting()
    import dataclasses

    side = dataclasses.replace(text_side(), tokenizer=counting)  # type: ignore[arg-type]
    assert side.encode_prompt(LONG, limit=10, add_special=False) == side.tokenizer.encode("word word ")
    assert counting.num <= 4 * PIECE


def test_many_tokens_are_decoded_as_few_are() -> None:
    side = text_side()
    ids = [*side.tokenizer.encode("täglich \u4e00 " * 6_000), 0xE4, 256]
    assert side.decode_all(ids) == side.tokenizer.decode(ids, skip_special=False)


# -- workers, bodies, room


async def test_small_requests_are_not_behind_large_ones(monkeypatch: pytest.MonkeyPatch, connect: Any) -> None:
    go = threading.Event()
    parse = OpenAI.parse

    def slow(self: Any, incoming: Any, served: Any) -> Any:
        if len(incoming.body) > 100_000:
            go.wait(20)
        return parse(self, incoming, served)

    monkeypatch.setattr(OpenAI, "parse", slow)
    client = connect(scripted("a", max_length=1 << 20), timeout=30)
    large = [asyncio.create_task(client.post("/v1/completions", json={"prompt": "x" * 200_000})) for _ in range(6)]
    try:
        for _ in range(8):
            assert (await client.post("/v1/completions", json={"prompt": "x"})).status_code == 200
    finally:
        go.set()
    assert sorted(r.status_code for r in await asyncio.gather(*large)) == [200] * 6


async def test_all_bodies_together_are_bounded() -> None:
    kept: list[Backend] = []
    settings = ServerSettings(port=0, max_body=1 << 20, max_bodies=3 << 20)
    async with listening(scripted("a"), settings, on_app=lambda app: kept.append(app.state.backend)) as url:
        host, port = url.removeprefix("http://").split(":")
        writers, refused = [], 0
        for _ in range(8):
            reader, writer = await asyncio.open_connection(host, int(port))
            writers.append(writer)
            writer.write(
                b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 1000001\r\n\r\n" + b" " * 1_000_000
            )
            try:
                refused += b"503" in await asyncio.wait_for(reader.readline(), 0.3)
            except TimeoutError:
                pass  # it waits for the last byte
        assert refused >= 4
        assert kept[0].bodies.num_bytes <= 3 << 20
        async with httpx.AsyncClient(base_url=url) as client:
            assert (await client.post("/v1/completions", json={"prompt": "small"})).status_code == 200
        for writer in writers:
            writer.close()
        async with asyncio.timeout(5):
            while kept[0].bodies.num_bytes:
                await asyncio.sleep(0.01)


@pytest.mark.parametrize("max_length", [128, 2048, 131_072, 1 << 20])
def test_the_limit_of_a_body_follows_from_the_context(max_length: int) -> None:
    from lmkit_http.limits import body_limit

    limit = body_limit(scripted("a", max_length=max_length).facts, ServerSettings())
    assert min(16 << 20, 6 * max_length) <= limit <= 16 << 20
    assert body_limit(scripted("a").facts, ServerSettings(max_body=7)) == 7


async def test_no_room_is_said_before_anything_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    import msgspec

    llm = scripted("x" * 1000, delay=0.01)
    llm.client.facts = msgspec.structs.replace(llm.facts, max_rows=2, max_waiting=1)  # type: ignore[misc]
    async with listening(llm) as url, httpx.AsyncClient(base_url=url) as client:
        body = {"prompt": "a", "max_tokens": 500}
        running = [asyncio.create_task(client.post("/v1/completions", json=body, timeout=60)) for _ in range(3)]
        async with asyncio.timeout(10):
            while len(llm.client.requests) < 3:  # type: ignore[attr-defined]
                await asyncio.sleep(0.01)
        host, port = url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 1000000\r\n\r\n")
        head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 5)
        writer.close()
        assert head.split()[1] == b"503"
        assert b"retry-after" in head
        for path in ("/live", "/v1/models", "/ready"):
            assert (await client.get(path)).status_code == 200
        assert 'route="/v1/completions",status="503"' in (await client.get("/metrics")).text
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        async with asyncio.timeout(10):
            while (await client.post("/v1/completions", json={"prompt": "a", "max_tokens": 1})).status_code != 200:
                await asyncio.sleep(0.01)


@pytest.mark.usefixtures("small_buffers")
async def test_readers_that_are_too_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """What waits for them is bounded, for each and for all; others go on."""
    monkeypatch.setattr("lmkit_http.backlog._LOOK", 0.02)
    monkeypatch.setattr("lmkit_http.backlog.MAX_BACKLOG", 1 << 20)
    kept: list[Backend] = []
    llm = scripted("x" * 40_000, max_length=1 << 20)
    async with listening(llm, on_app=lambda app: kept.append(app.state.backend)) as url:
        host, port = url.removeprefix("http://").split(":")
        for n in (1, 4):
            options = {"prompt": "a", "stream": True, "logprobs": 20 // n, "n": n, "max_tokens": 40_000}
            body = json.dumps(options).encode()
            _, writer = await asyncio.open_connection(host, int(port), limit=1 << 10)
            head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n"
            writer.write(head % len(body) + body)
            async with asyncio.timeout(60):
                while len(llm.client.aborted) < n:  # type: ignore[attr-defined]
                    assert all(g.backlog < 8 << 20 for g in kept[0].running)
                    await asyncio.sleep(0.01)
            llm.client.aborted.clear()  # type: ignore[attr-defined]
            writer.transport.abort()
        async with httpx.AsyncClient(base_url=url) as client:
            response = await client.post("/v1/completions", json={"prompt": "a", "max_tokens": 500})
            assert response.status_code == 200


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_long_answers_are_not_made_on_the_event_loop(
    monkeypatch: pytest.MonkeyPatch, connect: Any, path: str
) -> None:
    seen: list[tuple[int, bool]] = []
    for kind in (Chat, Completions):
        whole = kind.whole

        def watch(self: Any, turns: Any, whole: Any = whole) -> bytes:
            tokens = sum(turn.stream.usage.completion_tokens for turn in turns)
            seen.append((tokens, threading.current_thread() is threading.main_thread()))
            return whole(self, turns)

        monkeypatch.setattr(kind, "whole", watch)
    client = connect(scripted("x" * 300))
    options: dict[str, Any] = {"logprobs": 20, "prompt": "a"}
    if "chat" in path:
        options = {"logprobs": True, "top_logprobs": 20, "messages": HELLO["messages"]}
    for tokens in (10, 300):
        assert (await client.post(path, json={**options, "max_tokens": tokens})).status_code == 200
    assert seen == [(10, True), (300, False)]
