"""Frames as files of a folder, which several engines may share."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import TYPE_CHECKING

from lmkit.api import ConfigError

from lmkit_stores.frames import HEADER, name_of

if TYPE_CHECKING:
    from lmkit.api import KVKey

SUFFIX = ".kv"
SHARE = 16  # the folder is looked through when a 16th of its size was written


class Folder:
    """Contract: lmkit_stores.Store. Files are written beside and renamed, so nobody reads half of one; a file that
    disappears while it is read is one that is not there. The least recently used ones are removed beyond `size`.

    Files are not forced to disk before they are renamed: what a power cut leaves cut off does not check, and is removed
    when it is read.
    """

    def __init__(self, path: str, size: int) -> None:
        """`size` in bytes. Raises ConfigError where the folder cannot be made."""
        self.path, self.size = Path(path).expanduser(), size
        try:
            self._make_folder()
        except OSError as e:
            raise ConfigError(f"the folder {path} for KV blocks: {e}", fix="name a folder that can be written") from e
        self._unchecked = size  # bytes written since the folder was looked through; at first nobody knows

    def _make_folder(self) -> None:
        self.path.mkdir(mode=0o700, parents=True, exist_ok=True)

    def _file(self, key: KVKey) -> Path:
        name = name_of(key)
        return self.path / name[2:4] / (name + SUFFIX)

    def read(self, keys: Sequence[KVKey]) -> Iterator[bytes | None]:
        for key in keys:
            path = self._file(key)
            try:
                frame = path.read_bytes()
                os.utime(path)  # used just now
            except FileNotFoundError:
                yield None
            else:
                yield frame

    def write(self, key: KVKey, frame: bytes) -> None:
        if len(frame) > self.size:
            return
        path = self._file(key)
        self._make_folder()  # somebody may have removed it while the engine runs
        path.parent.mkdir(mode=0o700, exist_ok=True)
        with NamedTemporaryFile(dir=path.parent, delete=False) as file:  # 0600
            try:
                file.write(frame)
                file.flush()
                os.replace(file.name, path)
            except BaseException:
                Path(file.name).unlink(missing_ok=True)
                raise
        self._unchecked += len(frame)
        if self._unchecked > self.size // SHARE:
            self._prune()

    def has(self, key: KVKey) -> bool:
        return self._file(key).exists()

    def drop(self, key: KVKey) -> None:
        self._file(key).unlink(missing_ok=True)

    def close(self) -> None:
        """Files stay: the next engine finds them."""

    def _prune(self) -> None:
        """Removes what was not used for longest until a 16th is free again."""
        self._unchecked = 0
        found: list[tuple[float, int, str]] = []
        for folder in self.path.iterdir():
            if folder.is_dir():
                for entry in os.scandir(folder):
                    try:
                        stat = entry.stat(follow_symlinks=False)
                    except FileNotFoundError:
                        continue
                    found.append((stat.st_mtime, max(stat.st_size, HEADER), entry.path))
        total = sum(size for _, size, _ in found)
        for _, size, path in sorted(found):
            if total <= self.size - self.size // SHARE:
                break
            Path(path).unlink(missing_ok=True)
            total -= size
