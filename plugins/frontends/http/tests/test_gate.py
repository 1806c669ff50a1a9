"""Keys, hosts and sizes: nothing gets past the gate (S5)."""

from __future__ import annotations

import asyncio
import re
import socket
from typing import Any

import httpx
import pytest
from lmkit.api import ConfigError
from lmkit_http.access import Access
from lmkit_http.app import build_app
from lmkit_http.listening import PortInUse, bind, check_address, is_loopback
from lmkit_http.run import known_to
from lmkit_http.settings import ServerSettings
from lmkit_testing.serving import listening, scripted

KEYS = ServerSettings(port=0, api_keys=("secret", "other"))
MACHINE = socket.gethostname()
HELLO = {"messages": [{"role": "user", "content": "Hello"}]}
ODD = [  # beside the routes
    "/nope", "/docs", "/openapi.json", "//v1/models", "/live/", "/v1/load_lora_adapter", "/v1/unload_lora_adapter",
    "/live/x", "/ready/../metrics", "/LIVE", "/%2e/live", "/live%2f..%2fmetrics", "/live;x", "/v1/models/",
]  # fmt: skip


@pytest.mark.parametrize("method", ["GET", "POST", "HEAD", "OPTIONS", "PUT", "DELETE", "TRACE"])
async def test_everything_needs_the_key(connect: Any, method: str) -> None:
    client = connect(scripted("a"), KEYS)
    for path in [*ODD, *routes()]:
        response = await client.request(method, httpx.URL("http://localhost", raw_path=path.encode()))
        assert response.status_code == 401, (path, response.text)
        assert response.headers["www-authenticate"] == "Bearer", path


def routes() -> set[str]:
    """The paths of all routes, those of the installed dialects among them, but those that are open."""
    paths = {re.sub(r"{[^}]*}", "x", getattr(route, "path", "")) for route in build_app(scripted("a"), KEYS).routes}
    assert {"/v1/chat/completions", "/v1/models/x", "/metrics", "/live", "/ready"} <= paths
    return paths - {"/live", "/ready", "/health", "/ping"}


@pytest.mark.parametrize(
    ("header", "status"),
    [
        ("Bearer secret", 200), ("bearer other", 200), ("Bearer  secret ", 200), ("Bearer wrong", 401), ("secret", 401),
        ("Basic secret", 401), ("Bearer", 401), ("Bearer ", 401), ("Bearer secret other", 401), ("Bearer sécret", 401),
    ],
)  # fmt: skip
async def test_keys(connect: Any, header: str, status: int) -> None:
    client = connect(scripted("a"), KEYS)
    response = await client.get("/v1/models", headers={"Authorization": header.encode()})
    assert response.status_code == status


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ([("x-api-key", "secret")], 200), ([("X-Api-Key", " other ")], 200), ([("x-api-key", "wrong")], 401),
        ([("x-api-key", "")], 401), ([("x-api-key", "Bearer secret")], 401),
        ([("x-api-key", "secret"), ("authorization", "Bearer secret")], 200),
        ([("x-api-key", "secret"), ("authorization", "Bearer other")], 200),
        ([("x-api-key", "secret"), ("authorization", "Basic secret")], 200),
        ([("x-api-key", "secret"), ("x-api-key", "other")], 200),
        ([("authorization", "Bearer secret"), ("x-api-key", "sk-of-another-server")], 200),
        ([("authorization", "Bearer sk-of-another-server"), ("x-api-key", "secret")], 200),
        ([("authorization", "Bearer secret"), ("x-api-key", "")], 200),
        ([("authorization", "Basic dXNlcjpwYXNz"), ("x-api-key", "secret")], 200),
        ([("authorization", "Bearer wrong"), ("authorization", "Bearer secret")], 200),
        ([("authorization", "Bearer wrong"), ("x-api-key", "wrong too")], 401),
        ([("authorization", "Basic secret"), ("x-api-key", "")], 401),
        ([("x-api-key", f"wrong{i}") for i in range(20)] + [("x-api-key", "secret")], 401),
    ],
)  # fmt: skip
async def test_keys_in_a_header_of_their_own(connect: Any, headers: list[tuple[str, str]], status: int) -> None:
    """One right key is enough, whatever else clients and proxies send; but only a few are looked at."""
    client = connect(scripted("a"), KEYS)
    assert (await client.get("/v1/models", headers=headers)).status_code == status


