"""Adapters by name: each load is published under an id of its content, so requests keep what they began with."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from pathlib import Path

from lmkit.api import (
    CapacityError,
    CheckpointError,
    ConfigError,
    DropAdapter,
    Executor,
    Gate,
    InvalidParam,
    LoadAdapter,
)

NAME = re.compile(r"[A-Za-z0-9][\w./-]{0,127}")
MAX_PATH = 4096  # characters


class Adapters:
    """Belongs to the engine thread, but for `prepare`. A load happens between two steps."""

    def __init__(self, executor: Executor | None = None, max_adapters: int = 0) -> None:
        self._executor, self._max = executor, max_adapters
        self.names: dict[str, str] = {}  # name -> id
        self.loaded: dict[str, Callable[[], Gate | None]] = {}  # ids that workers hold; Intake.adapters
        self._held: dict[str, str] = {}  # request -> id

    def load(self, name: str, path: str) -> None:
        """`prepare` and `publish`, for whoever runs the engine: a path may begin with `~`."""
        self.publish(name, *self.prepare(name, str(_home(path))))

    def prepare(self, name: str, path: str) -> tuple[str, str]:
        """The adapter's path and the digest of its content. What takes its time: from any thread.

        Raises ConfigError, or what is wrong with the adapter.
        """
        if self._executor is None:
            raise ConfigError("this engine runs without adapters", fix="start it with --enable-lora")
        check_adapter(name, path)
        return path, self._executor.inspect_adapter(path)

    def publish(self, name: str, path: str, digest: str) -> None:
        """The adapter goes by `name` from now on; a former one of that name goes when its requests have ended.

        Raises CapacityError or CheckpointError; then nothing has changed.
        """
        assert self._executor is not None
        if name not in self.names and len(self.names) >= self._max:
            raise CapacityError(f"{self._max} adapters are loaded, which is the limit", fix="raise --max-loras")
        id = f"{name}@{digest}"
        if id not in self.loaded:
            replies = self._executor.control(LoadAdapter(id, path))
            if bad := next((r for r in replies if not r.ok), None):
                self._executor.control(DropAdapter(id))
                raise CheckpointError(bad.message)
            self.loaded[id] = lambda: None
        self.names[name] = id
        self._collect()

    def unload(self, name: str) -> None:
        """Running requests keep it. Raises InvalidParam for an unknown name."""
        self._id_of(name)
        del self.names[name]
        self._collect()

    def hold(self, request: str, name: str) -> str:
        """The id that `request` keeps until `release`. Raises InvalidParam."""
        if request in self._held:
            raise InvalidParam("id", request, "an id that no unfinished request has")
        id = self._held[request] = self._id_of(name)
        return id

    def release(self, requests: Iterable[str]) -> None:
        if self._held:
            found = [self._held.pop(request, None) for request in requests]
            if any(found):
                self._collect()

    def _id_of(self, name: str) -> str:
        if name not in self.names:
            known = ", ".join(sorted(self.names)) or "none"
            raise InvalidParam("adapter", name, f"one of the loaded adapters ({known})")
        return self.names[name]

    def _collect(self) -> None:
        """Drops what neither a name nor a request refers to."""
        for id in set(self.loaded) - set(self.names.values()) - set(self._held.values()):
            assert self._executor is not None
            del self.loaded[id]
            self._executor.control(DropAdapter(id))


class NoAdapters(Adapters):
    """The null object: names mean themselves, and Intake.adapters decides which there are."""

    def hold(self, request: str, name: str) -> str:
        return name


def check_adapter(name: str, path: str | None = None) -> None:
    """What a client may call an adapter, and where it may be. Raises ConfigError."""
    if not NAME.fullmatch(name):
        raise ConfigError(f"adapter name {name!r:.80} is not of letters, digits and _ . / -", fix="choose another")
    if path is not None and not (path.isprintable() and 0 < len(path) <= MAX_PATH and not path.startswith("~")):
        raise ConfigError(
            f"adapter path {path!r:.80} has other than printable characters, begins with ~, or is too long",
            fix="give the path of a directory on the server",
        )


def _home(path: str) -> Path:
    """The path that whoever runs the engine has named, which may begin with ~. Raises ConfigError."""
    try:
        return Path(path).expanduser()
    except RuntimeError as e:
        raise ConfigError(f"adapter path {path!r:.80}: {e}", fix="write it without ~") from e


def parse_modules(text: str) -> list[tuple[str, str]]:
    """ "a=path,b=path" -> [(name, path)]. Raises ConfigError."""
    found = []
    for part in filter(None, (p.strip() for p in text.split(","))):
        name, separator, path = part.partition("=")
        if not separator or not name or not path:
            raise ConfigError(
                f"--lora-modules: {part!r} is not NAME=PATH", fix="for example --lora-modules sql=./sql-lora"
            )
        found.append((name, path))
    if len({name for name, _ in found}) < len(found):
        raise ConfigError("--lora-modules names an adapter twice", fix="give each its own name")
    return found
