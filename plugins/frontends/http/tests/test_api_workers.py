"""Several processes before one engine: who answers what, what they count together, and what a death costs."""

from __future__ import annotations

import asyncio
import os
import signal
import ssl
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from lmkit_http.admission import Admission, RateLimited
from lmkit_http.backend import Backend
from lmkit_http.counts import BYTES, REQUESTS, Counts
from lmkit_http.crew import Crew, Plan
from lmkit_http.run import bind, run_crew
from lmkit_http.settings import ServerSettings
from lmkit_python.supervised import Supervised
from lmkit_testing.engines import hash_config, no_checkpoint
from lmkit_testing.serving import ServedLLM, hashed, supervised

HELLO = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 8}
ENDLESS = {**HELLO, "stream": True, "max_tokens": 3000, "ignore_eos": True, "resume": True}


@asynccontextmanager
async def several(
    llm: ServedLLM, settings: ServerSettings | None = None
) -> AsyncIterator[tuple[httpx.AsyncClient, Crew, Backend]]:
    """A server of two processes before the first one, which is this."""
    settings = settings or ServerSettings(port=0, api_workers=2, drain_timeout=1.0)
    sock = bind(settings)
    crew = Crew(settings.api_workers, sock)
    ready: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    plan = Plan(hash_config(vocab_size=257), no_checkpoint(), text="lmkit_testing.serving:open_text")
    serving = asyncio.ensure_future(run_crew(llm, settings, sock, crew, plan, lambda _, url: ready.set_result(url)))
    try:
        await asyncio.wait([serving, ready], return_when=asyncio.FIRST_COMPLETED, timeout=60)
        if serving.done():
            serving.result()
        async with httpx.AsyncClient(base_url=ready.result(), timeout=30, limits=httpx.Limits()) as client:
            yield client, crew, crew._backend
        os.kill(os.getpid(), signal.SIGTERM)  # which this event loop takes for the server, and nobody else
        await asyncio.wait_for(serving, 30)
        assert [member.process.returncode for member in crew._members] == [0, 0]
    finally:
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)
        crew.close()
        sock.close()


async def until(check: Callable[[], Any], timeout: float = 20.0) -> None:
    async with asyncio.timeout(timeout):
        while not check():
            await asyncio.sleep(0.01)


def busy(crew: Crew) -> list[int]:
    """Requests of each process."""
    return [len(member._open) for member in crew._members]


@asynccontextmanager
async def at_both(client: httpx.AsyncClient, crew: Crew) -> AsyncIterator[list[asyncio.Task[list[str]]]]:
    """Streams of which each process has some."""
    streams: list[asyncio.Task[list[str]]] = []

    async def read() -> list[str]:
        async with client.stream("POST", "/v1/chat/completions", json=ENDLESS) as answer:
            return [line async for line in answer.aiter_lines() if line]

    try:
        for num in range(64):
            streams.append(asyncio.ensure_future(read()))
            await until(lambda num=num: sum(busy(crew)) > num)  # type: ignore[misc]
            if all(busy(crew)):
                break
        assert all(busy(crew)), busy(crew)
        yield streams
    finally:
        for stream in streams:
            stream.cancel()
        await asyncio.gather(*streams, return_exceptions=True)


async def test_two_processes_answer_as_one() -> None:
    async with hashed(delay=0.01) as llm, several(llm) as (client, crew, backend):
        async with at_both(client, crew) as streams:
            assert (await client.get("/load")).json()["server_load"] == len(streams)
            assert llm.client.num_streams == len(streams)  # type: ignore[attr-defined]
            assert max(busy(crew)) <= 8, busy(crew)  # connections go to who has fewest
        await until(lambda: not any(busy(crew)))
        assert llm.client.num_streams == 0  # type: ignore[attr-defined] # clients left: all were aborted
        answers = await asyncio.gather(*(client.post("/v1/chat/completions", json=HELLO) for _ in range(8)))
        assert {answer.status_code for answer in answers} == {200}
        kept = await client.post("/v1/responses", json={"input": "Hello", "max_output_tokens": 16})
        found = [(await client.get(f"/v1/responses/{kept.json()['id']}")).json() for _ in range(4)]
        assert found == [kept.json()] * 4  # one process has them
        assert (await client.get("/ready")).status_code == 200
        assert (await client.get("/debug/requests")).status_code == 404
        explained = await client.post("/v1/chat/completions", json=HELLO, headers={"x-lmkit-explain": "cache"})
        assert explained.status_code == 400
        backend.adapters.add("tuned")
        assert backend.spread is not None
        await backend.spread()
        told = await asyncio.gather(*(client.get("/v1/models") for _ in range(8)))
        assert all([model["id"] for model in one.json()["data"]] == ["hash-model", "tuned"] for one in told)
        metrics = (await client.get("/metrics")).text
        num = 8.0 + len(streams)
        assert f'lmkit_http_requests_total{{route="/v1/chat/completions",status="200"}} {num}' in metrics
        assert f'lmkit_requests_finished_total{{model_name="hash-model",reason="abort"}} {len(streams)}.0' in metrics