async def test_probes_are_open(connect: Any) -> None:
    client = connect(scripted("a"), KEYS)
    for path in ("/live", "/ready", "/health", "/ping"):
        assert (await client.get(path)).status_code == 200
        assert (await client.head(path)).status_code in (200, 405)
        assert (await client.post(path)).status_code == 401


async def test_of_two_right_keys_the_administrators_counts_else_the_first() -> None:
    access = Access(ServerSettings(api_keys=("alice", "bob"), admin_keys=("root",)))
    scope = {"path": "/v1/models", "method": "GET"}

    def tenant(*keys: bytes | None) -> str:
        return access.check(scope, list(keys), None, b"x").tenant

    assert tenant(b"alice", b"bob") == tenant(b"alice") != tenant(b"bob") == tenant(b"wrong", b"bob", b"alice")
    assert access.check(scope, [b"alice", b"root"], None, b"x").admin
    assert not access.check(scope, [b"alice", b"wrong"], None, b"x").admin


async def test_hosts(connect: Any) -> None:
    client = connect(scripted("a"), ServerSettings(allowed_hosts=("localhost", "[::1]", "127.0.0.1")))
    for host, status in [
        ("localhost", 200),
        ("127.0.0.1:80", 200),
        ("[::1]:9", 200),
        ("evil.com", 421),
        ("localhost.evil", 421),
    ]:
        response = await client.get("/v1/models", headers={"Host": host})
        assert response.status_code == status, host


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost", 200), ("localhost.:8000", 200), ("LOCALHOST:1", 200), ("127.0.0.1:80", 200), ("[::1]:9", 200),
        ("host.docker.internal:8000", 200), ("app.localhost", 200), ("printer.local", 200), ("gpu.corp.internal", 200),
        ("192.168.1.7:8000", 200), ("10.0.0.1", 200), ("[fe80::1]", 200), (MACHINE, 200), (f"{MACHINE}:8000", 200),
        ("evil.com", 421), ("localhost.evil.com", 421), ("127.0.0.1.evil.com", 421), ("evillocal", 421), ("", 421),
        ("1.2.3", 421), ("0x7f000001", 421), ("2130706433", 421), ("127.1", 421), ("local", 421), ("[evil.com]", 421),
        ("127.0.0.1@evil.com", 421), ("internal", 421),
    ],
)  # fmt: skip
async def test_names_that_no_stranger_can_have(connect: Any, host: str, status: int) -> None:
    """Without a key: a page of the web cannot make such a name mean this machine, and an address is no name."""
    client = connect(scripted("a"), known_to(ServerSettings()))
    for path in ("/v1/models", "/live"):
        assert (await client.get(path, headers={"Host": host})).status_code == status


async def test_hosts_that_are_named_are_the_only_ones(connect: Any) -> None:
    settings = ServerSettings(allowed_hosts=(".example.com", "api.example.org"))
    assert known_to(settings) == settings
    client = connect(scripted("a"), settings)
    for host, status in [
        ("api.example.org", 200), ("a.b.example.com:1", 200), ("example.com", 421), ("notexample.com", 421),
        ("127.0.0.1", 421), ("x.localhost", 421),
    ]:  # fmt: skip
        assert (await client.get("/v1/models", headers={"Host": host})).status_code == status, host


