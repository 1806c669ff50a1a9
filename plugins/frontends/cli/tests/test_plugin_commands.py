"""Commands of installed extensions appear in help and run."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib.abc import MetaPathFinder
from pathlib import Path

import pytest
from lmkit_cli import run
from lmkit_cli.root import plugin_commands
from lmkit_testing.dists import write_dist

COMMAND = """
def command(name: str, loud: bool = False) -> None:
    print(("HELLO " if loud else "hello ") + name)
"""


@pytest.fixture
def _greet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    write_dist(
        tmp_path,
        "greet-plugin",
        {"command": {"greet": "greet_plugin.command:command"}},
        {"greet_plugin.command": COMMAND},
        summary="Greet somebody.",
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    plugin_commands.cache_clear()
    yield
    plugin_commands.cache_clear()


@pytest.mark.usefixtures("_greet")
def test_command_of_a_plugin_is_listed_and_runs(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--help"]) == 0
    assert "Greet somebody." in capsys.readouterr().out
    assert "greet_plugin" not in sys.modules
    assert run(["greet", "you", "--loud"]) == 0
    assert capsys.readouterr().out == "HELLO you\n"
    assert run(["gret", "you"]) == 2
    assert "did you mean 'greet'?" in capsys.readouterr().err


@pytest.mark.usefixtures("_greet")
def test_a_command_can_be_disabled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LMKIT_PLUGINS_DISABLE", "command:greet")
    assert run(["greet", "you"]) == 2


def test_a_dist_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    class Missing(MetaPathFinder):
        def find_spec(self, name: str, path: object = None, target: object = None) -> None:
            if name.partition(".")[0] == "lmkit_bench":
                raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    for name in [name for name in sys.modules if name.partition(".")[0] == "lmkit_bench"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", [Missing(), *sys.meta_path])
    assert run(("bench", "latency")) != 0
    said = capsys.readouterr().err
    assert "lmkit bench is a dist of its own" in said
    assert "pip install -e" in said
    assert "plugins/frontends/bench" in said.replace("\n", "")
