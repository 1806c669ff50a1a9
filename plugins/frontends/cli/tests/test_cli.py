"""The command line: help, errors, options. Runs in this process; nothing heavy is imported."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from lmkit.api import LmkitError, Refusal, Refused, SelectionError
from lmkit_cli import errors, run
from lmkit_cli.options import split_dotted, with_config
from lmkit_cli.root import COMMANDS, load_command
from lmkit_cli.settings import Sourced


def call(args: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    status = run(args)
    out = capsys.readouterr()
    return status, out.out, out.err


def test_help_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = call(["--help"], capsys)
    assert status == 0
    assert all(name in out for name in COMMANDS)
    assert "Examples" in out


def test_help_imports_neither_torch_nor_transformers() -> None:
    code = (
        "import sys\nfrom lmkit_cli import run\nrun(['--help'])\n"
        "heavy = {'torch', 'transformers', 'numpy', 'starlette', 'lmkit.plugins.host'} & set(sys.modules)\n"
        "sys.exit(', '.join(sorted(heavy)) or None)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", COMMANDS)
def test_help_of_every_command(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = call([name, "--help"], capsys)
    assert status == 0, err
    assert "Usage" in out


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = call(["--version"], capsys)
    assert (status, out.split()[0]) == (0, "lmkit")


def test_unknown_command_offers_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    status, _, err = call(["srve"], capsys)
    assert status == 2
    assert "did you mean 'serve'?" in err
    assert "unknown-name" in err


def test_unknown_option_is_one_screen(capsys: pytest.CaptureFixture[str]) -> None:
    status, _, err = call(["show-config", "--atention", "torch"], capsys)
    assert status == 2
    assert "--attention" in err
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("args", "named"),
    [
        (["--block-size", "zero"], "--block-size"),
        (["--block-size", "0"], "cache.block_size"),
        (["--dtype", "int3"], "model.dtype"),
        (["--config", "/nowhere.toml"], "/nowhere.toml"),
        (["--cache.blok_size", "3"], "cache.blok_size"),
        (["--attention.torch.x"], "needs a value"),
        (["one", "--model", "two"], "two models"),
    ],
)
def test_wrong_values_name_the_option(args: list[str], named: str, capsys: pytest.CaptureFixture[str]) -> None:
    status, _, err = call(["show-config", "--no-resolved", *args], capsys)
    assert status == 2
    assert named in err
    assert "fix:" in err


def test_show_config_tells_who_set_what(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "l.toml").write_text('[cache]\nblock_size = 8\nmemory = "1GiB"\n')
    monkeypatch.setenv("LMKIT_CACHE__MEMORY", "2GiB")
    args = ["show-config", "my-model", "--no-resolved", "--json", "--config", str(tmp_path / "l.toml"), "--tp", "1"]
    status, out, _ = call([*args, "--attention.torch.tile", "64", "--no-prefix-cache"], capsys)
    assert status == 0
    rows = {row["key"]: (row["value"], row["source"]) for row in json.loads(out)}
    assert rows["model.model"] == ("my-model", "command line MODEL")
    assert rows["cache.memory"] == ("2GiB", "environment LMKIT_CACHE__MEMORY")
    assert rows["cache.block_size"][1].startswith("file ")
    assert rows["cache.prefix_cache"][0] is False
    assert rows["parallel.tp"] == (1, "command line --tp")
    assert rows["plugins.attention.torch.tile"] == (64, "command line --attention.torch.tile")
    assert rows["sched.max_rows"] == (None, "default")


def test_dotted_options_are_taken_out_of_the_arguments() -> None:
    rest, dotted = split_dotted(["m", "--a.b.c", "1", "--x", "y.z", "--d.e=f=g", "--", "--a.b", "h"])
    assert rest == ["m", "--x", "y.z", "--", "--a.b", "h"]
    assert dotted == [("a.b.c", "1"), ("d.e", "f=g")]


def test_options_of_a_command_reach_it_beside_the_settings() -> None:
    seen = []

    @with_config
    def command(settings: Sourced, port: int = 1) -> None:
        """Test."""
        seen.append((settings.config.wants("attention"), port))

    app = typer.Typer()
    app.command(cls=command.command_class)(command)
    typer.main.get_command(app).main(args=["--port", "7", "--attention", "torch"], standalone_mode=False)
    assert seen == [("torch", 7)]


def test_every_command_loads() -> None:
    for name, (ref, _, _) in COMMANDS.items():
        assert load_command(name, ref).name == name


def test_selection_errors_list_the_refusals(capsys: pytest.CaptureFixture[str]) -> None:
    refusal = Refusal("platform", "cuda", "cpu", "use a GPU")
    error = SelectionError("nothing fits", [Refused("attention", "fa3", "dist", 3, (refusal,))], fix="do something")
    assert errors.show(error) == 2
    err = capsys.readouterr().err
    assert err.index("fa3") < err.index("nothing fits") < err.index("do something")


def test_stack_traces_only_when_asked(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    errors.show(LmkitError("a cause"))
    assert "Traceback" not in capsys.readouterr().err
    monkeypatch.setenv("LMKIT_DEBUG", "1")
    try:
        raise LmkitError("a cause")
    except LmkitError as error:
        errors.show(error)
    assert "Traceback" in capsys.readouterr().err


def test_bugs_are_one_screen_too(capsys: pytest.CaptureFixture[str]) -> None:
    assert errors.show_bug(KeyError("x")) == 1
    err = capsys.readouterr().err
    assert "KeyError" in err
    assert "LMKIT_DEBUG=1" in err


def test_markup_in_messages_is_shown_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    errors.show(LmkitError("[cache] of lmkit.toml [/]"))
    assert "[cache] of lmkit.toml [/]" in capsys.readouterr().err
