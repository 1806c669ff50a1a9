"""Who may ask for what: administrators, tenants, pages of other sites; and what the server says of its requests."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from lmkit.api import ConfigError, SchedStats
from lmkit_http.access_log import line
from lmkit_http.app import build_app
from lmkit_http.settings import OPENABLE, ServerSettings
from lmkit_testing.serving import listening, scripted
from msgspec import structs

HELLO = {"messages": [{"role": "user", "content": "Hello"}]}
ALICE, BOB, ROOT = ({"Authorization": f"Bearer {key}"} for key in ("alice", "bob", "root"))
KEYS = ServerSettings(port=0, api_keys=("alice", "bob"), admin_keys=("root",))
CHAT = "/v1/chat/completions"


def _loading(llm: Any) -> Any:
    llm.client.facts = structs.replace(llm.client.facts, loads_adapters=True)
    return llm


@pytest.mark.parametrize(
    ("settings", "headers", "status"),
    [
        (KEYS, ALICE, 403),
        (KEYS, ROOT, 200),
        (ServerSettings(api_keys=("alice",)), ALICE, 403),
        (ServerSettings(admin_keys=("root",)), {}, 403),
        (ServerSettings(admin_keys=("root",)), ROOT, 200),
        (ServerSettings(), {}, 200),
    ],
)
async def test_only_an_administrator_changes_the_server(connect: Any, settings: Any, headers: Any, status: int) -> None:
    llm = _loading(scripted("a"))

    async def set_adapter(name: str, path: str | None) -> None:
        changed.append(name)

    changed: list[str] = []
    llm.client.set_adapter = set_adapter
    client = connect(llm, settings, headers=headers)
    for path, body in [("load", {"lora_name": "x", "lora_path": "/p"}), ("unload", {"lora_name": "x"})]:
        response = await client.post(f"/v1/{path}_lora_adapter", json=body)
        assert response.status_code == status, response.text
    assert changed == (["x", "x"] if status == 200 else [])
    if status == 403:
        assert "--admin-key" in response.json()["error"]["message"]


async def test_an_administrator_may_do_what_clients_do(connect: Any) -> None:
    client = connect(scripted("a"), KEYS, headers=ROOT)
    assert (await client.post(CHAT, json=HELLO)).status_code == 200


@pytest.mark.parametrize(
    ("settings", "headers", "priority", "status"),
    [
        (KEYS, ALICE, -1, 403), (KEYS, ALICE, 0, 200), (KEYS, ALICE, 7, 200), (KEYS, ROOT, -(1 << 31), 200),
        (ServerSettings(), {}, -1, 403), (ServerSettings(open_priority=True), {}, -1, 200),
        (ServerSettings(api_keys=("alice",), open_priority=True), ALICE, -1, 200),
    ],
)  # fmt: skip
async def test_nobody_jumps_the_queue_unasked(
    connect: Any, settings: Any, headers: Any, priority: int, status: int
) -> None:
    llm = scripted("a")
    client = connect(llm, settings, headers=headers)
    for path, body in [(CHAT, HELLO), ("/v1/completions", {"prompt": "x"})]:
        response = await client.post(path, json={**body, "priority": priority})
        assert response.status_code == status, response.text
    assert [r.priority for r in llm.client.requests] == ([priority] * 2 if status == 200 else [])


async def test_each_key_has_a_prefix_cache_of_its_own(connect: Any) -> None:
    llm = scripted("a")
    client = connect(llm, KEYS)
    for headers in (ALICE, BOB, ALICE, ROOT):
        for extra in ({}, {"cache_salt": "s"}):
            assert (await client.post(CHAT, json={**HELLO, **extra}, headers=headers)).status_code == 200
    salts = [r.cache_salt for r in llm.client.requests]
    assert salts[0:2] == salts[4:6]  # the same key, the same cache
    assert len(set(salts)) == 6
    assert salts[6:] == [None, "s"]
    tenants = [r.tenant for r in llm.client.requests]  # who is on whose account, for policies of schedulers
    assert len(set(tenants[:6])) == 2
    assert tenants[4:] == [*tenants[:2], "", ""]
    assert not any("alice" in (salt or "") for salt in salts)


@pytest.mark.parametrize("keys", [(), ("alice",)])
async def test_one_tenant_shares_one_cache(connect: Any, keys: tuple[str, ...]) -> None:
    llm = scripted("a")
    client = connect(llm, ServerSettings(api_keys=keys), headers=ALICE)
    await client.post(CHAT, json=HELLO)
    await client.post(CHAT, json=HELLO | {"cache_salt": "s"})
    assert [r.cache_salt for r in llm.client.requests] == [None, "s"]


@pytest.mark.parametrize(
    ("origin", "status"),
    [
        (None, 200), ("http://localhost", 200), ("https://localhost", 200), ("http://evil.com", 403), ("null", 403),
        ("http://localhost.evil.com", 403), ("http://localhost:81", 403), ("http://[", 403), ("", 403),
    ],
)  # fmt: skip
@pytest.mark.parametrize("content_type", ["application/json", "text/plain"])
async def test_pages_of_other_sites_get_nothing(
    connect: Any, origin: str | None, status: int, content_type: str
) -> None:
    llm = scripted("a")
    client = connect(llm, ServerSettings())
    headers = {"Content-Type": content_type} | ({} if origin is None else {"Origin": origin})
    assert (await client.post(CHAT, json=HELLO, headers=headers)).status_code == status
    assert len(llm.client.requests) == (status == 200)


async def test_with_a_key_the_key_decides(connect: Any) -> None:
    client = connect(scripted("a"), KEYS)
    headers = {"Origin": "http://proxy.example"}
    assert (await client.post(CHAT, json=HELLO, headers=headers | ALICE)).status_code == 200
    assert (await client.post(CHAT, json=HELLO, headers=headers)).status_code == 401


@pytest.mark.parametrize("origins", [("http://app.example",), ("*",)])
@pytest.mark.parametrize("keys", [(), ("alice",)])
async def test_named_sites_may_ask(connect: Any, origins: tuple[str, ...], keys: tuple[str, ...]) -> None:
    client = connect(scripted("a"), ServerSettings(cors_origins=origins, api_keys=keys))
    origin = {"Origin": "http://app.example"}
    asked = origin | {
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization,content-type,x-stainless-lang",
    }
    before = await client.options(CHAT, headers=asked)  # browsers send no key with it
    assert before.status_code == 200, before.text
    assert before.headers["access-control-allow-origin"] in ("*", "http://app.example")
    assert "x-stainless-lang" in before.headers["access-control-allow-headers"]
    response = await client.post(CHAT, json=HELLO, headers=origin | ALICE)
    assert response.status_code == 200
    assert response.headers["access-control-allow-origin"] in ("*", "http://app.example")
    if origins != ("*",):
        other = await client.options(CHAT, headers=asked | {"Origin": "http://evil.com"})
        assert "access-control-allow-origin" not in other.headers


async def test_paths_that_may_be_open(connect: Any) -> None:
    client = connect(scripted("a"), ServerSettings(api_keys=("alice",), open_paths=("/metrics", "/health")))
    for path in ("/metrics", "/health", "/ping"):
        assert (await client.get(path)).status_code == 200
        assert (await client.post(path)).status_code == 401
    for path in ("/version", "/v1/models", "/metrics/"):
        assert (await client.get(path)).status_code == 401


@pytest.mark.parametrize("path", ["/v1/models", "/", "metrics", "/debug/plan"])
def test_paths_that_may_not(path: str) -> None:
    with pytest.raises(ConfigError, match="always needs the key") as error:
        ServerSettings(open_paths=(path,))
    assert all(known in error.value.fix for known in OPENABLE)


async def test_the_page_asks_for_the_key(connect: Any) -> None:
    client = connect(scripted("a"), KEYS)
    response = await client.get("/", headers={"Accept": "text/html,*/*"})
    assert response.status_code == 401
    assert "API key of this server" in response.text
    assert "frame-ancestors 'none'" in response.headers["content-security-policy"]
    assert (await client.get("/", headers={"Accept": "application/json"})).json()["error"]["code"] == "invalid_api_key"
    assert (await client.get("/v1/models", headers={"Accept": "text/html"})).json()["error"]["code"]
    assert (await client.get("/", headers=ALICE)).status_code == 200


async def test_balancers_and_tokenizers(connect: Any) -> None:
    llm = scripted("a")
    client = connect(llm)
    assert (await client.get("/load")).json() == {
        "server_load": 0, "kv_cache_usage_perc": 0, "num_requests_waiting": 0, "num_requests_running": 0,
    }  # fmt: skip
    info = (await client.get("/tokenizer_info")).json()
    assert (info["vocab_size"], info["eos_token"]) == (llm.text.tokenizer.vocab_size, "<|end|>")
    assert info["chat_template"] == llm.text.tokenizer.chat_template


async def test_several_names_of_one_model(connect: Any) -> None:
    llm = scripted("a")
    client = connect(llm, ServerSettings(served_names=("big", "alias")))
    assert [m["id"] for m in (await client.get("/v1/models")).json()["data"]] == ["big", "alias"]
    assert (await client.get("/v1/models/alias")).json()["id"] == "alias"
    for name, status in [("big", 200), ("alias", 200), (llm.facts.model, 404)]:
        response = await client.post(CHAT, json={**HELLO, "model": name})
        assert response.status_code == status
    assert "'big' or 'alias'" in response.json()["error"]["message"]


async def test_every_request_leaves_a_line(connect: Any, caplog: Any) -> None:
    caplog.set_level(logging.INFO, "lmkit")
    client = connect(scripted("a"), KEYS)
    await client.post(CHAT, json={"messages": [{"role": "user", "content": "private"}]}, headers=ALICE)
    await client.post(CHAT, json=HELLO)
    await client.post(CHAT, json={**HELLO, "top_p": 7}, headers=ALICE)
    await client.get("/nope%0aPOST /v1/fake 200", headers=ALICE)
    await client.get("/live")
    lines = [r.getMessage() for r in caplog.records if r.name == "lmkit.access"]
    assert [text.split(" ms")[0].rsplit(" ", 2)[1] for text in lines] == ["200", "401", "400", "404"]
    assert all(CHAT in text for text in lines[:3])
    assert "top_p" in caplog.text
    assert all("\n" not in text for text in lines)
    assert "private" not in caplog.text
    assert "alice" not in caplog.text


async def test_a_line_for_a_client_that_left(caplog: Any) -> None:
    import asyncio

    caplog.set_level(logging.INFO, "lmkit.access")
    llm = scripted("a" * 50, delay=0.05)
    async with listening(llm) as url:
        host, port = url.removeprefix("http://").split(":")
        _, writer = await asyncio.open_connection(host, int(port))
        body = b'{"messages": [{"role": "user", "content": "x"}]}'
        head = f"POST {CHAT} HTTP/1.1\r\nHost: {host}:{port}\r\nContent-Length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body)
        while not llm.client.requests:
            await asyncio.sleep(0.01)
        writer.close()
        while not caplog.records:
            await asyncio.sleep(0.01)
    assert " 499 " in caplog.records[0].getMessage()


def test_figures() -> None:
    before = SchedStats(num_prompt_tokens=100, num_output_tokens=10, num_cache_queries=100, num_cached_tokens=50)
    now = SchedStats(
        num_running=3, num_waiting=1, num_blocks=10, num_free_blocks=4, num_prompt_tokens=300, num_output_tokens=110,
        num_cache_queries=300, num_cached_tokens=100,
    )  # fmt: skip
    text = "running 3, waiting 1, prompt 20.0 tok/s, output 10.0 tok/s, KV 60%, prefix hits 25%"
    assert line(before, now, 10.0) == text
    assert "output 10.0 tok/s" in line(now, SchedStats(num_output_tokens=100), 10.0)  # of a new engine
    assert line(now, SchedStats(num_drafts=8, num_accepted=6), 10.0).endswith("prefix hits 0%, guesses right 75%")
    assert "prefix hits 0%" in line(now, now, 10.0)


def test_settings_hide_both_kinds_of_keys() -> None:
    assert "root" not in repr(KEYS)
    assert build_app(scripted("a"), KEYS) is not None
    with pytest.raises(ConfigError):
        ServerSettings(admin_keys=("",))


@pytest.mark.parametrize("path", ["/live", "/ready", "/health", "/ping", "/metrics", "/load"])
async def test_probes_leave_no_lines(connect: Any, caplog: pytest.LogCaptureFixture, path: str) -> None:
    caplog.set_level(logging.INFO, "lmkit.access")
    assert (await connect(scripted("a")).get(path)).status_code == 200
    assert not caplog.records
    client = connect(scripted("a"))
    client._transport.app.state.backend.draining = True
    if path in ("/ready", "/health"):
        assert (await client.get(path)).status_code == 503
        assert len(caplog.records) == 1
