"""What answers say of their own making, and the stories of requests, on real schedules."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from lmkit.config import from_options
from lmkit_http.settings import ServerSettings
from lmkit_testing.serving import hashed, scripted

HELLO = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4, "temperature": 0}
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
ALL = {"X-Lmkit-Explain": "usage, cache"}
A, B, OPS = ({"Authorization": f"Bearer {key}"} for key in ("key-a", "key-b", "key-ops"))


def prompt(text: str, **more: Any) -> dict[str, Any]:
    return {"prompt": text, "max_tokens": 2, "temperature": 0, "ignore_eos": True, **more}


async def told(client: Any, body: dict[str, Any], **headers: str) -> dict[str, Any]:
    response = await client.post(TEXT, json=body, headers={**ALL, **headers})
    assert response.status_code == 200, response.text
    return response.json()["lmkit"]["choices"][0]


async def test_nobody_who_does_not_ask_is_told(connect: Any) -> None:
    client = connect(scripted("abc"))
    response = await client.post(CHAT, json=HELLO)
    assert "lmkit" not in response.json()
    timing = dict(part.split(";dur=") for part in response.headers["server-timing"].split(", "))
    assert list(timing) == ["queue", "prefill", "decode", "total"]
    assert float(timing["total"]) >= float(timing["decode"]) >= 0
    assert response.headers["x-request-id"] == response.json()["id"]
    response = await client.post(CHAT, json=HELLO, headers={"X-Lmkit-Explain": "everything"})
    assert response.status_code == 400
    assert response.json()["error"]["code"] == "explain"


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, HELLO), (TEXT, prompt("a")), ("/v1/messages", HELLO), ("/api/chat", HELLO | {"model": "m"}),
        ("/v1/responses", {"input": "Hello"}),
    ],
)  # fmt: skip
async def test_every_dialect_tells_whole_and_streamed(path: str, body: dict[str, Any], connect: Any) -> None:
    client = connect(scripted("abc"), ServerSettings(served_names=("m",)))
    body = {**body, "model": "m", "stream": False}
    body = {name: value for name, value in body.items() if path not in ("/api/chat", "/v1/responses") or name in
            ("messages", "input", "model", "stream")}  # fmt: skip
    response = await client.post(path, json=body, headers=ALL)
    assert response.status_code == 200, response.text
    whole = response.json()["lmkit"]
    assert whole["request_id"] == response.headers["x-request-id"]
    [choice] = whole["choices"]
    streamed = await client.post(path, json=body | {"stream": True}, headers=ALL)
    assert streamed.status_code == 200, streamed.text
    lines = [line.removeprefix("data: ") for line in streamed.text.splitlines() if '"usage"' in line]
    [said] = [json.loads(line) for line in lines if '"computed_tokens"' in line]
    said = said.get("lmkit", said)
    assert said["choices"][0]["usage"] == choice["usage"]
    assert choice["usage"]["computed_tokens"] == choice["usage"]["prompt_tokens"]
    assert said["request_id"] == streamed.headers["x-request-id"]


async def test_a_stream_of_openai_ends_with_a_chunk_that_its_client_reads(connect: Any) -> None:
    response = await connect(scripted("abc")).post(CHAT, json=HELLO | {"stream": True}, headers=ALL)
    events = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
    last = json.loads(events[-2])
    assert events[-1] == "[DONE]"
    assert (last["object"], last["choices"]) == ("chat.completion.chunk", [])
    assert last["lmkit"]["choices"][0]["usage"]["completion_tokens"] == 4


async def test_why_a_prompt_was_not_found(connect: Any) -> None:
    """Blocks of 4 tokens, one token a byte."""
    async with hashed(block_size=4) as llm:
        assert llm.facts.block_size == 4
        client = connect(llm)
        first = await told(client, prompt("abcdefghijkl"))
        assert first["cache"]["reason"] == "never-seen"
        assert first["prefill_steps"] >= 1
        again = await told(client, prompt("abcdefghijkl"))
        assert (again["cache"]["reason"], again["cache"]["cached_tokens"]) == ("all", 8)
        assert again["usage"]["computed_tokens"] == 4
        parts = await told(client, prompt("abcdefXhijklmnop"))
        assert (parts["cache"]["reason"], parts["cache"]["position"]) == ("diverges", 6)
        assert parts["cache"]["cached_tokens"] == 4
        assert (await told(client, prompt("abc")))["cache"]["reason"] == "short"
        scored = await told(client, prompt("abcdefghijkl", prompt_logprobs=1))
        assert scored["cache"]["reason"] == "not-searched"


async def test_what_was_evicted_is_said_to_be(connect: Any) -> None:
    async with hashed(num_blocks=12, block_size=4) as llm:
        client = connect(llm)
        await told(client, prompt("abcdefghijklmnop"))
        for i in range(4):
            await told(client, prompt(chr(ord("A") + i) * 32))
        again = await told(client, prompt("abcdefghijklmnop"))
        assert again["cache"]["cached_tokens"] < 12
        assert (again["cache"]["reason"], again["cache"]["position"]) == ("evicted", 16)


async def test_tenants_and_salts_learn_nothing_of_each_other(connect: Any) -> None:
    async with hashed(block_size=4) as llm:
        client = connect(llm, ServerSettings(api_keys=("key-a", "key-b"), admin_keys=("key-ops",)))
        await told(client, prompt("abcdefghijkl"), **A)
        other = await client.post(TEXT, json=prompt("abcdefghijkl"), headers={**ALL, **B})
        assert other.json()["lmkit"]["choices"][0]["cache"]["reason"] == "never-seen"
        id = other.json()["id"]
        assert (await client.get(f"/debug/requests/{id}", headers=A)).status_code == 404
        own = (await client.get(f"/debug/requests/{id}", headers=B)).json()
        assert own["choices"][0]["cache"]["reason"] == "never-seen"
        seen = (await client.get(f"/debug/requests/{id}", headers=OPS)).json()
        assert seen["choices"][0]["cache"]["reason"] == "other-tenant"
        assert seen["choices"][0]["cache"]["position"] == 12
        listed = (await client.get("/debug/requests", headers=A)).json()["requests"]
        assert id not in [one["id"] for one in listed]
        assert len((await client.get("/debug/requests", headers=OPS)).json()["requests"]) == 2
        salted = await told(client, prompt("abcdefghijkl", cache_salt="s"), **A)
        assert salted["cache"]["reason"] == "never-seen"


async def test_who_waited_for_whom(connect: Any) -> None:
    """Nothing makes two requests meet in the engine: they are sent until two of them do."""
    async with hashed(from_options({"max_rows": 1})) as llm:
        client = connect(llm)
        for i in range(50):
            bodies = [prompt(c * 8, max_tokens=200, request_id=f"r{i}-{c}") for c in "ab"]
            await asyncio.gather(*(client.post(TEXT, json=body) for body in bodies))
            stories = [(await client.get(f"/debug/requests/r{i}-{c}")).json() for c in "ab"]
            first, second = sorted((s["choices"][0] for s in stories), key=lambda c: c["seconds"]["queue"])
            if second["waited_for"]:
                break
        assert [o["id"] for o in second["waited_for"]] == [first["id"]]
        assert [o["id"] for o in first["kept_waiting"]] == [second["id"]]
        assert second["waited_for"][0]["completion_tokens"] == 200
        assert not second["kept_waiting"]
        assert first["decode_tokens_per_second"] > 0


async def test_what_a_client_gave_up_is_remembered_too(connect: Any) -> None:
    llm = scripted("abc" * 100, delay=0.05)
    client = connect(llm)
    task = asyncio.create_task(client.post(CHAT, json=HELLO | {"request_id": "gone", "max_tokens": 90}))
    while not llm.client.requests:
        await asyncio.sleep(0.01)
    running = (await client.get("/debug/requests/gone")).json()
    assert running["running"]
    assert running["choices"][0]["finish"] == "running"
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert (await client.get("/debug/requests/nobody")).status_code == 404
    story = (await client.get("/debug/requests/gone")).json()
    assert not story["running"]
    assert story["choices"][0]["finish"] == "abort"


async def test_balancers_get_the_load_in_a_header(connect: Any) -> None:
    client = connect(scripted("abc"))
    for body in (HELLO, HELLO | {"stream": True}):
        text = await client.post(CHAT, json=body, headers={"endpoint-load-metrics-format": "TEXT"})
        assert text.headers["endpoint-load-metrics"].startswith("TEXT named_metrics.kv_cache_usage_perc=0.0, ")
        load = await client.post(CHAT, json=body, headers={"endpoint-load-metrics-format": "JSON"})
        kind, _, report = load.headers["endpoint-load-metrics"].partition(" ")
        assert kind == "JSON"
        assert "num_requests_waiting" in json.loads(report)["named_metrics"]
    assert "endpoint-load-metrics" not in (await client.post(CHAT, json=HELLO)).headers
