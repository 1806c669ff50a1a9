"""Files and batches in a directory: bounded, whole after whatever ended the process, each tenant's own.

    DIR/lock                  held by the server that works here
    DIR/files/ID.data         what is in a file; of results it grows while a batch runs
    DIR/files/ID.json         what is known of it; a file without is none
    DIR/batches/ID.json       one batch
    DIR/uploads/              what lmkit_dialect_batches.uploads keeps

A record is replaced by renaming, after it was written to the disk.
"""

from __future__ import annotations

import fcntl
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TypeVar
from uuid import uuid4

import msgspec
from lmkit.api import ConfigError, RequestError, RequestTooLarge
from lmkit_run_batch.lines import Fault

from lmkit_dialect_batches.records import Batch, File, Status
from lmkit_dialect_batches.room import Room, ShareFull, StoreFull

MAX_FILES = 8192  # of all tenants
MAX_BATCHES = 4096  # the oldest finished ones are forgotten
MAX_UNFINISHED = 64  # batches of a tenant
KEPT = 30 * 86_400  # seconds that files and finished batches are kept, unless a client says otherwise
Record = TypeVar("Record", File, Batch)


class NoSuchRecord(RequestError):
    code = "not_found"
    status = 404


class InUse(RequestError):
    code = "in-use"
    status = 409


