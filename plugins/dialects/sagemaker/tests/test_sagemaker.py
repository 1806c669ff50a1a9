"""One route for all: each body is answered as the route that takes it answers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lmkit_http.app import build_app
from lmkit_testing import DialectConformance
from lmkit_testing.pooling import pooling_checkpoint
from lmkit_testing.serving import ServedLLM, real, scripted


class TestConformance(DialectConformance):
    plugin = "dialect:sagemaker"


def client(llm: ServedLLM) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.ASGITransport(build_app(llm)), base_url="http://localhost")


@pytest.mark.parametrize(
    ("route", "body"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}]}),
        ("/v1/completions", {"prompt": "Hi"}),
        ("/v1/completions", {"prompt": "Hi", "max_tokens": 0}),
    ],
)
async def test_text_is_answered_as_on_its_own_route(route: str, body: dict[str, Any]) -> None:
    async with client(scripted("hello")) as asks:
        there, here = await asks.post(route, json=body), await asks.post("/invocations", json=body)
        assert here.status_code == there.status_code
        varying = ("id", "created")
        assert {k: v for k, v in here.json().items() if k not in varying} == {
            k: v for k, v in there.json().items() if k not in varying
        }
        if here.status_code == 200:
            streamed = await asks.post("/invocations", json=body | {"stream": True})
            assert streamed.headers["content-type"].startswith("text/event-stream")
            assert streamed.text.endswith("data: [DONE]\n\n")


async def test_vectors_and_scores(tmp_path: Path) -> None:
    path = pooling_checkpoint("BertConfig", "BertModel", tmp_path)
    async with real(str(path), dtype="float32", kv_memory="8MiB") as llm, client(llm) as asks:
        for route, body in (
            ("/v1/embeddings", {"input": "x"}),
            ("/pooling", {"input": "x", "task": "token_embed"}),
            ("/v1/rerank", {"query": "x", "documents": ["x", "y"]}),
            ("/score", {"queries": "x", "documents": ["x", "y"]}),
            ("/score", {"text_1": "x", "text_2": "y"}),
        ):
            there, here = await asks.post(route, json=body), await asks.post("/invocations", json=body)
            assert (here.status_code, here.json().keys()) == (200, there.json().keys())
            assert here.json().get("data") == there.json().get("data")


async def test_what_is_not_understood_is_refused() -> None:
    async with client(scripted("x")) as asks:
        for body in (b"", b"[]", b"{", b'{"temperature": 1}'):
            assert (await asks.post("/invocations", content=body)).status_code == 400
        assert (await asks.get("/ping")).status_code == (await asks.post("/ping")).status_code == 200


BODIES = st.dictionaries(
    st.sampled_from(["messages", "prompt", "input", "query", "documents", "queries", "task", "model"]),
    st.none() | st.booleans() | st.integers() | st.text(max_size=5) | st.lists(st.text(max_size=5), max_size=3),
)
APP = build_app(scripted("ok"))


@settings(max_examples=40, deadline=None)
@given(BODIES)
async def test_any_body_has_an_answer(body: dict[str, Any]) -> None:
    async with httpx.AsyncClient(transport=httpx.ASGITransport(APP), base_url="http://localhost") as asks:
        answer = await asks.post("/invocations", content=json.dumps(body))
        assert answer.status_code in (200, 400, 404)
        if answer.status_code != 200:
            assert answer.json()["error"]["message"]
