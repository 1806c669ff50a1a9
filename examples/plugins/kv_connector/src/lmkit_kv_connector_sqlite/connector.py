"""KV blocks in a SQLite file. The library lmkit_stores does what every connector needs: threads, so that the engine
never waits; limits of time and memory; a checksum of each block; a pause after a failure. A store is what is left."""

import sqlite3
from threading import Lock

from lmkit_stores import StoreConnector, name_of

from lmkit_kv_connector_sqlite.hooks import Options

TABLE = "CREATE TABLE IF NOT EXISTS blocks (number INTEGER PRIMARY KEY, name TEXT UNIQUE, frame BLOB)"


class Blocks:
    """Contract: lmkit_stores.Store. Called from threads of the connector; what it raises is logged, and the file left
    alone for a while."""

    def __init__(self, file, size):
        """`size` in bytes."""
        self._size, self._lock = size, Lock()
        self._file = sqlite3.connect(file, check_same_thread=False, isolation_level=None)
        self._file.execute("PRAGMA journal_mode=WAL")  # several engines may share it
        self._file.execute("PRAGMA synchronous=OFF")  # what a crash of the machine costs is computed again
        self._file.execute(TABLE)
        self._names = {name for (name,) in self._file.execute("SELECT name FROM blocks")}

    def read(self, keys):
        """The frame of each key, in order. One after another: who asks may stop at the first that is missing."""
        for key in keys:
            with self._lock:
                row = self._file.execute("SELECT frame FROM blocks WHERE name = ?", [name_of(key)]).fetchone()
            yield row and row[0]

    def write(self, key, frame):
        with self._lock:
            self._file.execute("INSERT OR REPLACE INTO blocks (name, frame) VALUES (?, ?)", [name_of(key), frame])
            self._names.add(name_of(key))
            while self._bytes() > self._size:
                sql = "DELETE FROM blocks WHERE number = (SELECT min(number) FROM blocks) RETURNING name"
                self._names -= {name for (name,) in self._file.execute(sql).fetchall()}

    def has(self, key):
        """Asked in the engine's thread for each block that is computed: from memory, never from the file."""
        return name_of(key) in self._names

    def drop(self, key):
        """A damaged frame, which is written again when its block is computed the next time."""
        with self._lock:
            self._file.execute("DELETE FROM blocks WHERE name = ?", [name_of(key)])
            self._names.discard(name_of(key))

    def close(self):
        with self._lock:
            self._file.close()

    def _bytes(self):
        """Blocks of a model have one size, or two: the last stands for all."""
        sql = "SELECT count(*), (SELECT length(frame) FROM blocks ORDER BY number DESC LIMIT 1) FROM blocks"
        count, each = self._file.execute(sql).fetchone()
        return count * (each or 0)


class SqliteConnector(StoreConnector):
    """Contract: lmkit.api.KVConnector. Blocks of another model, dtype or layout have other keys: the file may be
    shared by any number of models."""

    def __init__(self, checkpoint, resolved, kv, **options):
        chosen = Options(**options)
        store = Blocks(chosen.file, chosen.size << 20)
        super().__init__(store, checkpoint, resolved, kv, chosen, saves="computed")
