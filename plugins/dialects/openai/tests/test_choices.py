"""Which answers are shown of several, and what may not be in them."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from lmkit_http.app import build_app
from lmkit_testing.serving import ServedLLM, hashed, scripted


def client(llm: ServedLLM) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.ASGITransport(build_app(llm)), base_url="http://localhost")


async def completed(c: httpx.AsyncClient, **body: Any) -> dict[str, Any]:
    answer = await c.post("/v1/completions", json={"prompt": ["one", "two"], "max_tokens": 6, "seed": 1, **body})
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


async def test_the_best_are_those_whose_tokens_were_likeliest() -> None:
    async with hashed() as llm, client(llm) as c:
        everything = await completed(c, n=5, logprobs=0)
        best = await completed(c, n=2, best_of=5)
        of_one = await completed(c, n=1, best_of=5, logprobs=1)
    means = [sum(choice["logprobs"]["token_logprobs"]) / 6 for choice in everything["choices"]]
    for prompt in range(2):
        ranked = sorted(range(5 * prompt, 5 * prompt + 5), key=lambda i: -means[i])
        texts = [everything["choices"][i]["text"] for i in ranked]
        assert [choice["text"] for choice in best["choices"][2 * prompt : 2 * prompt + 2]] == texts[:2]
        assert of_one["choices"][prompt]["text"] == texts[0]
        assert "logprobs" in of_one["choices"][prompt]
    assert [choice["index"] for choice in best["choices"]] == [0, 1, 2, 3]
    assert all(choice["logprobs"] is None for choice in best["choices"])
    assert best["usage"] == everything["usage"]  # what was made was made


@pytest.mark.parametrize(
    ("body", "field"),
    [({"best_of": 2, "n": 3}, "best_of"), ({"best_of": 2, "stream": True}, "best_of"), ({"best_of": 0}, "best_of"),
     ({"best_of": 64, "prompt": ["x"] * 3}, "n")],
)  # fmt: skip
async def test_what_cannot_be_ranked(body: dict[str, Any], field: str) -> None:
    async with client(scripted("x")) as c:
        answer = await c.post("/v1/completions", json={"prompt": "x", **body})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, field)


async def test_words_become_their_tokens() -> None:
    """One token per byte: with a blank before it and without."""
    llm = scripted("x")
    async with client(llm) as c:
        body = {"prompt": "x", "bad_words": ["ab", " ab"], "allowed_token_ids": [3, 4], "vllm_xargs": {"dry": {}}}
        assert (await c.post("/v1/completions", json=body)).status_code == 200
        twice = await c.post("/v1/completions", json=body | {"vllm_xargs": {"bad_words": {"ids": [[1]]}}})
        assert twice.json()["error"]["param"] == "bad_words"
    tokens = [llm.text.tokenizer.encode(text, add_special=False) for text in ("ab", " ab")]
    assert llm.client.requests[0].params.extra == {  # type: ignore[attr-defined]
        "bad_words": {"ids": tokens}, "allowed_token_ids": {"ids": [3, 4]}, "dry": {},
    }  # fmt: skip
