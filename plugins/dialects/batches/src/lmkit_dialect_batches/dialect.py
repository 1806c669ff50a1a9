"""/v1/files, /v1/uploads and /v1/batches: requests in a file, answered behind everything that clients wait for."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
from lmkit.api import ConfigError, InvalidParam, RequestError
from lmkit_http.dialect import Answer, Dialect, Incoming, Served, UnsupportedField
from lmkit_http.strict import InvalidBody, Open, parse
from lmkit_run_batch.play import Ask

from lmkit_dialect_batches.desk import Desk
from lmkit_dialect_batches.form import Part, read_form
from lmkit_dialect_batches.records import Batch, File
from lmkit_dialect_batches.room import StoreFull
from lmkit_dialect_batches.schema import (
    HOUR,
    MONTH,
    BatchRequest,
    CompleteRequest,
    UploadRequest,
    check_purpose,
    limit_of,
)
from lmkit_dialect_batches.store import KEPT, Store, new_id
from lmkit_dialect_batches.uploads import Uploads

log = logging.getLogger("lmkit.batches")
BATCHES, UPLOADS, COMPLETE = "POST /v1/batches", "POST /v1/uploads", "POST /v1/uploads/{id}/complete"
PARTS, CANCEL_UPLOAD = "POST /v1/uploads/{id}/parts", "POST /v1/uploads/{id}/cancel"
REQUESTS: Mapping[str, type[Open]] = {BATCHES: BatchRequest, UPLOADS: UploadRequest, COMPLETE: CompleteRequest}
_DAY = 86_400  # seconds: the only completion window of the OpenAI API
_FIELDS = {"file", "purpose", "expires_after[anchor]", "expires_after[seconds]"}


class Off(RequestError):
    code = "off"
    status = 404


class Batches(Dialect):
    files = True
    light_routes = (
        "POST /v1/files", "GET /v1/files", "GET /v1/files/{id}", "DELETE /v1/files/{id}", "GET /v1/files/{id}/content",
        "POST /v1/batches", "GET /v1/batches", "GET /v1/batches/{id}", "POST /v1/batches/{id}/cancel",
        UPLOADS, PARTS, COMPLETE, CANCEL_UPLOAD,
    )  # fmt: skip

    def __init__(self, dir: str = "", max_mb: int = 4096) -> None:
        """`dir`: where files and batches are kept; "": there are none. Raises ConfigError."""
        self.store = Store(Path(dir).expanduser(), max_mb << 20) if dir else None
        self.uploads = _uploads(self.store) if self.store is not None else None
        self._desk = Desk(self.store, self.uploads) if self.store is not None and self.uploads is not None else None

    async def work(self, answer: Ask) -> None:
        if self._desk is not None:
            await self._desk.work(answer)

    def parse(self, incoming: Incoming, served: Served) -> Answer:
        if self.store is None or self.uploads is None or self._desk is None:
            raise Off("this server keeps no files and batches", fix="start it with --dialect.batches.dir DIR")
        try:
            if incoming.route in (UPLOADS, PARTS, COMPLETE, CANCEL_UPLOAD):
                return _json(_uploading(self.uploads, incoming, served))
            return self._answer(self.store, self._desk, incoming, served)
        except OSError as error:
            log.error("files cannot be written: %s", error)
            raise StoreFull("the server cannot write files now", fix="try again in a while") from error

    def _answer(self, store: Store, desk: Desk, incoming: Incoming, served: Served) -> Answer:
        tenant, id = incoming.tenant, incoming.path.get("id", "")
        match incoming.route:
            case "POST /v1/files":
                return _json(_uploaded(store, incoming).body())
            case "GET /v1/files":
                purpose = incoming.query.get("purpose")
                files = [f for f in store.files(tenant) if purpose in (None, f.purpose)]
                return _listed(files, incoming.query, 10_000, 10_000)
            case "GET /v1/files/{id}":
                return _json(store.file(tenant, id).body())
            case "GET /v1/files/{id}/content":
                return Answer(store.path(store.file(tenant, id).id), media_type="application/octet-stream")
            case "DELETE /v1/files/{id}":
                store.delete_file(tenant, id)
                return _json({"id": id, "object": "file", "deleted": True})
            case "GET /v1/batches":
                return _listed(store.batches(tenant), incoming.query, 20, 100)
            case "GET /v1/batches/{id}":
                return _json(store.batch(tenant, id).body())
            case "POST /v1/batches":
                batch = _created(store, incoming, served)
            case _:
                batch = store.cancel(tenant, id)
        desk.tell()
        return _json(batch.body())


def _uploads(store: Store) -> Uploads:
    """Raises ConfigError."""
    try:
        return Uploads(store)
    except (OSError, msgspec.DecodeError) as error:
        folder = store.root / "uploads"
        raise ConfigError(f"{folder} cannot be read: {error}", fix="move it away, or choose another dir") from None


def _uploading(uploads: Uploads, incoming: Incoming, served: Served) -> dict[str, Any]:
    """Raises RequestError."""
    tenant, id = incoming.tenant, incoming.path.get("id", "")
    if incoming.route == UPLOADS:
        request = parse(UploadRequest, incoming.body, lenient=served.lenient)
        request.check()
        return uploads.add(tenant, request).body("pending")
    if incoming.route == COMPLETE:
        asked = parse(CompleteRequest, incoming.body, lenient=served.lenient)
        upload, file = uploads.complete(tenant, id, asked.part_ids, asked.md5)
        return upload.body("completed", file)
    if incoming.route == CANCEL_UPLOAD:
        return uploads.cancel(tenant, id).body("cancelled")
    parts = read_form(incoming.headers.get("content-type", ""), incoming.body)
    for name in sorted(parts.keys() - {"data"}):
        raise UnsupportedField(name[:100], f"unknown field {name[:100]!r}", fix="leave it out")
    if "data" not in parts:
        raise InvalidBody("data is required", "data")
    return uploads.add_part(tenant, id, parts["data"].data)


def _uploaded(store: Store, incoming: Incoming) -> File:
    """Raises RequestError."""
    parts = read_form(incoming.headers.get("content-type", ""), incoming.body)
    for name in sorted(parts.keys() - _FIELDS):
        raise UnsupportedField(name[:100], f"unknown field {name[:100]!r}", fix="leave it out")
    for name in ("file", "purpose"):
        if name not in parts:
            raise InvalidBody(f"{name} is required", name)
    purpose = parts["purpose"].text()
    check_purpose(purpose)
    name = (parts["file"].filename or "file.jsonl")[:255]
    return store.add_file(incoming.tenant, name, purpose, parts["file"].data, _kept(parts))


def _kept(parts: Mapping[str, Part]) -> int:
    """Seconds that a file is kept. Raises InvalidParam."""
    anchor, seconds = (parts.get(f"expires_after[{name}]") for name in ("anchor", "seconds"))
    if anchor is None and seconds is None:
        return KEPT
    if anchor is None or anchor.text() != "created_at":
        raise InvalidParam("expires_after.anchor", anchor.text()[:100] if anchor else None, "'created_at'")
    text = seconds.text() if seconds else ""
    if not text.isascii() or not text.isdigit() or len(text) > 9 or not HOUR <= int(text) <= MONTH:
        raise InvalidParam("expires_after.seconds", text[:20], f"a number from {HOUR} to {MONTH}")
    return int(text)


def _created(store: Store, incoming: Incoming, served: Served) -> Batch:
    """Raises RequestError."""
    request = parse(BatchRequest, incoming.body, lenient=served.lenient)
    request.check()
    file = store.file(incoming.tenant, request.input_file_id)
    if file.purpose != "batch":
        raise InvalidParam("input_file_id", file.id, "a file of purpose 'batch'")
    now, expires = int(store.now()), request.output_expires_after
    batch = Batch(
        new_id("batch_"), incoming.tenant, request.endpoint, file.id, new_id("file-"), new_id("file-"), now,
        now + _DAY, expires.seconds if expires is not None else KEPT, request.metadata,
    )  # fmt: skip
    store.add_batch(batch)
    return batch


def _listed(records: Sequence[File | Batch], query: Mapping[str, str], default: int, most: int) -> Answer:
    """A page of a list, whose newest come first. Raises InvalidParam."""
    limit = limit_of(query, default, most)
    order, after = query.get("order", "desc"), query.get("after")
    if order not in ("asc", "desc"):
        raise InvalidParam("order", order[:20], "'asc' or 'desc'")
    shown = list(records) if order == "desc" else list(reversed(records))
    if after:
        places = [i for i, record in enumerate(shown) if record.id == after]
        if not places:
            raise InvalidParam("after", after[:100], "the id of an entry of the list")
        shown = shown[places[0] + 1 :]
    page = shown[:limit]
    return _json({
        "object": "list", "data": [record.body() for record in page], "has_more": len(shown) > limit,
        "first_id": page[0].id if page else None, "last_id": page[-1].id if page else None,
    })  # fmt: skip


def _json(value: dict[str, Any]) -> Answer:
    return Answer(msgspec.json.encode(value))