async def test_every_answer_has_an_id(connect: Any) -> None:
    client = connect(scripted("a"), ServerSettings(api_keys=("secret",)), headers={"Authorization": "Bearer secret"})
    for method, path, body in [
        ("GET", "/health", None), ("GET", "/live", None), ("GET", "/v1/models", None), ("GET", "/nope", None),
        ("GET", "/metrics", None), ("POST", "/v1/chat/completions", HELLO), ("POST", "/v1/chat/completions", {}),
        ("GET", "/", None), ("DELETE", "/v1/models", None), ("POST", "/tokenize", {"prompt": "a"}),
    ]:  # fmt: skip
        response = await client.request(method, path, json=body)
        assert len(response.headers.get_list("x-request-id")) == 1, path
        given = await client.request(method, path, json=body, headers={"x-request-id": "mine-1"})
        assert given.headers.get_list("x-request-id") == ["mine-1"] or body == HELLO, path
        bad = await client.request(method, path, json=body, headers={b"x-request-id": b"a\xffb"})
        assert bad.headers["x-request-id"] != "a\xffb"
    assert (await client.get("/v1/models", headers={"Authorization": "Bearer no"})).headers["x-request-id"]


async def test_sizes(connect: Any) -> None:
    client = connect(scripted("a"), ServerSettings(max_body=1000, max_headers=2000))
    big = {"messages": [{"role": "user", "content": "x" * 2000}]}
    assert (await client.post("/v1/chat/completions", json=big)).status_code == 413

    async def endless() -> Any:
        while True:
            yield b"x" * 100

    response = await client.post("/v1/chat/completions", content=endless())
    assert response.status_code == 413
    assert (await client.get("/live", headers={"X-Big": "y" * 3000})).status_code == 431
    for encoding in ("br", "gzip, gzip", "compress", "identity, gzip", ""):
        response = await client.post("/v1/chat/completions", json=HELLO, headers={"Content-Encoding": encoding})
        assert response.status_code == (415 if encoding else 200)
        if encoding:
            assert {"gzip", "deflate"} <= set(response.headers["accept-encoding"].split(", "))
    response = await client.post("/v1/chat/completions", content=b"{}", headers={"Content-Length": "1e3"})
    assert response.status_code == 413


async def test_bodies_that_do_not_come(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lmkit_http.body.BODY_SECONDS", 0.1)
    async with listening(scripted("a")) as url:
        host, port = url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
        assert (await asyncio.wait_for(reader.readline(), 5)).split()[1] == b"408"
        writer.close()
        _, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
        writer.close()  # in the middle of the body
        async with httpx.AsyncClient(base_url=url) as client:
            assert (await client.get("/live")).status_code == 200


async def test_on_a_real_socket() -> None:
    """Request lines that clients would clean up first."""
    async with listening(scripted("a"), KEYS) as url, httpx.AsyncClient(base_url=url) as client:
        host, port = url.removeprefix("http://").split(":")
        for target in (b"//v1/models", b"/v1/../live", b"/live/../metrics", b"http://x/metrics", b"/live\\", b"*"):
            for method in (b"GET", b"OPTIONS", b"HEAD"):
                reader, writer = await asyncio.open_connection(host, int(port))
                writer.write(method + b" " + target + b" HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
                status = (await reader.read()).split(b" ", 2)[1]
                writer.close()
                assert status in (b"401", b"400"), (method, target, status)
        headers = {"Authorization": "Bearer secret", "X-Forwarded-Prefix": "/live"}
        assert (await client.get("/v1/models", headers=headers)).status_code == 200
        assert (await client.get("/metrics", headers={"X-Original-URL": "/live", "Host": "live"})).status_code == 401


@pytest.mark.parametrize(
    ("host", "ok"),
    [("127.0.0.1", True), ("localhost", True), ("::1", True), ("0.0.0.0", False), ("example.com", False)],
)
def test_public_addresses_need_a_key(host: str, ok: bool) -> None:
    assert is_loopback(host) == ok
    if ok:
        check_address(ServerSettings(host=host))
    else:
        with pytest.raises(ConfigError, match="no API key"):
            check_address(ServerSettings(host=host))
        check_address(ServerSettings(host=host, insecure=True))
        check_address(ServerSettings(host=host, api_keys=("k",)))


def test_port_in_use() -> None:
    with bind(ServerSettings(port=0)) as sock:
        sock.listen()
        port = sock.getsockname()[1]
        with pytest.raises(PortInUse, match=str(port)):
            bind(ServerSettings(port=port))


def test_keys_are_not_shown() -> None:
    assert "secret" not in repr(KEYS)
