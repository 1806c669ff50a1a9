"""Products of choices, prompts, tokens and log-probabilities: bounded before anything is computed, whoever is asked."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from lmkit.api import EngineBusy, PoolerInfo
from lmkit_http import size
from lmkit_http.admission import RateLimited
from lmkit_http.backlog import Backlogs
from lmkit_http.settings import ServerSettings
from lmkit_testing.serving import listening, scripted
from msgspec.structs import replace

SAY = [{"role": "user", "content": "Hello"}]
CHAT = "/v1/chat/completions"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": [[5] * 2040] * 128, "echo": True, "logprobs": 20, "max_tokens": 1}),
        ("/v1/completions", {"prompt": [[5] * 2040] * 64, "prompt_logprobs": 20, "max_tokens": 1}),
        ("/v1/completions", {"prompt": "a" * 2000, "n": 64, "echo": True, "logprobs": 20, "max_tokens": 0}),
        ("/v1/completions", {"prompt": "a", "n": 64, "logprobs": 20, "max_tokens": 4000}),
        ("/v1/completions", {"prompt": "a", "best_of": 64, "logprobs": 20, "max_tokens": 4000}),
        (CHAT, {"messages": SAY, "n": 64, "logprobs": True, "top_logprobs": 20, "max_tokens": 4000}),
        (CHAT, {"messages": SAY, "n": 64, "logprobs": True, "top_logprobs": 20, "max_completion_tokens": 3000}),
        ("/v1/chat/completions/batch",
         {"messages": [SAY] * 64, "logprobs": True, "top_logprobs": 20, "max_tokens": 4000}),
        ("/invocations", {"messages": SAY, "n": 64, "logprobs": True, "top_logprobs": 20, "max_tokens": 4000}),
        ("/inference/v1/generate",
         {"token_ids": [5] * 50, "sampling_params": {"n": 64, "logprobs": 20, "max_tokens": 4000}}),
    ],
)  # fmt: skip
async def test_products_of_fields_are_refused_before_the_engine_sees_them(
    connect: Any, path: str, body: dict[str, Any], stream: bool
) -> None:
    llm = scripted("abc")
    if stream and ("prompt_logprobs" in body or "best_of" in body or path.endswith("batch")):
        pytest.skip("has no stream")
    response = await connect(llm).post(path, json=body | ({"stream": True} if stream else {}))
    if response.status_code == 404:
        pytest.skip("is not spoken here")
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert (error["code"], error["param"]) == ("answer-too-large", "logprobs")
    assert f"{size.MAX_LOGPROBS_SHOWN}" in error["message"]
    assert "max_tokens" in error["message"] or "prompt" in error["message"]
    assert not llm.client.requests  # type: ignore[attr-defined]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_length_that_was_left_open_is_cut_to_what_fits(
    connect: Any, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    monkeypatch.setattr(size, "MAX_LOGPROBS_SHOWN", 4 * 6 * 10)
    llm = scripted("a" * 100)
    body = {"messages": SAY, "n": 4, "logprobs": True, "top_logprobs": 5, "stream": stream}
    response = await connect(llm).post(CHAT, json=body)
    assert response.status_code == 200
    assert [r.params.max_tokens for r in llm.client.requests] == [10] * 4  # type: ignore[attr-defined]
    if not stream:
        choices = response.json()["choices"]
        assert [c["finish_reason"] for c in choices] == ["length"] * 4
        assert [len(c["logprobs"]["content"]) for c in choices] == [10] * 4
    assert (await connect(llm).post(CHAT, json=body | {"max_tokens": 10})).status_code == 200
    assert (await connect(llm).post(CHAT, json=body | {"max_tokens": 11})).status_code == 400
    assert (await connect(llm).post(CHAT, json=body | {"min_tokens": 11})).status_code == 400


async def test_ordinary_answers_are_not_shortened(connect: Any) -> None:
    llm = scripted("abc")
    for body in ({"n": 64}, {"logprobs": True, "top_logprobs": 20}, {"n": 8, "logprobs": True}):
        assert (await connect(llm).post(CHAT, json={"messages": SAY, **body})).status_code == 200
    lengths = {r.params.max_tokens for r in llm.client.requests}  # type: ignore[attr-defined]
    assert len(lengths) == 1
    assert min(lengths) > 4000


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ({"input": ["a" * 300] * 2048, "task": "token_embed"}, 400),
        ({"input": ["a" * 10] * 8, "task": "token_embed"}, 200),
        ({"input": ["a" * 300] * 2048, "task": "embed"}, 200),
        ({"input": ["a" * 300] * 2048, "task": "token_embed", "dimensions": 2}, 200),
    ],
)
async def test_vectors_are_counted_too(connect: Any, body: dict[str, Any], status: int) -> None:
    llm = scripted("abc")
    llm.client.facts = replace(llm.facts, pooler=PoolerInfo("embed", 64))
    response = await connect(llm, timeout=60).post("/pooling", json=body)
    assert response.status_code == status, response.text[:300]
    if status == 400:
        assert response.json()["error"]["code"] == "answer-too-large"
        assert not llm.client.requests  # type: ignore[attr-defined]


class Running:
    """An answer of a size."""

    def __init__(self, tenant: str, held: int) -> None:
        self.tenant, self.held, self.backlog, self.error = tenant, held, 0, ""

    def fail(self, error: Any) -> None:
        self.error, self.held = error.code, 0


def test_answers_that_are_being_made_count_against_their_key() -> None:
    mib = 1 << 20
    backlogs = Backlogs([Running("alice", 200 * mib), Running("bob", 10 * mib)])
    backlogs.check_room("bob", 200 * mib, several=True)
    backlogs.check_room("alice", 0, several=True)
    with pytest.raises(RateLimited, match="this key"):
        backlogs.check_room("alice", 100 * mib, several=True)
    backlogs.check_room("alice", 100 * mib, several=False)
    with pytest.raises(EngineBusy, match="210 MiB"):
        backlogs.check_room("carol", 400 * mib, several=True)


def test_the_largest_answer_of_the_key_that_takes_most_is_ended() -> None:
    mib = 1 << 20
    answers = [Running(key, num * mib) for key, num in [("a", 150), ("b", 200), ("a", 160), ("a", 30), ("b", 1)]]
    Backlogs(answers)._bound_held()
    assert [a.error for a in answers] == ["", "", "answer-memory", "", ""]
    Backlogs(answers)._bound_held()
    assert [a.error for a in answers] == ["", "", "answer-memory", "", ""]


async def test_an_answer_that_grows_too_large_ends_with_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Others of the same server go on."""
    monkeypatch.setattr("lmkit_http.backlog._LOOK", 0.01)
    monkeypatch.setattr("lmkit_http.backlog.MAX_HELD", 1 << 20)
    llm = scripted("x" * 4000, "x" * 100, delay=0.001)
    async with listening(llm) as url, httpx.AsyncClient(base_url=url, timeout=60) as client:
        large = {"prompt": "a", "logprobs": 20, "max_tokens": 4000}
        first = asyncio.create_task(client.post("/v1/completions", json=large))
        await asyncio.sleep(0.01)
        second = await client.post("/v1/completions", json={"prompt": "a", "max_tokens": 100})
        response = await first
        assert (second.status_code, response.status_code) == (200, 503)
        assert response.json()["error"]["code"] == "answer-memory"


