"""Commands of installed extensions appear in help and run."""

from __future__ import annotations

from pathlib import Path

import pytest
from lmkit_cli import run
from lmkit_testing.dists import write_dist

HOOKS = """
from lmkit.api import CommandSpec, hookimpl


@hookimpl
def lmkit_commands():
    yield CommandSpec(name="greet", summary="Greet somebody.", target="greet_plugin.command:command")
"""

COMMAND = """
def command(name: str, loud: bool = False) -> None:
    print(("HELLO " if loud else "hello ") + name)
"""


@pytest.fixture
def _greet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_dist(
        tmp_path,
        "greet-plugin",
        {"extension": {"greet": "greet_plugin.hooks"}},
        {"greet_plugin.hooks": HOOKS, "greet_plugin.command": COMMAND},
    )
    monkeypatch.syspath_prepend(str(tmp_path))


@pytest.mark.usefixtures("_greet")
def test_command_of_a_plugin_is_listed_and_runs(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--help"]) == 0
    assert "Greet somebody." in capsys.readouterr().out
    assert run(["greet", "you", "--loud"]) == 0
    assert capsys.readouterr().out == "HELLO you\n"
    assert run(["gret", "you"]) == 2
    assert "did you mean 'greet'?" in capsys.readouterr().err
