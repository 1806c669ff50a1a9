"""Files in parts: with the official client, and whatever clients do in whatever order."""

from __future__ import annotations

import errno
import hashlib
import shutil
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from lmkit.api import ConfigError, RequestError
from lmkit_dialect_batches import uploads as module
from lmkit_dialect_batches.dialect import Batches
from lmkit_dialect_batches.schema import UploadRequest
from lmkit_dialect_batches.store import Store
from lmkit_dialect_batches.uploads import Busy, Joining, Upload, Uploads
from lmkit_http.app import build_app
from lmkit_http.settings import ServerSettings
from lmkit_testing.serving import listening, scripted

openai = pytest.importorskip("openai", reason="the official client is not installed")

CONTENT = b"".join(b'{"line": %d}\n' % i for i in range(1000))


async def test_a_large_file_with_the_official_client(tmp_path: Path) -> None:
    batches = Batches(str(tmp_path))
    path = tmp_path / "requests.jsonl"
    path.write_bytes(CONTENT)
    async with (
        listening(scripted("x"), dialects=[batches]) as url,
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="a", max_retries=0) as client,
    ):
        done = await client.uploads.upload_file_chunked(
            file=path, mime_type="application/jsonl", purpose="batch", part_size=1000,
            md5=hashlib.md5(CONTENT).hexdigest(),
        )  # fmt: skip
        assert (done.status, done.bytes, done.filename) == ("completed", len(CONTENT), "requests.jsonl")
        assert done.file is not None
        assert (await client.files.content(done.file.id)).content == CONTENT
        assert (await client.files.retrieve(done.file.id)).purpose == "batch"
        # in another order, with a part left out, and cancelled
        small: dict[str, Any] = {"filename": "a.jsonl", "mime_type": "application/jsonl", "purpose": "batch"}
        upload = await client.uploads.create(**small, bytes=4)
        assert upload.status == "pending"
        parts = [await client.uploads.parts.create(upload.id, data=data) for data in (b"cd", b"ab")]
        done = await client.uploads.complete(upload.id, part_ids=[parts[1].id, parts[0].id])
        assert done.file is not None
        assert (await client.files.content(done.file.id)).content == b"abcd"
        upload = await client.uploads.create(**small, bytes=4)
        await client.uploads.parts.create(upload.id, data=b"ab")
        assert (await client.uploads.cancel(upload.id)).status == "cancelled"
        with pytest.raises(openai.NotFoundError):
            await client.uploads.parts.create(upload.id, data=b"ab")
    assert not list((tmp_path / "uploads").iterdir())


@pytest.mark.parametrize(
    ("method", "words"),
    [
        ("too large a part", "send at most 4096, none empty, with 4 bytes together"),
        ("an empty part", "send at most"),
        ("too few bytes", "the parts have 2 bytes, 4 were announced"),
        ("unknown part", "there is no part 'part_1'"),
        ("a part twice", "a part is named twice"),
        ("another md5", "the parts have the MD5 e2fc714c4727ee9395f324cd2e7f331f, not"),
        ("another tenant", "there is no upload"),
        ("another purpose", "files are for nothing else here"),
        ("too many", "1 uploads of this key are not complete yet"),
        ("too large a file", "at most 1048576"),
        ("a field more", "unknown field 'name'"),
    ],
)
async def test_what_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str, words: str) -> None:
    monkeypatch.setattr(module, "MAX_UPLOADS", 1)
    dialect = Batches(str(tmp_path), max_mb=1)
    app = build_app(scripted("x"), ServerSettings(api_keys=("a", "b")), dialects=[dialect])
    transport = httpx.ASGITransport(app)
    headers = {"authorization": "Bearer a"}
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost/v1", headers=headers) as c:
        body = {"filename": "f", "bytes": 4, "purpose": "batch", "mime_type": "text/plain"}
        if method in ("another purpose", "too large a file"):
            body |= {"purpose": "vision"} if method == "another purpose" else {"bytes": (1 << 20) + 1}
        upload = await c.post("/uploads", json=body)
        if upload.status_code == 200:
            id = upload.json()["id"]
            data = {"too large a part": b"abcde", "an empty part": b"", "too few bytes": b"ab"}.get(method, b"abcd")
            part = await c.post(f"/uploads/{id}/parts", files={"data": ("f", data)})
            ids = [part.json().get("id")]
            match method:
                case "unknown part":
                    ids = ["part_1"]
                case "a part twice":
                    ids *= 2
                case "too many":
                    part = await c.post("/uploads", json=body)
                case "a field more":
                    part = await c.post(f"/uploads/{id}/parts", files={"data": ("f", b"x"), "name": ("g", b"x")})
                case "another tenant":
                    part = await c.post(f"/uploads/{id}/cancel", headers={"authorization": "Bearer b"})
            md5 = {"md5": "0" * 32} if method == "another md5" else {}
            answer = await c.post(f"/uploads/{id}/complete", json={"part_ids": ids, **md5}) if part.is_success else part
        else:
            answer = upload
        status = {"another tenant": 404, "too many": 429}.get(method, 400)
        assert answer.status_code == status, answer.text
        assert words.lower() in answer.json()["error"]["message"].lower()
    assert dialect.store is not None
    dialect.store.close()


