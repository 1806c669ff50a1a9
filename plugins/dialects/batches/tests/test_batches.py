"""Files and batches with the official client over a real socket."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import signal
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from lmkit.api import ConfigError
from lmkit_dialect_batches.dialect import Batches
from lmkit_http.app import build_app
from lmkit_http.dialects import installed_dialects
from lmkit_http.settings import ServerSettings
from lmkit_testing import DialectConformance
from lmkit_testing.serving import ServedLLM, listening, scripted, supervised

openai = pytest.importorskip("openai", reason="the official client is not installed")

CHAT = "/v1/chat/completions"
ASKED = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 5}
CASES: list[tuple[dict[str, Any], int, str | None]] = [  # body, status, code of the error
    (ASKED, 200, None),
    (ASKED | {"n": 2}, 200, None),
    (ASKED | {"temperature": -1}, 400, "invalid-param"),
    (ASKED | {"model": "other"}, 404, "model_not_found"),
    (ASKED | {"stream": True}, 400, "unsupported"),
    (ASKED | {"priority": -1}, 403, "priority"),
    ({"messages": [{"role": "user", "content": "x" * 5000}]}, 400, "context_length_exceeded"),
]


class TestConformance(DialectConformance):
    plugin = "dialect:batches"


def lines(bodies: Sequence[dict[str, Any]], url: str = CHAT) -> bytes:
    made = [{"custom_id": f"r{i}", "method": "POST", "url": url, "body": body} for i, body in enumerate(bodies)]
    return b"".join(json.dumps(line).encode() + b"\n" for line in made)


@asynccontextmanager
async def serving(
    folder: Path, llm: ServedLLM, settings: ServerSettings | None = None, key: str = "none"
) -> AsyncIterator[tuple[openai.AsyncOpenAI, Batches]]:
    batches = Batches(str(folder))
    others = [d for d in installed_dialects() if not isinstance(d, Batches)]
    assert batches.store is not None
    try:
        async with (
            listening(llm, settings, dialects=[*others, batches]) as url,
            openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0) as client,
        ):
            yield client, batches
    finally:
        batches.store.close()


async def ended(client: openai.AsyncOpenAI, id: str) -> Any:
    while True:
        batch = await client.batches.retrieve(id)
        if batch.status in ("completed", "failed", "expired", "cancelled"):
            return batch
        await asyncio.sleep(0.01)


async def results(client: openai.AsyncOpenAI, batch: Any) -> dict[str, dict[str, Any]]:
    """By custom_id; each must be there once."""
    found: dict[str, dict[str, Any]] = {}
    for id in (batch.output_file_id, batch.error_file_id):
        for line in (await client.files.content(id)).text.splitlines() if id else ():
            result = json.loads(line)
            assert result["custom_id"] not in found
            found[result["custom_id"]] = result
    return found


async def start(client: openai.AsyncOpenAI, content: bytes, endpoint: Any = CHAT, **more: Any) -> Any:
    file = await client.files.create(file=("in.jsonl", content), purpose="batch")
    return await client.batches.create(input_file_id=file.id, endpoint=endpoint, completion_window="24h", **more)


async def test_a_batch_from_the_file_to_its_results(tmp_path: Path) -> None:
    async with serving(tmp_path, scripted("hello")) as (client, _):
        file = await client.files.create(
            file=("in.jsonl", lines([body for body, _, _ in CASES])), purpose="batch",
            expires_after={"anchor": "created_at", "seconds": 7200},
        )  # fmt: skip
        assert (file.filename, file.purpose, file.expires_at) == ("in.jsonl", "batch", file.created_at + 7200)
        batch = await client.batches.create(
            input_file_id=file.id, endpoint=CHAT, completion_window="24h", metadata={"a": "b"},
            output_expires_after={"anchor": "created_at", "seconds": 3600},
        )  # fmt: skip
        assert batch.metadata == {"a": "b"}
        done = await ended(client, batch.id)
        counts = done.request_counts
        assert (done.status, counts.total, counts.completed, counts.failed) == ("completed", 7, 2, 5)
        assert done.created_at <= done.in_progress_at <= done.finalizing_at <= done.completed_at
        found = await results(client, done)
        for i, (_, status, code) in enumerate(CASES):
            response = found[f"r{i}"]["response"]
            assert (response["status_code"], response["body"].get("error", {}).get("code")) == (status, code)
        answer = found["r1"]["response"]
        assert [choice["message"]["content"] for choice in answer["body"]["choices"]] == ["hello"] * 2
        assert answer["request_id"] == answer["body"]["id"]
        output = await client.files.retrieve(done.output_file_id)
        assert (output.purpose, output.expires_at - output.created_at) == ("batch_output", 3600)
        assert [b.id async for b in client.batches.list(limit=1)] == [batch.id]


async def test_files_are_listed_page_by_page_and_deleted(tmp_path: Path) -> None:
    async with serving(tmp_path, scripted("x")) as (client, _):
        made = [(await client.files.create(file=(f"{i}", b"%d" % i), purpose="batch")).id for i in range(5)]
        assert {f.id async for f in client.files.list(limit=2)} == set(made)
        upwards = [f.id async for f in client.files.list(limit=2, order="asc")]
        assert upwards == [f.id async for f in client.files.list()][::-1]
        assert (await client.files.content(made[3])).content == b"3"
        assert (await client.files.delete(made[3])).deleted
        for work in (client.files.retrieve(made[3]), client.files.content(made[3]), client.files.delete(made[3])):
            with pytest.raises(openai.NotFoundError):
                await work
        assert [f.id async for f in client.files.list(purpose="batch_output")] == []


async def test_one_tenant_does_not_see_the_files_of_another(tmp_path: Path) -> None:
    two_keys = ServerSettings(port=0, api_keys=("one", "two"))
    llm = scripted("hello")
    async with serving(tmp_path, llm, two_keys, "one") as (one, _):
        two = one.with_options(api_key="two")
        batch = await start(one, lines([ASKED]))
        done = await ended(one, batch.id)
        assert [b.id async for b in two.batches.list()] == []
        assert [f.id async for f in two.files.list()] == []
        for work in (
            two.batches.retrieve(batch.id), two.batches.cancel(batch.id), two.files.content(done.output_file_id),
            two.batches.create(input_file_id=batch.input_file_id, endpoint=CHAT, completion_window="24h"),
        ):  # fmt: skip
            with pytest.raises(openai.NotFoundError):
                await work
        salt = llm.client.requests[0].cache_salt  # type: ignore[attr-defined]
        await one.chat.completions.create(model="scripted", messages=[{"role": "user", "content": "x"}], max_tokens=2)
        assert salt is not None
        assert llm.client.requests[0].tenant in salt  # type: ignore[attr-defined]
        assert llm.client.requests[-1].cache_salt == salt  # type: ignore[attr-defined]


async def test_other_endpoints(tmp_path: Path) -> None:
    async with serving(tmp_path, scripted("hello")) as (client, _):
        bodies = [{"prompt": ["a", "b"], "max_tokens": 3}, {"prompt": []}]
        done = await ended(client, (await start(client, lines(bodies, "/v1/completions"), "/v1/completions")).id)
        found = await results(client, done)
        assert [choice["text"] for choice in found["r0"]["response"]["body"]["choices"]] == ["hel", "hel"]
        assert found["r1"]["response"]["status_code"] == 400
        done = await ended(client, (await start(client, lines([{"input": "x"}], "/classify"), "/classify")).id)
        assert (await results(client, done))["r0"]["response"]["body"]["error"]["code"] == "unsupported-task"


@pytest.mark.parametrize(
    ("content", "code"),
    [
        (b"", "empty_file"),
        (b"\n\n", "empty_file"),
        (b"{", "invalid_json_line"),
        (b"[]\n", "invalid_json_line"),
        (b"\xff\xfe\n", "invalid_json_line"),
        (b"[" * 100_000, "invalid_json_line"),
        (lines([ASKED]) * 2, "duplicate_custom_id"),
        (lines([ASKED], "/v1/completions"), "mismatched_endpoint"),
        (lines([ASKED]).replace(b"POST", b"GET"), "invalid_json_line"),
        (lines([ASKED]).replace(b'"body"', b'"extra"'), "invalid_json_line"),
        (b'{"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": 1}', "invalid_json_line"),
    ],
)
async def test_an_input_that_is_wrong_fails_before_anything_runs(tmp_path: Path, content: bytes, code: str) -> None:
    llm = scripted("x")
    async with serving(tmp_path, llm) as (client, _):
        done = await ended(client, (await start(client, content)).id)
        assert (done.status, done.errors.data[0].code) == ("failed", code)
        assert done.output_file_id is done.error_file_id is None
        assert not llm.client.requests  # type: ignore[attr-defined]


async def test_a_batch_is_cancelled_and_every_request_has_its_line(tmp_path: Path) -> None:
    llm = scripted("a long answer " * 10, delay=0.01)
    async with serving(tmp_path, llm) as (client, _):
        quick, slow = [ASKED | {"max_tokens": 1}] * 20, [ASKED | {"max_tokens": 100}] * 20
        batch = await start(client, lines(quick + slow))
        with pytest.raises(openai.ConflictError, match="reads the file"):
            await client.files.delete(batch.input_file_id)
        while not (await client.batches.retrieve(batch.id)).request_counts.completed:
            await asyncio.sleep(0.005)
        assert (await client.batches.cancel(batch.id)).status == "cancelling"
        done = await ended(client, batch.id)
        assert done.status == "cancelled"
        found = await results(client, done)
        assert len(found) == 40
        codes = [r["error"]["code"] for r in found.values() if r["error"]]
        assert set(codes) == {"batch_cancelled"}
        assert len(codes) == done.request_counts.failed == 40 - done.request_counts.completed
        assert llm.client.num_streams == 0  # type: ignore[attr-defined]
        with pytest.raises(openai.ConflictError):
            await client.batches.cancel(batch.id)


async def test_a_batch_whose_time_is_over_expires(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lmkit_dialect_batches.dialect._DAY", 0)
    async with serving(tmp_path, scripted("a long answer " * 10, delay=0.01)) as (client, batches):
        assert batches.store is not None
        real_now = batches.store.now
        done = await ended(client, (await start(client, lines([ASKED | {"max_tokens": 100}] * 4))).id)
        assert (done.status, done.request_counts.failed) == ("expired", 4)
        assert {r["error"]["code"] for r in (await results(client, done)).values()} == {"batch_expired"}
        batches.store.now = lambda: real_now() + 31 * 86_400
        batches.store.sweep()
        assert [f.id async for f in client.files.list()] == [b.id async for b in client.batches.list()] == []
        assert not list((tmp_path / "files").iterdir())


async def test_clients_come_before_a_batch(tmp_path: Path) -> None:
    """What the engine may choose from: a client's request has a priority before all of the batch's."""
    llm = scripted("a long answer " * 10, delay=0.005)
    async with serving(tmp_path, llm) as (client, _):
        await start(client, lines([ASKED | {"max_tokens": 100}] * 50))
        while not llm.client.requests:  # type: ignore[attr-defined]
            await asyncio.sleep(0.002)
        await client.chat.completions.create(
            model="scripted", messages=[{"role": "user", "content": "x"}], max_tokens=1
        )
        priorities = [request.priority for request in llm.client.requests]  # type: ignore[attr-defined]
        assert priorities.count(0) == 1
        assert len(priorities) > 1


async def test_without_a_directory_it_is_off_by_name() -> None:
    others = [d for d in installed_dialects() if not isinstance(d, Batches)]
    async with listening(scripted("x"), dialects=[*others, Batches()]) as url, httpx.AsyncClient() as client:
        for path in ("/v1/files", "/v1/batches", "/v1/batches/x"):
            refused = await client.get(url + path)
            assert refused.status_code == 404
            assert "--dialect.batches.dir" in refused.json()["error"]["message"]


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({}, "input_file_id"),
        ({"endpoint": "/v1/files"}, "endpoint"),
        ({"completion_window": "1h"}, "completion_window"),
        ({"model": "x"}, "model"),
        ({"input_file_id": "../../etc/passwd"}, None),
        ({"output_expires_after": {"anchor": "created_at", "seconds": 1}}, "output_expires_after.seconds"),
        ({"metadata": {"a": "x" * 513}}, "metadata.a"),
    ],
)
async def test_a_batch_that_cannot_be_made(tmp_path: Path, body: dict[str, Any], field: str | None) -> None:
    async with serving(tmp_path, scripted("x")) as (client, _), httpx.AsyncClient(base_url=str(client.base_url)) as raw:
        file = await client.files.create(file=("in", lines([ASKED])), purpose="batch")
        given = {"input_file_id": file.id, "endpoint": CHAT, "completion_window": "24h"} | body if body else {}
        refused = await raw.post("batches", json=given)
        assert refused.status_code in (400, 404)
        assert refused.json()["error"]["param"] == field


async def test_what_is_uploaded_is_bounded_and_named(tmp_path: Path) -> None:
    batches = Batches(str(tmp_path), max_mb=1)
    others = [d for d in installed_dialects() if not isinstance(d, Batches)]
    async with (
        listening(scripted("x"), dialects=[*others, batches]) as url,
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
        httpx.AsyncClient(base_url=f"{url}/v1/") as raw,
    ):
        await client.files.create(file=("a", b"x" * 900_000), purpose="batch")
        with pytest.raises(openai.InternalServerError, match="at most 1 MiB of files") as full:
            await client.files.create(file=("a", b"x" * 900_000), purpose="batch")
        assert full.value.status_code == 507
        with pytest.raises(openai.BadRequestError, match="1048576"):
            await client.files.create(file=("a", b"x" * ((1 << 20) + 1)), purpose="batch")
        with pytest.raises(openai.BadRequestError, match="purpose"):
            await client.files.create(file=("a", b"x"), purpose="fine-tune")
        for files, data in (
            ({"file": b"x"}, {}), ({}, {"purpose": "batch"}), ({"file": b"x"}, {"purpose": "batch", "more": "x"}),
            ({"file": b"x"}, {"purpose": "batch", "expires_after[seconds]": "7200"}),
            ({"file": b"x"}, {"purpose": "batch", "expires_after[anchor]": "now", "expires_after[seconds]": "7200"}),
        ):  # fmt: skip
            assert (await raw.post("files", files=files, data=data)).status_code == 400
        assert len((await client.files.list()).data) == 1
        for query in ("limit=0", "limit=x", "order=up", "after=nothing", "limit=99999999999999999999"):
            assert (await raw.get(f"files?{query}")).status_code == 400


async def test_a_disk_that_is_full_is_a_typed_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving(tmp_path, scripted("hello")) as (client, _):
        file = await client.files.create(file=("a", lines([ASKED])), purpose="batch")

        def full(*_: object) -> None:
            raise OSError(errno.ENOSPC, "no space")

        with monkeypatch.context() as patch:
            patch.setattr("lmkit_dialect_batches.store.os.fsync", full)
            for work in (
                client.files.create(file=("a", b"x"), purpose="batch"),
                client.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h"),
            ):
                with pytest.raises(openai.InternalServerError, match="cannot write files") as failed:
                    await work
                assert failed.value.status_code == 507
        assert [f.id async for f in client.files.list()] == [file.id]
        assert [b.id async for b in client.batches.list()] == []
        assert sorted(path.suffix for path in (tmp_path / "files").iterdir()) == [".data", ".json"]
        batch = await client.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h")
        assert (await ended(client, batch.id)).status == "completed"


def test_two_servers_do_not_work_in_one_directory(tmp_path: Path) -> None:
    first = Batches(str(tmp_path))
    with pytest.raises(ConfigError, match="another server"):
        Batches(str(tmp_path))
    assert first.store is not None
    first.store.close()
    (tmp_path / "batches" / "batch_x.json").write_text("{")
    with pytest.raises(ConfigError, match="batch_x"):
        Batches(str(tmp_path))
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot keep files"):
        Batches(str(tmp_path / "file"))


async def test_a_server_that_stops_in_the_middle_writes_no_errors(tmp_path: Path) -> None:
    async with serving(tmp_path, scripted("hello", delay=0.01)) as (client, _):
        batch = await start(client, lines([ASKED] * 60))
        while not (await client.batches.retrieve(batch.id)).request_counts.completed:
            await asyncio.sleep(0.005)
    async with serving(tmp_path, scripted("hello")) as (client, _):
        done = await ended(client, batch.id)
        assert (done.status, done.request_counts.completed, done.request_counts.failed) == ("completed", 60, 0)
        assert len(await results(client, done)) == 60


async def test_an_engine_that_dies_costs_no_request_its_answer(tmp_path: Path) -> None:
    async with supervised(delay=0.003) as llm, serving(tmp_path, llm) as (client, _):
        asked = [{"prompt": f"{i}", "max_tokens": 40, "ignore_eos": True} for i in range(40)]
        batch = await start(client, lines(asked, "/v1/completions"), "/v1/completions")
        while (await client.batches.retrieve(batch.id)).request_counts.completed < 3:
            await asyncio.sleep(0.005)
        os.kill(llm.client.client.pid, signal.SIGKILL)  # type: ignore[attr-defined]
        done = await ended(client, batch.id)
        assert (done.status, done.request_counts.completed, done.request_counts.failed) == ("completed", 40, 0)


async def test_one_tenant_does_not_wait_for_all_batches_of_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lmkit_run_batch.play.AT_ONCE", 4)
    two_keys = ServerSettings(port=0, api_keys=("one", "two"))
    async with serving(tmp_path, scripted("hello", delay=0.02), two_keys, "one") as (one, _):
        slow = [await start(one, lines([ASKED] * 500)) for _ in range(4)]
        await ended(two := one.with_options(api_key="two"), (await start(two, lines([ASKED] * 3))).id)
        states = [(await one.batches.retrieve(batch.id)).status for batch in slow]
        assert states == ["in_progress"] * 2 + ["validating"] * 2
        cancelled = await one.batches.cancel(slow[3].id)
        assert (await ended(one, cancelled.id)).request_counts.completed == 0


FIELDS = ["input_file_id", "endpoint", "completion_window", "metadata", "output_expires_after", "anchor", "seconds"]
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=6) | st.sampled_from(["24h", CHAT, "created_at"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(FIELDS), inner, max_size=5),
    max_leaves=10,
)
PATHS = st.sampled_from(["files", "batches", "uploads", "uploads/x/parts", "uploads/x/complete"]) | st.text(
    st.characters(codec="utf-8"), max_size=8
).map(lambda text: f"files/{quote(text, safe='')}")


@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    method=st.sampled_from(["GET", "POST", "DELETE"]), path=PATHS, body=VALUES,
    query=st.dictionaries(st.sampled_from(["limit", "after", "order", "purpose"]), st.text(max_size=5), max_size=2),
    kind=st.sampled_from(["application/json", "multipart/form-data; boundary=x", "multipart/form-data", ""]),
)  # fmt: skip
async def test_anything_has_an_answer(
    tmp_path: Path, method: str, path: str, body: Any, query: dict[str, str], kind: str
) -> None:
    batches = Batches(str(tmp_path))
    assert batches.store is not None
    try:
        transport = httpx.ASGITransport(build_app(scripted("x"), dialects=[batches]))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost/v1/") as client:
            answer = await client.request(
                method, path, content=json.dumps(body), params=query, headers={"content-type": kind}
            )
        assert answer.status_code in (200, 400, 404, 405, 409)
        if answer.status_code != 200:
            assert answer.json()["error"]["message"]
    finally:
        batches.store.close()