@pytest.mark.slow
async def test_one_that_is_killed_ends_its_own_streams_only() -> None:
    async with hashed(delay=0.01) as llm, several(llm) as (client, crew, backend):
        async with at_both(client, crew) as streams:
            dying, living = crew._members
            num_dying, num_living = busy(crew)
            dying.process.send_signal(signal.SIGKILL)
            await until(lambda: llm.client.num_streams == num_living)  # type: ignore[attr-defined]
            await until(lambda: sum(stream.done() for stream in streams) == num_dying)
            assert all(isinstance(stream.exception(), httpx.HTTPError) for stream in streams if stream.done())
            assert busy(crew)[1] == num_living
            await until(lambda: backend.admission.total() == num_living)
            before = (await client.get("/metrics")).text
            await until(lambda: crew._members[0] is not dying and crew._members[0].listening.is_set(), 60)
        async with at_both(client, crew):  # the new one takes its share
            assert crew._members[1] is living
        after = (await client.get("/metrics")).text
        assert counted(after, "lmkit_output_tokens_total") >= counted(before, "lmkit_output_tokens_total") > 0


def counted(metrics: str, name: str) -> float:
    return sum(float(line.rpartition(" ")[2]) for line in metrics.splitlines() if line.startswith(name))


@pytest.mark.slow
async def test_a_new_engine_goes_on_with_streams_of_all() -> None:
    async with supervised(delay=0.01) as llm, several(llm) as (client, crew, _), at_both(client, crew) as streams:
        supervisor = llm.client
        assert isinstance(supervisor, Supervised)
        os.kill(supervisor.client.pid, signal.SIGKILL)  # type: ignore[attr-defined]
        await until(lambda: supervisor.state != "ready")
        await until(lambda: supervisor.state == "ready", 60)
        await until(lambda: supervisor.client.num_streams == len(streams))
        assert sum(busy(crew)) == len(streams)
        assert not any(stream.done() for stream in streams)
        assert (await client.get("/ready")).status_code == 200
        answer = await client.post("/v1/chat/completions", json=HELLO)
        assert answer.status_code == 200


@pytest.mark.slow
async def test_clients_of_openai_on_a_socket_below_a_root(tmp_path: Path) -> None:
    """Streams, aborts, and a client that leaves an answer that was handed on."""
    openai = pytest.importorskip("openai")
    uds = str(tmp_path / "http")
    settings = ServerSettings(uds=uds, root_path="/llm", api_keys=TWO_KEYS, api_workers=2, drain_timeout=1.0)
    transport = httpx.AsyncHTTPTransport(uds=uds)
    async with hashed(delay=0.01) as llm, several(llm, settings):
        http = httpx.AsyncClient(transport=transport)
        async with openai.AsyncOpenAI(base_url="http://localhost/llm/v1", api_key="bob", http_client=http) as client:
            ask = {"model": "hash-model", "messages": HELLO["messages"], "max_tokens": 40}

            async def answer() -> str:
                whole = await client.chat.completions.create(**ask, temperature=0)
                stream = await client.chat.completions.create(**ask, temperature=0, stream=True)
                text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
                assert text == (whole.choices[0].message.content or "")
                return text

            assert len(set(await asyncio.gather(*(answer() for _ in range(8))))) == 1
            async with await client.chat.completions.create(**{**ask, "max_tokens": 3000}, stream=True) as stream:
                await anext(aiter(stream))
                assert llm.client.num_streams == 1  # type: ignore[attr-defined]
            await until(lambda: not llm.client.num_streams)  # type: ignore[attr-defined]
            with pytest.raises(openai.APITimeoutError):
                await client.with_options(max_retries=0, timeout=0.5).responses.create(
                    model="hash-model", input="Hello", max_output_tokens=3000
                )
            await until(lambda: not llm.client.num_streams)  # type: ignore[attr-defined]
            async with client.responses.stream(model="hash-model", input="Hello", max_output_tokens=20) as events:
                kinds = [event.type async for event in events]
            assert kinds[0] == "response.created"
            assert kinds[-1] in ("response.completed", "response.incomplete")
            with pytest.raises(openai.AuthenticationError):
                await client.with_options(api_key="eve").responses.retrieve("resp_1")


