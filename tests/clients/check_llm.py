"""The `llm` command and library, with a model that its extra-openai-models.yaml names."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def home(url: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("llm")
    (path / "extra-openai-models.yaml").write_text(
        f"- model_id: demo\n  model_name: demo\n  api_base: {url}/v1\n  api_key_name: demo\n"
        "  supports_tools: true\n  supports_schema: true\n"
        f"- model_id: text\n  model_name: demo\n  api_base: {url}/v1\n  api_key_name: demo\n  completion: true\n"
    )
    (path / "keys.json").write_text('{"demo": "none"}')
    return path


def llm(home: Path, *arguments: str) -> str:
    command = [str(Path(sys.executable).with_name("llm")), *arguments]
    done = subprocess.run(command, env={**os.environ, "LLM_USER_PATH": str(home)}, text=True, capture_output=True,
                          stdin=subprocess.DEVNULL, timeout=120, check=False)  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("how", [(), ("--no-stream",)], ids=["streamed", "whole"])
def test_prompt(home: Path, how: tuple[str, ...]) -> None:
    assert "42" in llm(home, "-m", "demo", "-o", "temperature", "0", *how, "What is 12 + 30?")


def test_conversation(home: Path) -> None:
    llm(home, "-m", "demo", "-o", "temperature", "0", "What is 12 + 30?")
    assert "23" in llm(home, "-c", "-o", "temperature", "0", "What is 20 + 3?")


def test_schema(home: Path) -> None:
    text = 'Write JSON with the keys "name" and "age" for Anna, who is 31.'
    assert set(json.loads(llm(home, "-m", "demo", "--schema", "name, age int", text))) == {"name", "age"}


def test_tools(home: Path) -> None:
    code = 'def get_weather(city: str) -> str:\n    """Get the current weather in a city"""\n    return "sunny"\n'
    said = llm(
        home, "-m", "demo", "-o", "temperature", "0", "--functions", code, "--td", "What is the weather in Berlin?"
    )
    assert said


def test_completion(home: Path) -> None:
    assert llm(home, "-m", "text", "-o", "max_tokens", "8", "Hello")