async def test_lines_of_a_batch_are_bounded_alike(tmp_path: Any) -> None:
    from lmkit_http.background import Background
    from lmkit_http.dialect import Answer, Incoming
    from lmkit_http.dialects import installed_dialects

    kept: list[Any] = []
    dialects = installed_dialects()
    llm = scripted("abc")
    async with listening(llm, ServerSettings(port=0), lambda app: kept.append(app.state.backend), dialects):
        body = {"messages": SAY, "n": 64, "logprobs": True, "top_logprobs": 20, "max_tokens": 4000}
        answer = await Background(kept[0], dialects).answer(Incoming(f"POST {CHAT}", json.dumps(body).encode()))
        assert isinstance(answer, Answer)
        assert answer.status == 400
        assert isinstance(answer.body, bytes)
        assert json.loads(answer.body)["error"]["code"] == "answer-too-large"
        assert not llm.client.requests  # type: ignore[attr-defined]


def test_turns_without_log_probabilities_count_for_nothing() -> None:
    from lmkit.api import EngineRequest, SamplingParams
    from lmkit_python.front.ask import TextAsk

    params = SamplingParams(max_tokens=4000)
    turn: Any = SimpleNamespace(request=EngineRequest("a", [1] * 4000, params), stream=SimpleNamespace(params=params))
    assert size.bound_answer(TextAsk(prompts=["a"], n=64), [turn] * 64, scripted("a").facts) == 0
