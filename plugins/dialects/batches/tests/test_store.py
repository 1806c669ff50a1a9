"""The store: what is there after a kill, what has no room, and forms that strangers wrote."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lmkit.api import RequestError
from lmkit_dialect_batches.form import read_form
from lmkit_dialect_batches.records import Batch
from lmkit_dialect_batches.room import Room, ShareFull, StoreFull
from lmkit_dialect_batches.store import Store, new_id
from lmkit_http.dialect import Answer
from lmkit_run_batch.lines import Fault
from lmkit_run_batch.results import Results

KILLS = int(os.environ.get("BATCH_KILLS", "2"))
NUM = 150


@settings(max_examples=120, deadline=None)
@given(st.binary(max_size=120), st.sampled_from(["a", "----x", "", 'a"']), st.booleans())
def test_any_form_is_read_or_refused(content: bytes, boundary: str, framed: bool) -> None:
    line = b"--" + boundary.encode()
    name = b'Content-Disposition: form-data; name="file"\r\n\r\n'
    body = line + b"\r\n" + name + content + b"\r\n" + line + b"--\r\n" if framed else content
    try:
        parts = read_form(f"multipart/form-data; boundary={boundary}", body)
    except RequestError:
        assert not framed or boundary not in ("a", "----x") or line in content
    else:
        assert not framed or line in content or bytes(parts["file"].data) == content


def test_many_parts_and_twice_the_same_are_refused() -> None:
    def form(*names: str) -> bytes:
        parts = b"".join(b'--x\r\nContent-Disposition: form-data; name="%b"\r\n\r\nv\r\n' % n.encode() for n in names)
        return parts + b"--x--\r\n"

    assert read_form("multipart/form-data; boundary=x", form("a", "b"))["b"].text() == "v"
    for names in (("a", "a"), tuple(map(str, range(17)))):
        with pytest.raises(RequestError, match="several parts"):
            read_form("multipart/form-data; boundary=x", form(*names))
    with pytest.raises(RequestError, match="does not end"):
        read_form("multipart/form-data; boundary=x", form("a")[:-8])


def test_results_that_find_no_room_fail_the_batch_and_keep_what_there_is(tmp_path: Path) -> None:
    store = Store(tmp_path, 1000)
    batch = Batch(new_id("batch_"), "", "/x", "file-x", new_id("file-"), new_id("file-"), 0, 0, 9)
    store.add_batch(batch)
    results = Results(store.path(batch.output_id), store.path(batch.error_id), partial(store.room.take, ""))
    results.answered("a", Answer(b"{}"))
    with pytest.raises(StoreFull):
        results.answered("b", Answer(msgspec.json.encode("x" * 1000)))
    assert results.ids == {"a"}
    results.close()
    store.fail(batch, [Fault("storage", "full")])
    store.close()
    again = Store(tmp_path, 1000)
    (found,) = again.batches("")
    assert (found.status, found.has_output, found.has_errors) == ("failed", True, False)
    assert again.path(again.file("", batch.output_id).id).read_bytes().count(b"\n") == 1
    again.close()


SERVER = """
import asyncio, sys
from lmkit_dialect_batches.dialect import Batches
from lmkit_http.dialects import installed_dialects
from lmkit_testing.serving import listening, scripted
from msgspec.structs import replace

async def main():
    dialects = [*(d for d in installed_dialects() if not isinstance(d, Batches)), Batches(sys.argv[1])]
    llm = scripted("hello", delay=0.02)
    llm.client.facts = replace(llm.facts, max_rows=16)  # 14 requests in the background at a time
    async with listening(llm, dialects=dialects) as url:
        print(url, flush=True)
        await asyncio.sleep(600)

