"""Which answers are shown of several, and what may not be in them."""

from __future__ import annotations

import asyncio
import os
import signal
from typing import Any

import httpx
import pytest
from lmkit_http.app import build_app
from lmkit_testing.serving import ServedLLM, hashed, scripted, supervised


def client(llm: ServedLLM) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.ASGITransport(build_app(llm)), base_url="http://localhost")


async def completed(c: httpx.AsyncClient, **body: Any) -> dict[str, Any]:
    answer = await c.post("/v1/completions", json={"prompt": ["one", "two"], "max_tokens": 6, "seed": 1} | body)
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


SEARCH = {"prompt": "one", "max_tokens": 9, "seed": 1, "use_beam_search": True, "ignore_eos": True}


async def test_a_beam_search_finds_the_best() -> None:
    """n of them, likeliest first, from as many beams or from best_of; usage counts what is shown, prompts once."""
    async with hashed() as llm, client(llm) as c:
        four, chat = (
            await completed(c, **SEARCH, n=4, logprobs=2, return_token_ids=True),
            await c.post(
                "/v1/chat/completions",
                json={"messages": [{"role": "user", "content": "x"}], "max_tokens": 9, "use_beam_search": True, "n": 3},
            ),
        )
        two = await completed(c, **SEARCH, n=2, best_of=4)
        short = await completed(c, **SEARCH, n=4, length_penalty=0, early_stopping="never", temperature=0)
    scores = [sum(choice["logprobs"]["token_logprobs"]) for choice in four["choices"]]
    assert scores == sorted(scores, reverse=True)
    assert len({tuple(choice["token_ids"]) for choice in four["choices"]}) == 4
    assert [choice["text"] for choice in two["choices"]] == [choice["text"] for choice in four["choices"][:2]]
    assert [choice["index"] for choice in four["choices"]] == [0, 1, 2, 3]
    prompt = four["usage"]["prompt_tokens"]
    assert prompt == two["usage"]["prompt_tokens"] == short["usage"]["prompt_tokens"]
    assert four["usage"]["completion_tokens"] == 4 * 9
    assert two["usage"]["completion_tokens"] == 2 * 9
    assert chat.status_code == 200, chat.text
    assert len(chat.json()["choices"]) == 3


@pytest.mark.parametrize(
    ("route", "body", "field"),
    [("completions", {"stream": True}, "stream"), ("completions", {"temperature": 0.5}, "temperature"),
     ("completions", {"stop": "x"}, "stop"), ("completions", {"n": 3, "best_of": 2}, "best_of"),
     ("completions", {"best_of": 64}, "beam_width"), ("completions", {"vllm_xargs": {"dry": {}}}, "extra"),
     ("completions", {"frequency_penalty": 1}, "frequency_penalty"),
     ("completions", {"response_format": {"type": "json_object"}}, "response_format"),
     ("completions", {"use_beam_search": False, "length_penalty": 2}, "length_penalty"),
     ("completions", {"use_beam_search": False, "early_stopping": True}, "early_stopping"),
     ("chat/completions", {"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
     ("chat/completions", {"stream": True}, "stream")],
)  # fmt: skip
async def test_what_does_not_go_with_a_search(route: str, body: dict[str, Any], field: str) -> None:
    asked = {"prompt": "x"} if route == "completions" else {"messages": [{"role": "user", "content": "x"}]}
    async with hashed() as llm, client(llm) as c:
        answer = await c.post(f"/v1/{route}", json={**asked, "use_beam_search": True, "max_tokens": 4, **body})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, field), answer.text


async def test_a_search_outlives_its_engine() -> None:
    """It begins anew: nothing of it was told."""
    async with supervised(delay=0.01) as llm, client(llm) as c:
        undisturbed = await completed(c, **SEARCH | {"max_tokens": 40}, n=4)
        asked = asyncio.create_task(completed(c, **SEARCH | {"max_tokens": 40}, n=4))
        supervisor: Any = llm.client
        while not supervisor.client._streams:
            await asyncio.sleep(0.001)
        await asyncio.sleep(0.05)
        assert not asked.done()
        os.kill(supervisor.client.pid, signal.SIGKILL)
        assert (await asked)["choices"] == undisturbed["choices"]


# ------------------------------------------------------------------------------ several conversations at once

TALKS = [[{"role": "user", "content": text}] for text in ("one", "two", "three")]
BATCH = "/v1/chat/completions/batch"


async def test_a_choice_for_each_conversation() -> None:
    """What each would get alone, in their order; the usage is that of all."""
    fields = {"max_tokens": 6, "seed": 1, "logprobs": True, "top_logprobs": 2, "return_token_ids": True}
    async with hashed() as llm, client(llm) as c:
        alone = [(await c.post(BATCH.removesuffix("/batch"), json=fields | {"messages": one})).json() for one in TALKS]
        answer = await c.post(BATCH, json=fields | {"messages": TALKS})
    assert answer.status_code == 200, answer.text
    found = answer.json()
    assert (found["object"], found["model"]) == ("chat.completion", alone[0]["model"])
    assert found["choices"] == [one["choices"][0] | {"index": i} for i, one in enumerate(alone)]
    for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert found["usage"][name] == sum(one["usage"][name] for one in alone)


@pytest.mark.parametrize(
    ("body", "field", "words"),
    [
        ({"stream": True}, "stream", "Send each conversation to /v1/chat/completions"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools", "Send each"),
        ({"n": 2}, "n", "Send each"),
        ({"use_beam_search": True}, "use_beam_search", "Send each"),
        ({"messages": [TALKS[0], []]}, "messages.1", "at least 1"),
        ({"messages": TALKS[0]}, "messages.0", "array"),
        ({"messages": []}, "messages", "at least 1"),
        ({"messages": TALKS * 50}, "messages", "150 conversations are more than"),
        ({"messages": [*TALKS, [{"role": "user", "content": "x" * 10_000}]]}, None, "conversation 3: "),
        ({"max_tokens": 0}, "max_tokens", "equal to 1"),
    ],
    ids=str,
)
async def test_what_several_conversations_cannot_have(body: dict[str, Any], field: str | None, words: str) -> None:
    async with client(scripted("x")) as c:
        answer = await c.post(BATCH, json={"messages": TALKS} | body)
        error = answer.json()["error"]
        assert (answer.status_code, error["param"] if field is not None else None) == (400, field), error
        assert words in error["message"]
        fine = {"stream": False, "n": 1, "tools": [], "tool_choice": "none", "length_penalty": 1.0, "user": "u"}
        answer = await c.post(BATCH, json={"messages": TALKS} | fine)
        assert (answer.status_code, answer.headers["x-lmkit-warnings"]) == (200, "dropped: user")
