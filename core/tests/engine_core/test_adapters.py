"""Adapters by name: what is asked of the executor, and what stays when it refuses."""

from __future__ import annotations

from pathlib import Path

import pytest
from lmkit.api import (
    CapacityError,
    CheckpointError,
    ConfigError,
    Control,
    DropAdapter,
    InvalidParam,
    LoadAdapter,
    Reply,
)
from lmkit.engine.adapters import Adapters, NoAdapters, check_adapter
from lmkit_testing.hash_model import HashExecutor


class Holder(HashExecutor):
    """An executor whose adapters are files: their content is their digest. "damaged" ones cannot be loaded."""

    def __init__(self) -> None:
        super().__init__()
        self.held: list[str] = []

    def inspect_adapter(self, path: str) -> str:
        if not Path(path).is_file():
            raise CheckpointError("there is no adapter")
        return Path(path).read_text()

    def control(self, command: Control) -> list[Reply]:
        if isinstance(command, LoadAdapter):
            if command.name.endswith("damaged"):
                return [Reply(True), Reply(False, "values are not finite")]
            self.held.append(command.name)
        elif isinstance(command, DropAdapter) and command.name in self.held:
            self.held.remove(command.name)
        return [Reply(True)]


@pytest.fixture
def holder() -> Holder:
    return Holder()


def file(folder: Path, digest: str) -> str:
    path = folder / digest
    path.write_text(digest)
    return str(path)


def test_a_request_keeps_the_adapter_with_which_it_began(holder: Holder, tmp_path: Path) -> None:
    adapters = Adapters(holder, 1)
    adapters.load("a", file(tmp_path, "one"))
    assert adapters.hold("r", "a") == "a@one"
    adapters.load("a", file(tmp_path, "two"))
    assert adapters.hold("s", "a") == "a@two"
    assert holder.held == ["a@one", "a@two"]
    adapters.release(["r"])
    assert holder.held == ["a@two"]
    adapters.unload("a")
    assert holder.held == ["a@two"]
    adapters.release(["s"])
    assert holder.held == []
    with pytest.raises(InvalidParam):
        adapters.hold("t", "a")


@pytest.mark.parametrize(
    ("name", "digest", "error"),
    [("a", "", CheckpointError), ("a", "damaged", CheckpointError), ("b", "two", CapacityError)],
    ids=["inspected", "loaded", "one too many"],
)
def test_what_is_refused_changes_nothing(
    holder: Holder, tmp_path: Path, name: str, digest: str, error: type[Exception]
) -> None:
    adapters = Adapters(holder, 1)
    adapters.load("a", file(tmp_path, "one"))
    with pytest.raises(error):
        adapters.load(name, file(tmp_path, digest) if digest else str(tmp_path / "nothing"))
    assert adapters.names == {"a": "a@one"}
    assert holder.held == ["a@one"]


def test_an_engine_without_adapters_loads_none(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--enable-lora"):
        NoAdapters().load("a", file(tmp_path, "one"))


@pytest.mark.parametrize("name", ["", "a\0b", "~root", "../a", "a b", "a\n", "a" * 129, "-a", "\ud800", "é\n"])
def test_names_that_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="adapter name"):
        check_adapter(name, "/x")


@pytest.mark.parametrize("path", ["", "a\0b", "~", "~nosuchuser/x", "~/x", "a\nb", "/x" * 3000, "\ud800", "\x1b[2J"])
def test_paths_that_are_refused(path: str) -> None:
    with pytest.raises(ConfigError, match="adapter path"):
        check_adapter("good-name/v1.0", path)
