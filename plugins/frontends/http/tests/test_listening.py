"""Where a server listens: Unix sockets, TLS whose certificate is renewed, a place below the root of a site."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import socket
import ssl
import stat
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
from lmkit.api import ConfigError
from lmkit_http.app import build_app
from lmkit_http.listening import Certificate, PortInUse, bind, bind_beside, release, url_of
from lmkit_http.protocol import BoundedProtocol
from lmkit_http.run import run_app, short_turns
from lmkit_http.settings import ServerSettings
from lmkit_testing.serving import scripted

CHAT = {"messages": [{"role": "user", "content": "Hello"}]}
needs_openssl = pytest.mark.skipif(shutil.which("openssl") is None, reason="needs the openssl program")


@asynccontextmanager
async def serving(settings: ServerSettings, certificate: Certificate | None = None) -> AsyncIterator[str]:
    sock, ready = bind(settings), asyncio.Event()
    task = asyncio.create_task(
        run_app(scripted("Good day."), settings, sock, lambda *_: ready.set(), certificate=certificate)
    )
    waiting = asyncio.create_task(ready.wait())
    try:
        await asyncio.wait((task, waiting), timeout=30, return_when=asyncio.FIRST_COMPLETED)
        assert ready.is_set(), task
        yield url_of(sock, settings)
    finally:
        waiting.cancel()
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
        release(sock)


def has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as sock:
            sock.bind(("::1", 0))
    except OSError:
        return False
    return True


def pair(folder: Path, name: str) -> tuple[str, str]:
    """A certificate that vouches for itself, with its key."""
    cert, key = str(folder / f"{name}.pem"), str(folder / f"{name}.key")
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2",
         "-subj", f"/CN={name}", "-addext", "subjectAltName=IP:127.0.0.1", "-keyout", key, "-out", cert],
        check=True, capture_output=True,
    )  # fmt: skip
    return cert, key


def test_many_connections_are_taken_in_few_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """A round is as long as a busy server takes for all that has come; who is new does not wait for a hundred."""
    uvloop = pytest.importorskip("uvloop")
    before, made = BoundedProtocol.connection_made, []

    def count(self: Any, transport: Any) -> None:
        made.append(self)
        before(self, transport)

    monkeypatch.setattr(BoundedProtocol, "connection_made", count)

    async def rounds() -> int:
        settings, ready = ServerSettings(port=0), asyncio.Event()
        sock = bind(settings)
        task = asyncio.create_task(run_app(scripted("Good day."), settings, sock, lambda *_: ready.set()))
        await ready.wait()
        address = sock.getsockname()
        clients = [socket.create_connection(address) for _ in range(600)]
        num = 0
        while len(made) < len(clients):
            await asyncio.sleep(0)
            num += 1
        for client in clients:
            client.close()
        signal.raise_signal(signal.SIGTERM)
        await task
        with pytest.raises(OSError, match="refused"):  # none of its listeners is left
            socket.create_connection(address)
        return num

    assert uvloop.run(asyncio.wait_for(rounds(), 60)) < 15


@pytest.mark.skipif(not has_ipv6(), reason="this machine has no ::1")
async def test_localhost_means_both_families() -> None:
    settings = ServerSettings(port=0)
    async with serving(settings) as url:
        port = url.rpartition(":")[2]
        async with httpx.AsyncClient() as client:
            for host in ("127.0.0.1", "[::1]", "localhost"):
                assert (await client.get(f"http://{host}:{port}/live")).status_code == 200
    with pytest.raises(OSError):
        socket.create_connection(("::1", int(port)))
    async with serving(ServerSettings(host="127.0.0.1", port=0)) as url, httpx.AsyncClient() as client:
        with pytest.raises(httpx.ConnectError):
            await client.get(f"http://[::1]:{url.rpartition(':')[2]}/live")


async def test_without_the_second_address_the_first_serves() -> None:
    with socket.socket(socket.AF_INET6) as taken, suppress(OSError):
        first = bind(ServerSettings(port=0))
        taken.bind(("::1", first.getsockname()[1]))
        taken.listen()
        assert bind_beside(ServerSettings(port=0), first) == []
        first.close()


def test_threads_that_prepare_requests_leave_the_loop_its_turns() -> None:
    before = sys.getswitchinterval()
    try:
        sys.setswitchinterval(0.005)
        short_turns()
        assert sys.getswitchinterval() <= 0.001
    finally:
        sys.setswitchinterval(before)


# ---------------------------------------------------------------------------------------------- Unix sockets


async def test_a_unix_socket_answers_and_goes_with_the_server(tmp_path: Path) -> None:
    path = str(tmp_path / "s")
    async with serving(ServerSettings(uds=path)) as url:
        assert stat.S_IMODE(os.stat(path).st_mode) == 0o660
        async with httpx.AsyncClient(transport=httpx.AsyncHTTPTransport(uds=path), base_url=url) as client:
            assert (await client.post("/v1/chat/completions", json=CHAT)).json()["choices"][0]["message"]["content"]
            lines = []
            async with client.stream("POST", "/v1/chat/completions", json=CHAT | {"stream": True}) as response:
                lines = [line async for line in response.aiter_lines() if line]
            assert lines[-1] == "data: [DONE]"
            # a page of another site must not get in through a proxy either
            refused = await client.post("/v1/chat/completions", json=CHAT, headers={"origin": "http://evil.example"})
            assert refused.status_code == 403
        with pytest.raises(PortInUse):
            bind(ServerSettings(uds=path))
    assert not os.path.exists(path)


def test_what_a_killed_server_left_is_replaced_but_no_file_is(tmp_path: Path) -> None:
    left, file = tmp_path / "left", tmp_path / "file"
    with socket.socket(socket.AF_UNIX) as sock:
        sock.bind(str(left))
        sock.listen()
    bind(ServerSettings(uds=str(left))).close()
    file.write_text("precious")
    with pytest.raises(ConfigError, match="no socket"):
        bind(ServerSettings(uds=str(file)))
    assert file.read_text() == "precious"
    with pytest.raises(ConfigError, match="cannot listen"):
        bind(ServerSettings(uds=str(tmp_path / "no" / "folder")))
    with pytest.raises(ConfigError, match="cannot listen"):
        bind(ServerSettings(uds=str(tmp_path / ("x" * 200))))  # longer than such addresses are
    with pytest.raises(ConfigError, match="--host"):
        ServerSettings(uds=str(left), host="0.0.0.0")


# ---------------------------------------------------------------------------------------------- TLS


@needs_openssl
async def test_a_renewed_certificate_is_taken_over_and_a_bad_one_is_not(tmp_path: Path) -> None:
    old, new = pair(tmp_path, "old"), pair(tmp_path, "new")
    cert, key = str(tmp_path / "cert.pem"), str(tmp_path / "key.pem")

    def put(source: tuple[str, str]) -> None:
        for file, target in zip(source, (cert, key), strict=True):
            shutil.copy(file, target + ".new")
            os.replace(target + ".new", target)

    put(old)
    certificate = Certificate(cert, key)
    async with serving(ServerSettings(port=0, tls_cert=cert, tls_key=key), certificate) as url:
        assert url.startswith("https://127.0.0.1:")

        async def works_with(authority: str) -> bool:
            verify = ssl.create_default_context(cafile=authority)
            async with httpx.AsyncClient(verify=verify, base_url=url) as client:
                try:
                    return (await client.post("/v1/chat/completions", json=CHAT)).status_code == 200
                except httpx.ConnectError:
                    return False

        assert await works_with(old[0])
        assert not certificate.look()
        async with httpx.AsyncClient(verify=ssl.create_default_context(cafile=old[0]), base_url=url) as kept:
            assert (await kept.get("/live")).status_code == 200
            put((new[0], old[1]))  # half of a renewal: they do not belong together
            assert not certificate.look()
            assert await works_with(old[0])
            put(new)
            assert certificate.look()
            assert (await kept.get("/live")).status_code == 200  # a connection that was open goes on
        assert await works_with(new[0])
        assert not await works_with(old[0])
        Path(key).unlink()
        assert not certificate.look()
        assert await works_with(new[0])
        async with httpx.AsyncClient() as client:
            with pytest.raises(httpx.HTTPError):  # plain HTTP gets no answer
                await client.get(url.replace("https", "http") + "/live")


@needs_openssl
def test_certificates_that_cannot_be_used_are_refused_at_the_start(tmp_path: Path) -> None:
    one, other = pair(tmp_path, "one"), pair(tmp_path, "other")
    with pytest.raises(ConfigError, match="cannot be used"):
        Certificate(one[0], other[1])
    with pytest.raises(ConfigError, match="cannot be used"):
        Certificate(one[0], str(tmp_path / "missing"))
    locked = str(tmp_path / "locked.key")
    subprocess.run(
        ["openssl", "ec", "-aes128", "-passout", "pass:secret", "-in", one[1], "-out", locked],
        check=True,
        capture_output=True,
    )
    with pytest.raises(ConfigError, match="cannot be used"):
        Certificate(one[0], locked)  # and nobody is asked for the password on a terminal
    with pytest.raises(ConfigError, match="--tls-key"):
        ServerSettings(tls_cert=one[0])


# ---------------------------------------------------------------------------------------------- a place on a site


@pytest.mark.parametrize("prefix", ["", "/llm"])  # a proxy removes it, or leaves it
async def test_below_the_root_all_is_as_at_the_root(prefix: str) -> None:
    settings = ServerSettings(root_path="/llm", api_keys=("k",), open_paths=("/metrics",))
    app = build_app(scripted("Good day."), settings)
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        assert (await client.get(f"{prefix}/live")).status_code == 200
        assert (await client.get(f"{prefix}/metrics")).status_code == 200
        assert (await client.get(f"{prefix}/v1/models")).status_code == 401
        client.headers["authorization"] = "Bearer k"
        assert (await client.get(f"{prefix}/v1/models")).status_code == 200
        assert (await client.post(f"{prefix}/v1/chat/completions", json=CHAT)).status_code == 200
        assert (await client.get(f"{prefix}/", headers={"accept": "text/html"})).status_code == 200
        assert (await client.get("/llmx/live")).status_code == 404
        assert (await client.get("/llm/llm/live")).status_code == 404


@pytest.mark.parametrize("root", ["llm", "/llm/", "/", "//llm", "/a//b", "/a\nb"])
def test_a_root_that_is_none_is_refused(root: str) -> None:
    with pytest.raises(ConfigError, match="--root-path"):
        ServerSettings(root_path=root)
