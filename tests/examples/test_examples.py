"""Each example of a plugin serves: a request on the demo goes through it, and what it is for is seen."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest
from lmkit import LLM, LLMEngine, SamplingParams

from .conftest import FOLDERS, ROOT, Example

EXAMPLES = [Example(path) for path in FOLDERS]
GREEDY = SamplingParams(max_tokens=24, temperature=0.0)
SUM = [{"role": "user", "content": "What is 2 + 3?"}]
SMALL = {"kv_memory": "8MiB"}


@pytest.fixture(scope="module")
def plain() -> Iterator[LLM]:
    """What answers without any of the plugins."""
    with LLM("demo", **SMALL) as llm:
        yield llm


@pytest.mark.full
@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.folder.name)
def test_conformance(example: Example, environment: dict[str, str]) -> None:
    """Its own tests pass, with what its wheel has."""
    arguments = ["-q", "-p", "no:cacheprovider", "-c", "pyproject.toml", "--rootdir", "."]
    command = [sys.executable, "-m", "pytest", *arguments]
    done = subprocess.run(
        command, cwd=example.folder, env=environment, capture_output=True, text=True, check=False, timeout=600
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]


@pytest.mark.full
def test_the_doctor_finds_nothing(environment: dict[str, str]) -> None:
    code = "import lmkit_cli, sys; sys.exit(lmkit_cli.run(sys.argv[1:]))"
    command = [sys.executable, "-c", code, "plugins", "doctor", "--strict"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.folder.name)
def test_it_is_short_and_says_what_it_shows(example: Example) -> None:
    """A reader sees it at a glance: a screen of README, and at most 200 lines of code."""
    readme = (example.folder / "README.md").read_text()
    assert example.project["project"]["name"] in readme
    assert len(readme.splitlines()) <= 40
    assert "pip install" in readme
    lines = sum(len(path.read_text().splitlines()) for path in example.folder.rglob("src/**/*.py"))
    assert 40 <= lines <= 260
    assert list(example.folder.glob("tests/test_*.py"))
    assert example.folder.name in (ROOT / "examples" / "plugins" / "README.md").read_text()


def test_after_its_budget_an_answer_goes_on_as_told(installed: Path, plain: LLM) -> None:
    (free,) = plain.chat(SUM, GREEDY)
    said = free.outputs[0].token_ids
    word = plain.text.tokenizer.encode("knife", add_special=False)
    asked = SamplingParams(max_tokens=24, temperature=0.0, extra={"budget": {"tokens": 2, "then": word}})
    with LLM("demo", **SMALL) as llm:
        (cut,) = llm.chat(SUM, asked)
        (other,) = llm.chat(SUM, GREEDY)
    assert cut.outputs[0].token_ids[: 2 + len(word)] == [*said[:2], *word]
    assert other.outputs[0].token_ids == said


def test_short_prompts_go_first(installed: Path, plain: LLM) -> None:
    texts = {"long": "word " * 200, "short": "word"}
    params = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)
    options = {"scheduler": "shortest", "scheduler.shortest.aging": 1.0, "max_rows": 1}
    with LLM("demo", **options, **SMALL) as llm, LLMEngine(llm) as engine:
        engine.add_request("first", "Tell me", SamplingParams(max_tokens=400, temperature=0.0, ignore_eos=True))
        for id, text in texts.items():  # while it runs
            engine.add_request(id, text, params)
        ended = []
        while engine.has_unfinished_requests():
            ended += [output for output in engine.step() if output.finished]
        seen = import_module("lmkit_scheduler_shortest.hooks").first_tokens  # in the order in which they ended
        sizes = {output.request_id: len(output.prompt_token_ids) for output in ended}
        assert [size for size, _ in seen] == [sizes[id] for id in ("first", "short", "long")]
    expected = plain.generate(list(texts.values()), params, progress=False)
    tokens = {output.request_id: output.token_ids for output in ended}
    assert [tokens[id] for id in texts] == [output.token_ids for output in expected]


def test_calls_are_written_and_read_in_lines(installed: Path) -> None:
    place = {"city": {"type": "string", "maxLength": 12}, "days": {"type": "integer", "minimum": 1, "maximum": 7}}
    parameters = {"type": "object", "properties": place, "required": ["city", "days"]}
    tool = {"type": "function", "function": {"name": "get_weather", "parameters": parameters}}
    params = SamplingParams(max_tokens=120, temperature=0.0)
    with LLM("demo", tool_parser="lines", **SMALL) as llm:
        (output,) = llm.chat(SUM, params, tools=[tool], tool_choice="required")
    (call,) = output.outputs[0].tool_calls
    assert call.name == "get_weather"
    assert set(json.loads(call.arguments)) == {"city", "days"}