PROGRAM = """
import asyncio, sys
from lmkit_http.crew import Crew, Plan
from lmkit_http.run import bind, run_crew
from lmkit_http.settings import ServerSettings
from lmkit_testing.engines import hash_config, no_checkpoint
from lmkit_testing.serving import hashed

settings = ServerSettings(
    port=0, api_workers=2, drain_timeout=float(sys.argv[1]), tls_cert=sys.argv[2], tls_key=sys.argv[3]
)

async def main():
    sock = bind(settings)
    crew = Crew(2, sock)
    plan = Plan(hash_config(vocab_size=257), no_checkpoint(), text="lmkit_testing.serving:open_text")
    try:
        async with hashed(delay=0.005) as llm:
            pids = lambda: " ".join(str(member.process.pid) for member in crew._members)
            await run_crew(llm, settings, sock, crew, plan, lambda _, url: print(url, pids(), crew.folder, flush=True))
    finally:
        crew.close()
        sock.close()

asyncio.run(main())
print("done", flush=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize("how", ["drain", "drain too long", "twice", "killed"])
async def test_the_end_of_the_first_process_is_the_end_of_all(tmp_path: Path, how: str) -> None:
    cert, key = pair(tmp_path)
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", PROGRAM, "0.2" if how == "drain too long" else "30", cert, key,
        stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
    assert process.stdout is not None
    try:
        url, *pids, folder = (await asyncio.wait_for(process.stdout.readline(), 60)).decode().split()
        long = {**ENDLESS, "max_tokens": 400 if how == "drain" else 3000}
        async with (
            httpx.AsyncClient(base_url=url, verify=ssl.create_default_context(cafile=cert), timeout=60) as client,
            client.stream("POST", "/v1/chat/completions", json=long) as answer,
        ):
            lines = answer.aiter_lines()
            await anext(lines)
            process.send_signal(signal.SIGKILL if how == "killed" else signal.SIGTERM)
            if how == "twice":
                await asyncio.sleep(0.2)
                process.send_signal(signal.SIGTERM)
                with pytest.raises(httpx.HTTPError):
                    [line async for line in lines]
            elif how == "drain":
                await asyncio.sleep(0.2)
                assert (await client.get("/ready")).status_code == 503
                assert (await client.post("/v1/chat/completions", json=HELLO)).status_code == 503
                rest = [line async for line in lines if line]
                assert '"finish_reason":"length"' in rest[-2]
            else:
                rest = [line async for line in lines if line]
                assert ('"engine-dead"' if how == "killed" else '"engine-busy"') in rest[-2]
        assert await asyncio.wait_for(process.wait(), 30) == (-signal.SIGKILL if how == "killed" else 0)
        await until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids))
        assert not Path(folder).exists()
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


def pair(folder: Path) -> tuple[str, str]:
    """A certificate that vouches for itself, with its key."""
    cert, key = str(folder / "cert.pem"), str(folder / "key.pem")
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2",
         "-subj", "/CN=x", "-addext", "subjectAltName=IP:127.0.0.1", "-keyout", key, "-out", cert],
        check=True, capture_output=True,
    )  # fmt: skip
    return cert, key


TWO_KEYS = ("alice", "bob")


def admissions(folder: Path, **options: Any) -> list[Admission]:
    """Of three processes of a server."""
    from lmkit_http.access import tenants

    settings = ServerSettings(api_keys=TWO_KEYS, **options)
    return [
        Admission(8, 2, settings, lambda: 0, lambda: 1000.0, Counts(folder / "counts", tenants(settings), 3, place))
        for place in range(3)
    ]


@pytest.mark.parametrize("limit", ["key_requests", "key_concurrent"])
def test_limits_of_keys_hold_over_all(tmp_path: Path, limit: str) -> None:
    from lmkit_http.access import tenants

    first, second, third = admissions(tmp_path, **{limit: 2})
    one, other = tenants(ServerSettings(api_keys=TWO_KEYS))[1:]
    places = [first.enter(one, {}), second.enter(one, {})]
    with pytest.raises(RateLimited):
        third.enter(one, {})
    third.enter(other, {})
    places[0].leave()
    if limit == "key_concurrent":
        third.enter(one, {})
    else:
        with pytest.raises(RateLimited):
            third.enter(one, {})


def test_counts_forget_the_dead(tmp_path: Path) -> None:
    counts = [Counts(tmp_path / "counts", ["", "a"], 2, place) for place in range(2)]
    for place in range(2):
        for column in (REQUESTS, BYTES, counts[0].column("a")):
            counts[place].put(column, 3 + place)
    assert counts[0].total(REQUESTS) == counts[1].total(counts[0].column("a")) == 7
    counts[0].forget(1)
    assert [counts[0].total(column) for column in (REQUESTS, BYTES, counts[0].column("a"))] == [3, 3, 3]
    assert counts[1].total(counts[0].column("")) == 0