def test_a_full_disk_keeps_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store(tmp_path, 1000)
    uploads = Uploads(store)
    upload = uploads.add("t", request(4))
    first = uploads.add_part("t", upload.id, b"ab")["id"]

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "no space")

    monkeypatch.setattr(module, "write", full)
    with pytest.raises(OSError, match="no space"):
        uploads.add_part("t", upload.id, b"cd")
    monkeypatch.undo()
    assert store.room.num_bytes == 2
    second = uploads.add_part("t", upload.id, b"cd")["id"]
    monkeypatch.setattr(module.os, "fsync", full)
    with pytest.raises(OSError, match="no space"):
        uploads.complete("t", upload.id, [first, second], None)
    monkeypatch.undo()
    assert uploads.complete("t", upload.id, [first, second], None)[1].bytes == 4
    store.close()


def test_a_record_of_a_newer_version_stops_the_start(tmp_path: Path) -> None:
    Batches(str(tmp_path)).store.close()  # type: ignore[union-attr]
    (tmp_path / "uploads" / "upload_1.json").write_text("{}")
    with pytest.raises(ConfigError, match="move it away"):
        Batches(str(tmp_path))


def test_nothing_waits_while_parts_are_joined(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The lock is free meanwhile: others begin uploads, and what is asked of the same one is refused at once."""
    store = Store(tmp_path, 1000)
    uploads = Uploads(store)
    upload, other = uploads.add("alice", request(4)), uploads.add("alice", request(1))
    part = uploads.add_part("alice", upload.id, b"abcd")["id"]
    single = uploads.add_part("alice", other.id, b"x")["id"]
    joining, go_on = threading.Event(), threading.Event()
    join = uploads._join

    def slow(whole: Path, part_ids: list[str]) -> str:
        joining.set()
        assert go_on.wait(60)
        return join(whole, part_ids)

    monkeypatch.setattr(uploads, "_join", slow)
    with ThreadPoolExecutor(1) as pool:
        completed = pool.submit(uploads.complete, "alice", upload.id, [part], None)
        assert joining.wait(60)
        uploads.cancel("bob", uploads.add("bob", request(10)).id)
        store.add_file("bob", "f", "batch", b"content", 3600)
        for work in (
            partial(uploads.cancel, "alice", upload.id),
            partial(uploads.add_part, "alice", upload.id, b"x"),
            partial(uploads.complete, "alice", upload.id, [part], None),
        ):
            with pytest.raises(Joining, match="is being completed"):
                work()
        with pytest.raises(Busy) as busy:
            uploads.complete("alice", other.id, [single], None)
        assert busy.value.status == 503
        go_on.set()
        assert completed.result()[1].bytes == 4
    assert uploads.complete("alice", other.id, [single], None)[1].bytes == 1
    assert not uploads._joining
    store.close()


def test_an_upload_that_is_cancelled_while_a_part_arrives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store(tmp_path, 1000)
    uploads = Uploads(store)
    upload = uploads.add("t", request(4))
    write = module.write

    def cancelled(path: Path, content: bytes) -> None:
        write(path, content)
        if path.suffix == ".data":
            uploads.cancel("t", upload.id)

    monkeypatch.setattr(module, "write", cancelled)
    with pytest.raises(RequestError, match="there is no upload"):
        uploads.add_part("t", upload.id, b"abcd")
    assert store.room.num_bytes == 0
    assert not list((tmp_path / "uploads").iterdir())
    assert not uploads._arriving
    store.close()


def test_parts_that_arrive_together_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store(tmp_path, 1000)
    uploads = Uploads(store)
    upload = uploads.add("t", request(4))
    write = module.write

    def meanwhile(path: Path, content: bytes) -> None:
        if path.suffix == ".data" and len(content) == 3:
            with pytest.raises(RequestError, match="2 with 5 bytes"):
                uploads.add_part("t", upload.id, b"xx")
        write(path, content)

    monkeypatch.setattr(module, "write", meanwhile)
    uploads.add_part("t", upload.id, b"abc")
    assert store.room.num_bytes == 3
    store.close()


def request(size: int) -> UploadRequest:
    return UploadRequest(filename="f", bytes=size, purpose="batch", mime_type="text/plain")


class Clients(RuleBasedStateMachine):
    """Some clients, a server that is started anew, and time that passes; what should be there is kept beside."""

    def __init__(self) -> None:
        super().__init__()
        self.folder, self.time = Path(tempfile.mkdtemp()), 1000.0
        self.pending: dict[str, tuple[Upload, dict[str, bytes]]] = {}
        self.files: dict[str, bytes] = {}
        self.start()

    def start(self) -> None:
        self.store = Store(self.folder, 64, now=lambda: self.time)
        self.uploads = Uploads(self.store)

    def teardown(self) -> None:
        self.store.close()
        shutil.rmtree(self.folder)

    def due(self) -> None:
        """What was not completed in time is gone."""
        self.pending = {id: one for id, one in self.pending.items() if one[0].expires_at > self.time}

    @rule(size=st.integers(1, 8))
    def add(self, size: int) -> None:
        upload = self.uploads.add("", request(size))
        self.pending[upload.id] = (upload, {})

    @rule(number=st.integers(0, 3), data=st.binary(max_size=5))
    def part(self, number: int, data: bytes) -> None:
        self.due()
        if number >= len(self.pending):
            return
        id, (upload, parts) = list(self.pending.items())[number]
        room = upload.bytes - sum(map(len, parts.values()))
        try:
            parts[self.uploads.add_part("", id, data)["id"]] = data
        except RequestError:
            assert not 0 < len(data) <= room or self.store.room.num_bytes + len(data) > 64
        else:
            assert 0 < len(data) <= room

    @rule(number=st.integers(0, 3), backwards=st.booleans())
    def complete(self, number: int, backwards: bool) -> None:
        self.due()
        if number >= len(self.pending):
            return
        id, (upload, parts) = list(self.pending.items())[number]
        ids = list(parts)[:: -1 if backwards else 1]
        try:
            _, file = self.uploads.complete("", id, ids, None)
        except RequestError:
            assert sum(map(len, parts.values())) != upload.bytes
        else:
            self.files[file.id] = b"".join(parts[one] for one in ids)
            del self.pending[id]

    @rule(number=st.integers(0, 3))
    def cancel(self, number: int) -> None:
        self.due()
        for id in list(self.pending)[number : number + 1]:
            self.uploads.cancel("", id)
            del self.pending[id]

    @rule(seconds=st.sampled_from([600.0, 4000.0]))
    def wait(self, seconds: float) -> None:
        self.time += seconds
        self.uploads.sweep()
        self.due()

    @rule()
    def restart(self) -> None:
        self.store.close()
        self.start()

    @invariant()
    def nothing_is_lost_or_left(self) -> None:
        parts = [data for _, parts in self.pending.values() for data in parts.values()]
        assert self.store.room.num_bytes == sum(map(len, [*parts, *self.files.values()]))
        on_disk = sorted(path.stem for path in (self.folder / "uploads").iterdir())
        assert on_disk == sorted([*self.pending, *(id for _, parts in self.pending.values() for id in parts)])
        for id, content in self.files.items():
            assert self.store.path(id).read_bytes() == content
            assert self.store.file("", id).bytes == len(content)


TestClients = Clients.TestCase
