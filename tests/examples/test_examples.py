"""Each example of a plugin serves: a request on the demo goes through it, and what it is for is seen."""

from __future__ import annotations

import json
import re
import runpy
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import httpx
import pytest
from lmkit import LLM, LLMEngine, SamplingParams
from lmkit.api import CheckpointError, Grammar
from lmkit.hookspecs import hooks
from lmkit.plugins.host import PluginHost
from lmkit_http.app import build_app
from lmkit_http.dialects import load_dialects
from lmkit_testing.serving import real
from safetensors.torch import load_file, save_file

from .conftest import FOLDERS, ROOT, Example, environment

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
def test_conformance(example: Example, site: Path) -> None:
    """Its own tests pass, with what its wheel has."""
    arguments = ["-q", "-p", "no:cacheprovider", "-c", "pyproject.toml", "--rootdir", "."]
    command = [sys.executable, "-m", "pytest", *arguments]
    done = subprocess.run(
        command,
        cwd=example.folder,
        env=environment(site, example),
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]


@pytest.mark.full
def test_the_doctor_finds_nothing(site: Path) -> None:
    code = "import lmkit_cli, sys; sys.exit(lmkit_cli.run(sys.argv[1:]))"
    command = [sys.executable, "-c", code, "plugins", "doctor", "--strict"]
    done = subprocess.run(
        command, env=environment(site, *EXAMPLES), capture_output=True, text=True, check=False, timeout=600
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_each_hook_has_an_example() -> None:
    sources = [path.read_text() for example in EXAMPLES for path in example.folder.glob("src/**/*.py")]
    shown = {name for source in sources for name in re.findall(r"^def (lmkit_\w+)\(", source, re.MULTILINE)}
    assert shown == hooks().keys()


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.folder.name)
def test_it_is_short_and_says_what_it_shows(example: Example) -> None:
    """A reader sees it at a glance: a screen of README, and at most 200 lines of code for a plugin."""
    readme = (example.folder / "README.md").read_text()
    assert example.project["project"]["name"] in readme
    assert len(readme.splitlines()) <= 40
    assert "pip install" in readme
    lines = sum(len(path.read_text().splitlines()) for path in example.folder.rglob("src/**/*.py"))
    assert 40 <= lines <= 200 * len(example.plugins)
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


def answers(llm: LLM) -> list[list[int]]:
    """Tokens of a chat, and of a text of several blocks beside it."""
    (chat,) = llm.chat(SUM, GREEDY)
    (text,) = llm.generate(["Tell me. " * 30], GREEDY, progress=False)
    return [list(chat.token_ids), list(text.token_ids)]


def test_another_device_says_the_same(installed: Path, plain: LLM) -> None:
    with LLM("demo", platform="npu", dtype="float32", **SMALL) as llm:
        chosen = {(choice.kind, choice.name) for choice in llm.resolved.choices}
        assert chosen >= {("platform", "npu"), ("attention", "npu"), ("op", "linear_npu")}
        assert llm.facts.max_rows == 16  # what it proposed
        assert answers(llm) == answers(plain)


def test_another_attention_says_the_same(installed: Path, plain: LLM) -> None:
    with LLM("demo", attention="simple", dtype="float32", **SMALL) as llm:  # pinned: it is what is shown
        assert answers(llm) == answers(plain)


def test_weights_on_a_logarithmic_scale_say_the_same(installed: Path, plain: LLM, tmp_path: Path) -> None:
    import_module("lmkit_quantization_mulaw.convert").convert(plain.checkpoint.path, tmp_path / "out")
    assert (tmp_path / "out" / "model.safetensors").stat().st_size < plain.checkpoint.nbytes * 0.7
    with LLM(str(tmp_path / "out"), **SMALL) as llm:
        assert answers(llm)[0] == answers(plain)[0]


def test_a_family_of_its_own_says_the_same(installed: Path, plain: LLM, tmp_path: Path) -> None:
    """The demo under the names of a canary, found by its own kind of reference."""
    folder = tmp_path / "bird"
    shutil.copytree(plain.checkpoint.path, folder)
    code = runpy.run_path(str(ROOT / "examples" / "plugins" / "model" / "tests" / "test_canary.py"))
    save_file(code["as_canary"](load_file(folder / "model.safetensors")), folder / "model.safetensors")
    (folder / "config.json").rename(folder / "canary.json")
    with LLM(f"canary:{folder}", **SMALL) as llm:
        assert answers(llm) == answers(plain)
    with pytest.raises(CheckpointError, match="no folder of a canary"):
        LLM(f"canary:{tmp_path}", **SMALL)


