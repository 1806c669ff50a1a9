"""The other commands on a tiny random checkpoint: the chat in a process, the rest in this one."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from typing import Any

import lmkit_cli
import pytest


def test_chat_through_a_pipe(tiny: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    lines = "hello\n/system be brief\nagain\n/nonsense\n/quit\nnever read\n"
    monkeypatch.setattr(sys, "stdin", io.StringIO(lines))
    assert lmkit_cli.run(("chat", str(tiny), "--max-tokens", "5", "--temperature", "0")) == 0
    assert "unknown command /nonsense" in capsys.readouterr().out


def test_complete(tiny: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    args = ("--model", str(tiny), "--max-tokens", "6", "--temperature", "0")
    assert lmkit_cli.run(("complete", "hello", *args)) == 0
    first, said = capsys.readouterr()
    monkeypatch.setattr(sys, "stdin", io.StringIO("hello"))
    assert lmkit_cli.run(("complete", "-", *args)) == 0
    piped, _ = capsys.readouterr()
    assert first
    assert first == piped
    assert said == ""


def test_generate_and_resume(tiny: Path, tmp_path: Path) -> None:
    prompts, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    items = [
        {"id": "a", "prompt": "hello"},
        {"id": "b", "messages": [{"role": "user", "content": "hi"}], "params": {"max_tokens": 2}},
        {"id": "c", "token_ids": [5, 6, 7]},
    ]
    prompts.write_text("".join(json.dumps(item) + "\n" for item in items))
    args = (str(prompts), "-o", str(out), "--model", str(tiny), "--max-tokens", "4", "--temperature", "0")
    assert lmkit_cli.run(("generate", *args)) == 0
    whole = out.read_text()
    rows = [json.loads(line) for line in whole.splitlines()]
    assert [row["id"] for row in rows] == ["a", "b", "c"]
    assert len(rows[1]["outputs"][0]["token_ids"]) <= 2

    out.write_text("\n".join(whole.splitlines()[:1]) + '\n{"id": "torn')
    assert lmkit_cli.run(("generate", *args, "--resume")) == 0
    assert out.read_text() == whole


def test_generate_reports_bad_lines_before_loading(
    tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = tmp_path / "in.jsonl"
    prompts.write_text('{"prompt": "a"}\n{"promt": "b"}\n')
    assert lmkit_cli.run(("generate", str(prompts), "--model", str(tiny))) == 2
    shown = capsys.readouterr().err
    assert "line 2" in shown
    assert "'prompt'" in shown


@pytest.mark.parametrize("adapters", [{}, {"enable_lora": True, "max_loras": 4, "max_lora_rank": 8}])
def test_plan_agrees_with_what_is_loaded(
    tiny: Path, capsys: pytest.CaptureFixture[str], adapters: dict[str, Any]
) -> None:
    from lmkit import LLM

    room = ["--enable-lora", "--max-loras", "4", "--max-lora-rank", "8"] if adapters else []
    assert lmkit_cli.run(("plan", str(tiny), "--json", "--max-rows", "8", *room)) == 0
    plan = json.loads(capsys.readouterr().out)
    with LLM(str(tiny), max_rows=8, **adapters) as llm:
        facts = llm.facts
    assert plan["max_adapters"] == facts.max_adapters == (4 if adapters else 0)
    assert abs(plan["weight_bytes"] - facts.weight_bytes) <= 0.05 * facts.weight_bytes
    assert abs(plan["activation_bytes"] - facts.activation_bytes) <= 0.05 * facts.activation_bytes
    assert abs(plan["kv_bytes"] - facts.kv_bytes) <= 0.05 * facts.kv_bytes
    assert plan["max_length"] == facts.max_length


def test_explain_of_serve_serves_nothing(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert lmkit_cli.run(("serve", str(tiny), "--explain")) == 0
    assert "attention" in capsys.readouterr().out


@pytest.mark.full("lmkit-cli")
def test_doctor_as_data(capsys: pytest.CaptureFixture[str]) -> None:
    lmkit_cli.run(("doctor", "--json"))
    findings = json.loads(capsys.readouterr().out)
    assert {"area", "level", "text", "fix"} == set(findings[0])
    assert any(f["area"] == "device" or f["level"] == "fail" for f in findings)
