"""Files that come in parts: larger than a body may be. What is not completed in an hour is forgotten.

DIR/uploads/ID.json       one upload that is not complete
DIR/uploads/PART.data     a part of one
DIR/uploads/ID.part       the file that is being made of the parts; nothing after whatever ended the process
"""

from __future__ import annotations

import hashlib
import os
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
from lmkit.api import InvalidParam, RequestError

from lmkit_dialect_batches.records import File
from lmkit_dialect_batches.room import ShareFull
from lmkit_dialect_batches.schema import UploadRequest
from lmkit_dialect_batches.store import KEPT, NoSuchRecord, Store, new_id, write

MAX_UPLOADS = 64  # of a tenant, that are not complete
MAX_PARTS = 4096  # of one
MAX_JOINING = 2  # uploads whose parts are joined at a time, and one of a tenant: joining copies gigabytes
HOUR = 3600  # seconds
_PIECE = 1 << 20  # bytes that are copied at a time


class WrongParts(RequestError):
    """The parts do not make the file that was announced."""

    code = "invalid-upload"
    field = "part_ids"


class Part(msgspec.Struct):
    id: str
    bytes: int


class Upload(msgspec.Struct):
    """One file that is on its way. Times are seconds since 1970."""

    id: str
    tenant: str
    filename: str
    purpose: str
    bytes: int  # that the file will have
    created_at: int
    expires_at: int
    kept: int  # seconds that the file is kept
    parts: list[Part] = []

    def body(self, status: str, file: File | None = None) -> dict[str, Any]:
        return {
            "id": self.id, "object": "upload", "bytes": self.bytes, "created_at": self.created_at,
            "expires_at": self.expires_at, "filename": self.filename, "purpose": self.purpose, "status": status,
            "file": file.body() if file is not None else None,
        }  # fmt: skip


class Joining(RequestError):
    """The parts of the upload are being joined: whatever else is asked of it has to wait for the end of that."""

    code = "in-use"
    status = 409


class Busy(RequestError):
    """So many uploads are being joined that another one would take the disk from everybody."""

    code = "busy"
    status = 503