def test_what_was_said_before_is_guessed(installed: Path, plain: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    recall = import_module("lmkit_proposer_recall.proposer").Recall
    guessed: list[int] = []
    propose = recall.propose

    def counted(self: Any, texts: Any, most: Any) -> Any:
        found = propose(self, texts, most)
        guessed.append(sum(map(len, found)))
        return found

    monkeypatch.setattr(recall, "propose", counted)
    with LLM("demo", proposer="recall", **SMALL) as llm:
        assert answers(llm) == answers(plain)
        first = sum(guessed)
        assert answers(llm) == answers(plain)
    assert sum(guessed) - first > 2 * first + 8


def test_blocks_outlive_the_engine(installed: Path, plain: LLM, tmp_path: Path) -> None:
    options = {"kv_connector": "sqlite", "kv_connector.sqlite.file": str(tmp_path / "blocks.sqlite")}
    cached = []
    for _ in range(2):
        with LLM("demo", **options, **SMALL) as llm:
            (output,) = llm.generate(["Tell me. " * 30], GREEDY, progress=False)
            cached.append(output.num_cached)
            assert list(output.token_ids) == answers(plain)[1]
    assert cached[0] == 0
    assert cached[1] >= 64


async def test_a_dialect_answers_on_its_route(installed: Path, plain: LLM) -> None:
    (said,) = plain.chat(SUM, GREEDY)
    dialects = load_dialects(PluginHost(), {"dialect.ask": {"tokens": 24}})
    async with real("demo") as llm:
        transport = httpx.ASGITransport(build_app(llm, dialects=dialects))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            answer = await client.post("/ask", json={"question": "What is 2 + 3?"})
            assert answer.json() == {"answer": said.text, "finish": "stop"}
            streamed = await client.post("/ask", json={"question": "What is 2 + 3?", "stream": True})
            *pieces, _ = map(json.loads, streamed.text.splitlines())
            assert "".join(piece["piece"] for piece in pieces) == said.text
            assert (await client.get("/ask")).json() == {"model": "demo", "tokens": 24}


TURNS = """
answer = "<|im_start|>assistant\\n<think>\\n\\n</think>\\n\\n"
[turn]
user = ["<|im_start|>user\\n", "<|im_end|>\\n"]
assistant = ["<|im_start|>assistant\\n<think>\\n\\n</think>\\n\\n", "<|im_end|>\\n"]
"""
SECTIONS = """{{#messages}}<|im_start|>{{role}}
{{content}}<|im_end|>
{{/messages}}{{#add_generation_prompt}}<|im_start|>assistant
<think>

</think>

{{/add_generation_prompt}}"""


def test_a_checkpoint_of_other_files_says_the_same(installed: Path, plain: LLM, tmp_path: Path) -> None:
    """Weights, tokenizer and template in files that other plugins read, and its working apart from its answers."""
    folder = tmp_path / "files"
    import_module("lmkit_loader_npy.convert").convert(plain.checkpoint.path, folder)
    import_module("lmkit_tokenizer_ranks.convert").convert(plain.checkpoint.path, folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"):
        (folder / name).unlink()
    (tmp_path / "chat.turns").write_text(TURNS)
    options = {"chat_template": str(tmp_path / "chat.turns"), "reasoning_parser": "sums"}
    with LLM(folder, **options, **SMALL) as llm:
        chosen = {(choice.kind, choice.name) for choice in llm.resolved.choices}
        assert chosen >= {("loader", "npy"), ("tokenizer", "ranks"), ("template", "turns")}
        assert answers(llm) == answers(plain)
        (sum,) = llm.chat(SUM, GREEDY)
        assert (sum.outputs[0].reasoning, sum.text) == ("2 + 3 =", "5")


def test_a_thread_says_the_same_and_keeps_a_journal(installed: Path, plain: LLM, tmp_path: Path) -> None:
    journal = tmp_path / "steps.jsonl"
    with LLM("demo", executor="thread", **{"executor.thread.journal": str(journal)}, **SMALL) as llm:
        assert answers(llm) == answers(plain)
        lines = [json.loads(line) for line in journal.read_text().splitlines()]
    assert sum(line["tokens"] for line in lines) >= sum(map(len, answers(plain)))
    assert all(line["seconds"] > 0 for line in lines)


def test_what_stands_in_for_two_of_lmkits_own(
    installed: Path, plain: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A renderer and a structured output, once lmkit's are switched off; and one of some texts, by the backend that a
    request names."""
    monkeypatch.setenv("LMKIT_PLUGINS_DISABLE", "renderer:jinja,structured_output:masks")
    (tmp_path / "chat.sections").write_text(SECTIONS)
    with LLM("demo", chat_template=str(tmp_path / "chat.sections"), **SMALL) as llm:
        assert llm.resolved.choice("renderer").name == "sections"
        assert answers(llm) == answers(plain)
        for backend in ("trie", "llguidance"):
            grammar = Grammar("choice", '["perhaps", "perhaps not", "never"]', backend)
            (said, other) = llm.chat([SUM, SUM], [replace(GREEDY, grammar=grammar), GREEDY])
            assert said.text in ("perhaps", "perhaps not", "never")
            assert other.token_ids == answers(plain)[0]
        bad = replace(GREEDY, grammar=Grammar("regex", "x", "trie"))
        (refused,) = llm.chat(SUM, bad)
        assert refused.outputs[0].error.message == "no grammar backend here takes regex"
