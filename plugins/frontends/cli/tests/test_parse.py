"""`lmkit parse`: one output, and many of them as JSONL."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from lmkit_cli import run
from lmkit_cli.parse import split

CALL = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
TEXT = f"<think>hm</think>So:\n{CALL}"
RESULT = {"content": "So:\n", "reasoning": "hm", "tool_calls": [{"name": "f", "arguments": {"a": 1}}], "warnings": []}
NAMES = ["--tool-parser", "hermes", "--reasoning-parser", "think"]


def parse_file(path: Path, text: str, capsys: pytest.CaptureFixture[str], *options: str) -> dict[str, Any]:
    path.write_text(text, encoding="utf-8")
    assert run(["parse", str(path), *options]) == 0
    return json.loads(capsys.readouterr().out)


def jsonl(lines: list[bytes], *options: str) -> tuple[int, list[dict[str, Any]]]:
    """Exit status and results of `lmkit parse --jsonl` on stdin."""
    done = subprocess.run(
        [sys.executable, "-m", "lmkit", "parse", "--jsonl", *options], input=b"\n".join(lines), capture_output=True
    )
    return done.returncode, [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.parametrize("chunks", ["", "1", "7", "random:3"])
def test_one_output(tmp_path: Path, capsys: pytest.CaptureFixture[str], chunks: str) -> None:
    assert parse_file(tmp_path / "out.txt", TEXT, capsys, *NAMES, "--chunks", chunks) == RESULT


def test_without_parsers_all_is_content(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    nothing = {"reasoning": None, "tool_calls": [], "warnings": []}
    assert parse_file(tmp_path / "out.txt", TEXT, capsys) == {"content": TEXT, **nothing}
    assert parse_file(tmp_path / "out.txt", "", capsys) == {"content": None, **nothing}


def test_lines() -> None:
    both = {"tool_parser": "hermes", "reasoning_parser": "think"}
    cases: list[Any] = [
        {"text": TEXT, **both},
        {"text": TEXT, **both, "chunks": 1, "tools": [{"type": "function", "function": {"name": "f"}}]},
        {"text": CALL, "tool_parser": "hermes", "template_kwargs": {"enable_thinking": False}},
        {"text": "\ud83d \u00e9"},
    ]
    status, results = jsonl([json.dumps(c).encode() for c in cases])
    assert status == 0
    assert results[:2] == [RESULT, RESULT]
    assert results[2] == {**RESULT, "content": None, "reasoning": None}
    assert results[3]["content"] == "\ud83d \u00e9"


def test_bad_lines_get_an_error_each() -> None:
    bad = [
        b"not json",
        b"[1]",
        b'{"text": 3}',
        b'{"txt": "a"}',
        b'{"text": "a", "tool_parser": "hermse"}',
        b'{"text": "a", "tool_parser": "auto"}',
        b'{"text": "a", "tool_parser": 3}',
        b'{"text": "a", "tools": {}}',
        b'{"text": "a", "tools": [{"type": "function", "function": {}}]}',
        b'{"text": "a", "tools": [{"type": "function", "function": {"name": "f", "parameters": 3}}]}',
        b'{"text": "a", "template_kwargs": []}',
        b'{"text": "a", "chunks": 0}',
        b'{"text": "a", "chunks": "random:"}',
        b'{"text": "\xff"}',
        b"[" * 100_000,
    ]
    status, results = jsonl([b'{"text": "first"}', *bad, b"", b'{"text": "last"}'])
    assert status == 2
    assert len(results) == len(bad) + 2
    assert (results[0]["content"], results[-1]["content"]) == ("first", "last")
    for line, result in zip(bad, results[1:-1], strict=True):
        assert set(result) == {"error"}, line
        assert result["error"]["message"], line
    assert "did you mean 'hermes'" in results[5]["error"]["fix"]


def test_options_are_defaults_of_the_lines() -> None:
    status, results = jsonl([json.dumps({"text": TEXT}).encode(), b'{"text": "x", "tool_parser": "none"}'], *NAMES)
    assert (status, results[0]) == (0, RESULT)
    assert results[1]["content"] == "x"


def test_a_call_whose_arguments_are_no_json_is_not_complete(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    deep = '{"a": ' + "[" * 100_000 + "]" * 100_000 + "}"
    for arguments in ('{"a": NaN}', deep):
        got = parse_file(
            tmp_path / "o", f'<tool_call>{{"name": "f", "arguments": {arguments}}}</tool_call>', capsys, *NAMES
        )
        (call,) = got["tool_calls"]
        assert call["name"] == "f"
        assert call["complete"] is False
        assert call["arguments"].startswith('{"a": ')
        assert got["content"].endswith(arguments[-2:] + "}")
        assert got["warnings"] == ["a tool call is malformed"]


@pytest.mark.parametrize(
    "options", ["--tool-parser nope", "--tools nowhere.json", "--chunks -1", "--template-kwargs 3", "nowhere"]
)
def test_wrong_options(options: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"")))
    assert run(["parse", *options.split()]) == 2
    assert "error:" in capsys.readouterr().err


def test_pieces_join_to_the_text() -> None:
    text = "abc" * 50
    for chunks in ("", "1", "4", "1000", "random:1", "random:x"):
        assert "".join(split(text, chunks)) == text
    assert list(split("abcde", "2")) == ["ab", "cd", "e"]
    assert list(split(text, "random:1")) != list(split(text, "random:2"))


def test_no_torch() -> None:
    code = "import sys\nfrom lmkit_cli import run\nrun(['parse', '--jsonl'])\nsys.exit('torch' in sys.modules)"
    line = b'{"text": "a", "tool_parser": "hermes"}'
    assert subprocess.run([sys.executable, "-c", code], input=line, capture_output=True).returncode == 0