asyncio.run(main())
"""


def serve(folder: Path) -> tuple[subprocess.Popen[str], str]:
    server = subprocess.Popen([sys.executable, "-c", SERVER, str(folder)], stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    return server, server.stdout.readline().strip()


def kill(server: subprocess.Popen[str]) -> None:
    server.send_signal(signal.SIGKILL)
    server.communicate()


@pytest.mark.full("lmkit-dialect-batches", "lmkit-http")
def test_a_batch_survives_kill_9(tmp_path: Path) -> None:
    """Killed in the middle, again and again: every request has one line in the end, and none is lost or changed."""
    body = {"prompt": "x", "max_tokens": 5}
    line = {"method": "POST", "url": "/v1/completions", "body": body}
    bodies = [line | {"custom_id": str(i), "body": body | ({"top_p": 7} if i % 10 == 3 else {})} for i in range(NUM)]
    content = b"".join(msgspec.json.encode(one) + b"\n" for one in bodies)
    server, url = serve(tmp_path)
    try:
        form: dict[str, Any] = {"files": {"file": content}, "data": {"purpose": "batch"}}
        file = httpx.post(f"{url}/v1/files", **form, timeout=60).json()["id"]
        asked = {"input_file_id": file, "endpoint": "/v1/completions", "completion_window": "24h"}
        id = httpx.post(f"{url}/v1/batches", json=asked, timeout=60).json()["id"]
        kept: dict[Path, bytes] = {}
        for n in range(KILLS):
            wanted = (n + 1) * NUM // (KILLS + 2)
            while sum(batch_of(url, id)["request_counts"][name] for name in ("completed", "failed")) < wanted:
                time.sleep(0.002)
            kill(server)
            for path, written in kept.items():
                assert path.read_bytes().startswith(written)
            kept = {path: whole_lines(path) for path in (tmp_path / "files").glob("*.data")}
            server, url = serve(tmp_path)
        while (batch := batch_of(url, id))["status"] != "completed":
            assert batch["status"] in ("in_progress", "finalizing")
            time.sleep(0.01)
        counts = batch["request_counts"]
        assert counts == {"total": NUM, "completed": NUM - NUM // 10, "failed": NUM // 10}
        found = []
        for name in ("output_file_id", "error_file_id"):
            text = httpx.get(f"{url}/v1/files/{batch[name]}/content", timeout=60).content
            assert text.startswith(kept[tmp_path / "files" / f"{batch[name]}.data"])
            found += [json.loads(one) for one in text.splitlines()]
        assert sorted(int(one["custom_id"]) for one in found) == list(range(NUM))
        for one in found:
            status = 400 if int(one["custom_id"]) % 10 == 3 else 200
            assert one["response"]["status_code"] == status
    finally:
        kill(server)


def batch_of(url: str, id: str) -> dict[str, Any]:
    answer: dict[str, Any] = httpx.get(f"{url}/v1/batches/{id}", timeout=60).json()
    return answer


def whole_lines(path: Path) -> bytes:
    content = path.read_bytes()
    return content[: content.rfind(b"\n") + 1]


def test_no_tenant_finds_the_room_full_of_anothers_files() -> None:
    """One gets half of the room, the next half of the rest; who has nothing gets something, in files and in bytes."""
    room = Room(max_bytes=1 << 20, max_files=64)

    def fill(tenant: str, num_bytes: int) -> int:
        num = 0
        try:
            while True:
                room.take(tenant, num_bytes, 1)
                num += 1
        except ShareFull:
            return num

    assert [fill("alice", 1), fill("bob", 1), fill("carol", 1)] == [32, 16, 8]
    room.add("alice", -10, -10)
    assert fill("dave", 1) == 9
    by_bytes = Room(max_bytes=1024, max_files=1 << 20)
    room = by_bytes
    assert [fill("alice", 8), fill("bob", 8)] == [64, 32]


def test_the_only_tenant_may_have_everything() -> None:
    room = Room(max_bytes=100, max_files=3)
    room.take("", 60, 1)
    with pytest.raises(StoreFull, match="at most"):
        room.take("", 50, 1)
    room.take("", 40, 1)
    room.take("", 0, 1)
    with pytest.raises(StoreFull, match="3 files"):
        room.take("", 0, 1)
    assert room.num_bytes == 100


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(-8, 8), st.booleans())))
def test_room_is_never_overdrawn(asked: list[tuple[str, int, bool]]) -> None:
    room, held = Room(max_bytes=64, max_files=1 << 20), dict.fromkeys("abc", 0)
    for tenant, size, several in asked:
        name = tenant if several else ""
        if size < 0:
            size = max(size, -held.get(name, 0))
            room.add(name, size)
        else:
            try:
                room.take(name, size)
            except (StoreFull, ShareFull):
                continue
            assert not several or held[name] + size <= 64 - room.num_bytes or not size
        held[name] = held.get(name, 0) + size
        assert room.num_bytes == sum(held.values()) <= 64
