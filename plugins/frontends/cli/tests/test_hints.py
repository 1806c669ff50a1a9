"""Flags of other servers: the error says what to write here, and what it says exists."""

from __future__ import annotations

import re

import pytest
from lmkit.api import UnknownKey
from lmkit.config import from_options
from lmkit.config.schema import leaves
from lmkit_cli import run
from lmkit_cli.hints import ELSEWHERE

SERVE = {"--cors-origin", "--open-priority"}


@pytest.mark.parametrize("flag", sorted(ELSEWHERE))
def test_what_a_hint_says_exists(flag: str) -> None:
    known = {leaf.flag for leaf in leaves().values()} | {"--no-prefix-cache", "--log-level"} | SERVE
    assert set(re.findall(r"--[a-z][a-z-]+", ELSEWHERE[flag])) <= known


@pytest.mark.parametrize(
    ("flag", "hint"),
    [
        ("--tensor-parallel-size", "write --tp N"),
        ("--tensor_parallel_size", "write --tp N"),
        ("--gpu-memory-utilization", "write --kv-memory 90%"),
        ("--max-num-seqs", "write --max-rows N"),
        ("--download-dir", "write --cache-dir FOLDER"),
        ("--trust-remote-code", "leave it out: code of checkpoints is never run"),
        ("--max_rows", "write --max-rows"),
        ("--max-rwos", "did you mean --max-rows?"),
    ],
)
def test_the_nearest_flag_is_named(flag: str, hint: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["serve", "demo", flag, "2"]) == 2
    assert hint in capsys.readouterr().err


@pytest.mark.parametrize("command", ["explain", "plan", "serve"])
@pytest.mark.parametrize("flag", ["--logits-processor"])
def test_what_nothing_runs_is_refused_by_name(command: str, flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run([command, flag, "echo"]) == 2
    shown = capsys.readouterr().err
    assert flag in shown
    assert "leave it out: nothing" in shown
    name = flag.strip("-").replace("-", "_")
    with pytest.raises(UnknownKey, match=name):
        from_options({name: "echo"})


def test_a_wrong_name_is_explained_once(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", "demo", "--tool-parser", "nope"]) == 2
    assert capsys.readouterr().err.count("deepseek_v31") == 1