class Uploads:
    """Used from several threads. Their bytes count among those of the store's files. The lock is never held while parts
    are written or joined, which takes as long as the disk does."""

    def __init__(self, store: Store) -> None:
        """Raises OSError, msgspec.DecodeError."""
        self._store, self._root = store, store.root / "uploads"
        self._mutex = threading.RLock()
        self._joining: dict[str, str] = {}  # uploads whose parts are being joined -> their tenants
        self._arriving: Counter[str] = Counter()  # uploads -> parts that are being written
        self._arriving_bytes: Counter[str] = Counter()
        self._root.mkdir(mode=0o700, exist_ok=True)
        records = (msgspec.json.decode(path.read_bytes(), type=Upload) for path in sorted(self._root.glob("*.json")))
        self._uploads = {upload.id: upload for upload in records}
        known = {part.id for upload in self._uploads.values() for part in upload.parts}
        for path in self._root.iterdir():
            if path.suffix != ".json" and path.stem not in known:
                path.unlink()
        for upload in self._uploads.values():
            store.room.add(upload.tenant, sum(part.bytes for part in upload.parts))

    def add(self, tenant: str, request: UploadRequest) -> Upload:
        """Raises InvalidParam, ShareFull."""
        with self._mutex:
            self.sweep()
            if request.bytes > self._store.room.max_bytes:
                raise InvalidParam("bytes", request.bytes, f"at most {self._store.room.max_bytes}")
            if sum(upload.tenant == tenant for upload in self._uploads.values()) >= MAX_UPLOADS:
                raise ShareFull(
                    f"{MAX_UPLOADS} uploads of this key are not complete yet", fix="complete or cancel some"
                )
            now, kept = int(self._store.now()), request.expires_after.seconds if request.expires_after else KEPT
            upload = Upload(
                new_id("upload_"), tenant, request.filename, request.purpose, request.bytes, now, now + HOUR, kept
            )
            self._save(upload)
            self._uploads[upload.id] = upload
            return upload

    def add_part(self, tenant: str, id: str, content: bytes | bytearray) -> dict[str, Any]:
        """Raises NoSuchRecord, WrongParts, Joining, StoreFull, ShareFull."""
        part = Part(new_id("part_"), len(content))
        with self._mutex:
            upload = self._own(tenant, id)
            size = sum(part.bytes for part in upload.parts) + self._arriving_bytes[id] + part.bytes
            num_parts = len(upload.parts) + self._arriving[id] + 1
            if size > upload.bytes or not content or num_parts > MAX_PARTS:
                raise WrongParts(
                    f"with this part there are {num_parts} with {size} bytes",
                    fix=f"send at most {MAX_PARTS}, none empty, with {upload.bytes} bytes together",
                )
            self._store.room.take(tenant, part.bytes)
            self._arriving[id] += 1
            self._arriving_bytes[id] += part.bytes
        try:
            write(self._path(part.id), content)
            with self._mutex:
                self._own(tenant, id)  # somebody may have cancelled or completed it meanwhile
                upload.parts.append(part)
                self._save(upload)
        except (OSError, RequestError):
            with self._mutex:
                self._remove(upload, [part])
            raise
        finally:
            with self._mutex:
                self._arriving[id] -= 1
                self._arriving_bytes[id] -= part.bytes
                if not self._arriving[id]:
                    del self._arriving[id], self._arriving_bytes[id]
        now = int(self._store.now())
        return {"id": part.id, "object": "upload.part", "created_at": now, "upload_id": id}

    def complete(self, tenant: str, id: str, part_ids: list[str], md5: str | None) -> tuple[Upload, File]:
        """The parts in this order are a file from now on, and the others are forgotten. Raises NoSuchRecord,
        WrongParts, Joining, Busy, StoreFull, ShareFull."""
        with self._mutex:
            upload = self._own(tenant, id)
            _check_parts(upload, part_ids)
            if tenant in self._joining.values() or len(self._joining) >= MAX_JOINING:
                raise Busy("other uploads are being joined", fix="try again in a while")
            self._joining[id] = tenant
        whole = self._root / f"{id}.part"
        try:
            digest = self._join(whole, part_ids)
            if md5 is not None and md5.lower() != digest:
                raise WrongParts(f"the parts have the MD5 {digest}, not {md5[:64]!r}", fix="send them again")
            file = self._store.adopt(whole, upload.tenant, upload.filename, upload.purpose, upload.bytes, upload.kept)
            with self._mutex:
                self._forget(upload, kept=upload.bytes)
            return upload, file
        finally:
            whole.unlink(missing_ok=True)
            with self._mutex:
                del self._joining[id]

    def cancel(self, tenant: str, id: str) -> Upload:
        """Raises NoSuchRecord, Joining."""
        with self._mutex:
            upload = self._own(tenant, id)
            self._forget(upload)
            return upload

    def sweep(self) -> None:
        """Forgets what was not completed in time."""
        with self._mutex:
            now = self._store.now()
            for upload in [one for one in self._uploads.values() if one.expires_at <= now]:
                if upload.id not in self._joining:
                    self._forget(upload)

    def _join(self, whole: Path, part_ids: list[str]) -> str:
        """Writes the parts, one behind the other; their MD5."""
        digest = hashlib.md5(usedforsecurity=False)
        with whole.open("wb") as out:
            for one in part_ids:
                with self._path(one).open("rb") as part:
                    while piece := part.read(_PIECE):
                        digest.update(piece)
                        out.write(piece)
            out.flush()
            os.fsync(out.fileno())
        return digest.hexdigest()

    def _own(self, tenant: str, id: str) -> Upload:
        self.sweep()
        upload = self._uploads.get(id)
        if upload is None or upload.tenant != tenant:
            raise NoSuchRecord(f"there is no upload {id[:100]!r} that is not complete")
        if id in self._joining:
            raise Joining(f"the upload {id!r} is being completed", fix="wait for the end of that")
        return upload

    def _forget(self, upload: Upload, kept: int = 0) -> None:
        """First the record: when this is interrupted, the rest is cleared at the next start. `kept`: bytes that are
        those of a file now."""
        self._path(upload.id, ".json").unlink(missing_ok=True)
        self._uploads.pop(upload.id, None)
        self._store.room.add(upload.tenant, kept)
        self._remove(upload, upload.parts)

    def _remove(self, upload: Upload, parts: list[Part]) -> None:
        for part in parts:
            self._path(part.id).unlink(missing_ok=True)
            self._store.room.add(upload.tenant, -part.bytes)
        upload.parts = [part for part in upload.parts if part not in parts]

    def _save(self, upload: Upload) -> None:
        write(self._path(upload.id, ".json"), msgspec.json.encode(upload))

    def _path(self, id: str, suffix: str = ".data") -> Path:
        return self._root / f"{id}{suffix}"


def _check_parts(upload: Upload, part_ids: list[str]) -> None:
    """Raises WrongParts."""
    known = {part.id: part for part in upload.parts}
    if unknown := [one for one in part_ids if one not in known]:
        raise WrongParts(f"there is no part {unknown[0][:100]!r}", fix="send the ids of its parts, in order")
    if len(set(part_ids)) != len(part_ids):
        raise WrongParts("a part is named twice")
    if (size := sum(known[one].bytes for one in part_ids)) != upload.bytes:
        raise WrongParts(f"the parts have {size} bytes, {upload.bytes} were announced")