class Store:
    """Used from several threads; the lock is never held while the content of a file is written. `now` tells the seconds
    since 1970."""

    def __init__(self, root: Path, max_bytes: int, now: Callable[[], float] = time.time) -> None:
        """Raises ConfigError."""
        self.root, self.now = root, now
        self.room = Room(max_bytes, MAX_FILES)
        self._mutex = threading.RLock()
        try:
            for folder in ("files", "batches"):
                (root / folder).mkdir(mode=0o700, parents=True, exist_ok=True)  # what clients sent is nobody else's
            held = os.open(root / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            self._release = weakref.finalize(self, os.close, held)
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._files = {file.id: file for file in self._load("files", File)}
            self._batches = {batch.id: batch for batch in self._load("batches", Batch)}
            self._clear()
        except BlockingIOError:
            raise ConfigError(
                f"another server works in {root}", fix="give each server a directory of its own"
            ) from None
        except OSError as error:
            raise ConfigError(
                f"cannot keep files in {root}: {error.strerror}", fix="choose another directory"
            ) from error

    def close(self) -> None:
        """Lets another server work here."""
        self._release()

    # -- files

    def path(self, id: str) -> Path:
        return self.root / "files" / f"{id}.data"

    def add_file(self, tenant: str, filename: str, purpose: str, content: bytes | bytearray, kept: int) -> File:
        """Raises RequestTooLarge, StoreFull, ShareFull."""
        if len(content) > self.room.max_bytes:
            fix = "split the file, or compute it with lmkit run-batch"
            raise RequestTooLarge("file", len(content), self.room.max_bytes, fix=fix)
        self.room.take(tenant, len(content), 1)
        now = int(self.now())
        file = File(new_id("file-"), tenant, filename, purpose, len(content), now, now + kept)
        try:
            write(self.path(file.id), content)
            self._save("files", file)
        except OSError:
            self._unlink(file.id)
            self.room.add(tenant, -len(content), -1)
            raise
        with self._mutex:
            self._files[file.id] = file
        return file

    def adopt(self, path: Path, tenant: str, filename: str, purpose: str, size: int, kept: int) -> File:
        """Makes a file of one that was written here, and whose bytes are counted. Raises StoreFull, ShareFull."""
        self.room.take(tenant, 0, 1)
        now = int(self.now())
        file = File(new_id("file-"), tenant, filename, purpose, size, now, now + kept)
        try:
            path.replace(self.path(file.id))
            self._save("files", file)
        except OSError:
            self._unlink(file.id)
            self.room.add(tenant, 0, -1)
            raise
        with self._mutex:
            self._files[file.id] = file
        return file

    def file(self, tenant: str, id: str) -> File:
        """Raises NoSuchRecord, for those of others, too."""
        return _own(self._files, tenant, id, "file")

    def files(self, tenant: str) -> list[File]:
        """The newest first."""
        return _newest(self._files.values(), tenant)

    def delete_file(self, tenant: str, id: str) -> None:
        """Raises NoSuchRecord, InUse."""
        with self._mutex:
            self.file(tenant, id)
            if user := next((b for b in self._batches.values() if b.input_file_id == id and not b.finished), None):
                raise InUse(f"batch {user.id} reads the file {id!r}", fix="cancel the batch, or wait for its end")
            self._remove(self._files[id])

    def _remove(self, file: File) -> None:
        size = self._unlink(file.id)
        if self._files.pop(file.id, None) is not None:
            self.room.add(file.tenant, -size, -1)

    def _unlink(self, id: str) -> int:
        """Bytes of the content that was removed. What makes it a file goes first: when this is interrupted, the rest
        is cleared at the next start."""
        (self.root / "files" / f"{id}.json").unlink(missing_ok=True)
        path = self.path(id)
        size = path.stat().st_size if path.exists() else 0
        path.unlink(missing_ok=True)
        return size

    # -- batches

    def add_batch(self, batch: Batch) -> None:
        """Raises StoreFull, ShareFull."""
        with self._mutex:
            if sum(b.tenant == batch.tenant and not b.finished for b in self._batches.values()) >= MAX_UNFINISHED:
                raise ShareFull(
                    f"{MAX_UNFINISHED} batches of this key are not finished yet", fix="wait for the end of one"
                )
            if len(self._batches) >= MAX_BATCHES:
                finished = [b for b in self._batches.values() if b.finished]  # its own go first
                oldest = min(finished, key=lambda b: (b.tenant != batch.tenant, *_age(b)), default=None)
                if oldest is None:
                    raise StoreFull(f"{MAX_BATCHES} batches are not finished yet", fix="try again in a while")
                self._forget(oldest)
            self._save("batches", batch)
            self._batches[batch.id] = batch

    def batch(self, tenant: str, id: str) -> Batch:
        """Raises NoSuchRecord, for those of others, too."""
        return _own(self._batches, tenant, id, "batch")

    def batches(self, tenant: str) -> list[Batch]:
        """The newest first."""
        return _newest(self._batches.values(), tenant)

    def unfinished(self) -> list[Batch]:
        """Those of all tenants, the oldest first."""
        with self._mutex:
            return sorted((b for b in self._batches.values() if not b.finished), key=_age)

    def move(self, batch: Batch, status: Status) -> None:
        """The batch is in another state from now on."""
        with self._mutex:
            batch.status = status
            batch.times[status] = int(self.now())
            self._save("batches", batch)

    def cancel(self, tenant: str, id: str) -> Batch:
        """Raises NoSuchRecord; InUse for a batch that has ended."""
        with self._mutex:
            batch = self.batch(tenant, id)
            if batch.finished or batch.status == "finalizing":
                raise InUse(f"the batch is {batch.status}", fix="leave it")
            if batch.status != "cancelling":
                self.move(batch, "cancelling")
            return batch

    def begin(self, batch: Batch, total: int) -> None:
        """The input has been checked. One that was cancelled meanwhile stays so."""
        with self._mutex:
            batch.total = total
            if batch.status == "validating":
                self.move(batch, "in_progress")

    def fail(self, batch: Batch, faults: list[Fault]) -> None:
        with self._mutex:
            batch.faults = faults
            self._keep_results(batch)
            self.move(batch, "failed")

    def finish(self, batch: Batch, status: Status) -> None:
        """Its results are files from now on. Repeated after an interruption it does the same."""
        with self._mutex:
            if status == "completed":
                self.move(batch, "finalizing")
            self._keep_results(batch)
            self.move(batch, status)

    def _keep_results(self, batch: Batch) -> None:
        now = int(self.now())
        for id, what in ((batch.output_id, "output"), (batch.error_id, "error")):
            size = self.path(id).stat().st_size if self.path(id).exists() else 0
            if not size:
                self.path(id).unlink(missing_ok=True)
                continue
            file = File(id, batch.tenant, f"{batch.id}_{what}.jsonl", "batch_output", size, now, now + batch.kept)
            self._save("files", file)
            if id not in self._files:
                self.room.add(batch.tenant, 0, 1)
            self._files[id] = file
            batch.has_output |= what == "output"
            batch.has_errors |= what == "error"

    def _forget(self, batch: Batch) -> None:
        (self.root / "batches" / f"{batch.id}.json").unlink(missing_ok=True)
        self._batches.pop(batch.id, None)

    # -- both

    def sweep(self) -> None:
        """Removes what has been kept long enough, and nothing that a batch still reads."""
        with self._mutex:
            now = self.now()
            read = {b.input_file_id for b in self._batches.values() if not b.finished}
            for file in [f for f in self._files.values() if f.expires_at <= now and f.id not in read]:
                self._remove(file)
            for batch in [b for b in self._batches.values() if b.finished and b.created_at + KEPT <= now]:
                self._forget(batch)

    def _clear(self) -> None:
        """Removes what belongs to nothing, and counts the rest."""
        batches = [batch for batch in self._batches.values() if not batch.finished]
        owners = {id: batch.tenant for batch in batches for id in (batch.output_id, batch.error_id)}
        owners |= {file.id: file.tenant for file in self._files.values()}
        for path in (self.root / "files").iterdir():
            if path.suffix == ".data" and path.stem in owners:
                self.room.add(owners[path.stem], path.stat().st_size, int(path.stem in self._files))
            elif path.suffix in (".data", ".part"):
                path.unlink()
        for file in [f for f in self._files.values() if not self.path(f.id).exists()]:
            self._files.pop(file.id)
            self._unlink(file.id)

    def _load(self, folder: str, kind: type[Record]) -> list[Record]:
        """Records that can be read. Raises ConfigError for one that cannot: it may be of a newer version."""
        found = []
        for path in sorted((self.root / folder).glob("*.json")):
            try:
                found.append(msgspec.json.decode(path.read_bytes(), type=kind))
            except msgspec.DecodeError as error:
                raise ConfigError(
                    f"{path} cannot be read: {error}", fix="move it away, or choose another dir"
                ) from None
        return found

    def _save(self, folder: str, record: File | Batch) -> None:
        write(self.root / folder / f"{record.id}.json", msgspec.json.encode(record))


def new_id(kind: str) -> str:
    return f"{kind}{uuid4().hex}"


def write(path: Path, content: bytes | bytearray) -> None:
    """The whole of it, or nothing. Raises OSError."""
    part = path.with_suffix(".part")
    try:
        with part.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    except OSError:
        part.unlink(missing_ok=True)
        raise
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _own(records: dict[str, Record], tenant: str, id: str, what: str) -> Record:
    record = records.get(id)
    if record is None or record.tenant != tenant:
        raise NoSuchRecord(f"there is no {what} {id[:100]!r}")
    return record


def _age(record: File | Batch) -> tuple[int, str]:
    return record.created_at, record.id


def _newest(records: Iterable[Record], tenant: str) -> list[Record]:
    return sorted((r for r in list(records) if r.tenant == tenant), key=_age, reverse=True)
