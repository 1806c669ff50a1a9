"""How many files and bytes may be kept: by all tenants together, and by each of them."""

from __future__ import annotations

import threading
from collections import Counter

from lmkit.api import RequestError


class StoreFull(RequestError):
    """The server has no room for now: clients try again by themselves."""

    code = "storage-full"
    status = 507


class ShareFull(RequestError):
    """A tenant keeps as much as it may. Deleting something helps; waiting does not."""

    code = "share-full"
    status = 429


class Room:
    """Counts files and bytes by tenant. Used from several threads.

    One of several tenants may keep no more than is still free ("dynamic thresholds", A. K. Choudhury and E. L. Hahne,
    IEEE/ACM Transactions on Networking 6(2), 1998): a single one gets half of the room, the next one half of the rest,
    and so on, so that nobody finds it full of others' files. The tenant "" is the only one, and may have everything.
    """

    def __init__(self, max_bytes: int, max_files: int) -> None:
        self.max_bytes, self.max_files = max_bytes, max_files
        self._lock = threading.Lock()
        self._bytes: Counter[str] = Counter()
        self._files: Counter[str] = Counter()

    @property
    def num_bytes(self) -> int:
        """Bytes of all tenants."""
        return self._bytes.total()

    def take(self, tenant: str, num_bytes: int, num_files: int = 0) -> None:
        """Makes room for a file, or for bytes of one. Raises StoreFull, ShareFull; then nothing is taken."""
        with self._lock:
            for counter, more, limit, shown in (
                (self._files, num_files, self.max_files, f"{self.max_files} files"),
                (self._bytes, num_bytes, self.max_bytes, f"{self.max_bytes / (1 << 20):g} MiB of files"),
            ):
                free = limit - counter.total() - more
                if more and tenant and counter[tenant] + more > free:
                    raise ShareFull(
                        f"the files of this key take up its share of the {shown} that this server keeps",
                        fix="delete files that are not needed any more",
                    )
                if more and free < 0:
                    raise StoreFull(
                        f"this server keeps at most {shown}",
                        fix="delete files that are not needed any more, or try again later; the server's "
                        "--dialect.batches.max-mb says how much it keeps",
                    )
            self._add(tenant, num_bytes, num_files)

    def add(self, tenant: str, num_bytes: int, num_files: int = 0) -> None:
        """Counts what is there already, or, below 0, what is gone."""
        with self._lock:
            self._add(tenant, num_bytes, num_files)

    def _add(self, tenant: str, num_bytes: int, num_files: int) -> None:
        self._bytes[tenant] += num_bytes
        self._files[tenant] += num_files
