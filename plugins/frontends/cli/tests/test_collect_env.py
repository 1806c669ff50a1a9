"""What `lmkit collect-env` says, and what it keeps to itself."""

from __future__ import annotations

import json

import pytest
from lmkit_cli import collect_env


def test_it_names_what_matters(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("LMKIT_API_KEY", "very-secret")
    collect_env.command(as_json=True)
    text = capsys.readouterr().out
    found = json.loads(text)
    assert "lmkit-core" in found["packages"]
    assert "torch" in found["packages"]
    assert "LMKIT_API_KEY" in found["variables set"]
    assert any("lmkit-scheduler-fcfs" in plugin for plugin in found["plugins"].values())
    assert "cores" in found["processor"]
    assert "very-secret" not in text
    collect_env.command()
    shown = capsys.readouterr().out
    assert all(f"{name}:" in shown for name in found)
    assert "very-secret" not in shown


def test_what_breaks_is_reported(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def broken(config: object) -> None:
        raise RuntimeError("no device today")

    monkeypatch.setattr("lmkit.plugins.resolve.resolve", broken)
    collect_env.command(as_json=True)
    assert "no device today" in json.loads(capsys.readouterr().out)["devices"]["none"]
