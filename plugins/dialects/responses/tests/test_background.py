"""Answers in the background: accepted, asked for, cancelled, bounded; with the official client where it matters."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import msgspec
import openai
import pytest
from lmkit_dialect_responses import background
from lmkit_dialect_responses.background import Desk, Later, TooMany
from lmkit_dialect_responses.dialect import Responses
from lmkit_dialect_responses.store import Kept, Store, progress
from lmkit_http.app import build_app
from lmkit_http.dialect import Answer, Incoming
from lmkit_http.settings import ServerSettings
from lmkit_testing.serving import ServedLLM, listening, scripted

HELLO: dict[str, Any] = {"model": "scripted", "input": "Hello"}


@asynccontextmanager
async def client_of(
    llm: ServedLLM, dialect: Responses | None = None, **settings: Any
) -> AsyncIterator[openai.AsyncOpenAI]:
    async with (
        listening(llm, ServerSettings(port=0, **settings), dialects=[dialect or Responses()]) as url,
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="a", max_retries=0) as client,
    ):
        yield client


async def finished(client: openai.AsyncOpenAI, id: str) -> Any:
    async with asyncio.timeout(30):
        while (found := await client.responses.retrieve(id)).status in ("queued", "in_progress"):
            await asyncio.sleep(0.01)
    return found


async def test_an_answer_is_made_while_nobody_waits() -> None:
    async with client_of(scripted("Good day.", "Good day.", "And so on.")) as client:
        plain = await client.responses.create(**HELLO)
        queued = await client.responses.create(**HELLO, background=True, metadata={"a": "b"})
        assert (queued.status, queued.background, queued.output) == ("queued", True, [])
        found = await finished(client, queued.id)
        assert (found.status, found.output_text, found.metadata) == ("completed", plain.output_text, {"a": "b"})
        assert found.usage == plain.usage
        assert found.created_at == queued.created_at
        listed = [item async for item in client.responses.input_items.list(queued.id)]
        assert len(listed) == 1
        later = await client.responses.create(model="scripted", input="And?", previous_response_id=queued.id)
        assert later.output_text == "And so on."
        again = await client.responses.cancel(queued.id)  # a finished one stays as it is
        assert (again.status, again.output_text) == ("completed", "Good day.")


def test_one_event_loop_after_another() -> None:
    """A dialect that is served again, on a loop of its own each time, goes on answering."""
    dialect = Responses()

    async def once() -> str:
        async with client_of(scripted("Good day."), dialect) as client:
            queued = await client.responses.create(**HELLO, background=True)
            return str((await finished(client, queued.id)).output_text)

    assert [asyncio.run(once()) for _ in range(2)] == ["Good day."] * 2


async def test_a_cancelled_answer_frees_the_engine() -> None:
    llm = scripted("x" * 4000, "ok", delay=0.01)
    async with client_of(llm) as client:
        long = await client.responses.create(**HELLO, background=True)
        async with asyncio.timeout(30):
            while not llm.client.requests:
                await asyncio.sleep(0.01)
            while (await client.responses.retrieve(long.id)).status != "in_progress":
                await asyncio.sleep(0.01)
        with pytest.raises(openai.BadRequestError, match="not finished"):
            await client.responses.create(model="scripted", input="And?", previous_response_id=long.id)
        assert (await client.responses.cancel(long.id)).status == "cancelled"
        async with asyncio.timeout(30):
            while not llm.client.aborted:
                await asyncio.sleep(0.01)
        assert (await client.responses.cancel(long.id)).status == "cancelled"
        gone = await client.responses.create(**HELLO, background=True)
        await client.responses.delete(gone.id)
        with pytest.raises(openai.NotFoundError):
            await client.responses.retrieve(gone.id)


async def test_what_is_wrong_is_said_at_once_and_what_fails_later_is_kept() -> None:
    async with client_of(scripted("x", max_length=64)) as client:
        with pytest.raises(openai.BadRequestError, match="temperature"):
            await client.responses.create(**HELLO, background=True, temperature=9.0)
        long = await client.responses.create(model="scripted", input="x" * 200, background=True)
        found = await finished(client, long.id)
        assert found.status == "failed"
        assert "200" in found.error.message or "64" in found.error.message


async def test_an_answer_is_its_tenants() -> None:
    async with client_of(scripted("x"), api_keys=("a", "b")) as client:
        mine = await client.responses.create(**HELLO, background=True)
        other = client.with_options(api_key="b")
        for ask in (other.responses.retrieve, other.responses.cancel, other.responses.delete):
            with pytest.raises(openai.NotFoundError):
                await ask(mine.id)
        assert (await finished(client, mine.id)).status == "completed"


def queued(id: str) -> Kept:
    return Kept(id, None, b"[]", msgspec.json.encode({"id": id, "status": "queued", "background": True}))


def test_what_waits_is_bounded_for_each_tenant(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background, "MAX_WAITING", 3)
    monkeypatch.setattr(background, "MAX_BYTES", 10)
    desk = Desk(Store())
    for i in range(3):
        desk.accept(queued(f"a{i}"), Later("", b"x", tenant="a", id=f"a{i}"))
    with pytest.raises(TooMany):
        desk.accept(queued("a3"), Later("", b"x", tenant="a", id="a3"))
    with pytest.raises(TooMany):
        desk.accept(queued("b0"), Later("", b"x" * 11, tenant="b", id="b0"))
    desk.accept(queued("b1"), Later("", b"x" * 10, tenant="b", id="b1"))


async def test_the_end_of_the_server_fails_what_is_open_and_nothing_is_left() -> None:
    """Some run, some wait, one was cancelled before it began, one was deleted: all are settled when the work ends."""
    store = Store()
    desk = Desk(store)
    begun = asyncio.Event()

    async def ask(incoming: Incoming) -> Answer:
        begun.set()
        await asyncio.Event().wait()
        raise AssertionError

    for name in ("runs", "cancelled", "deleted"):
        desk.accept(queued(name), Later("", b"", id=name))
    desk.cancel("", "cancelled")
    store.delete("", "deleted")
    desk.give_up("deleted")
    work = asyncio.create_task(desk.work(ask))
    await asyncio.wait_for(begun.wait(), 30)
    desk.accept(queued("late"), Later("", b"", id="late"))
    work.cancel()
    await asyncio.gather(work, return_exceptions=True)
    found = {id: progress(store.get("", id)).status for id in ("runs", "cancelled", "late")}
    assert found == {"runs": "failed", "cancelled": "cancelled", "late": "failed"}
    assert not desk._open
    assert not desk._waiting
    store.check()


async def test_what_one_server_left_undone_is_not_done_by_the_next() -> None:
    """Dialects that are found, not given, are made anew for each server: what waited for one waits for no other."""
    left, llm = build_app(scripted("Good day.")), scripted("Good day.")
    transport = httpx.ASGITransport(left)  # whose work behind the answers never begins
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        assert (await client.post("/v1/responses", json=HELLO | {"background": True})).json()["status"] == "queued"
    async with (
        listening(llm) as url,
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="a", max_retries=0) as client,
    ):
        await finished(client, (await client.responses.create(**HELLO, background=True)).id)
    assert len(llm.client.requests) == 1  # type: ignore[attr-defined]
