"""A checkpoint that names the wrong end token, as many made from base models do: answers end all the same."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lmkit_model_demo
import pytest
from lmkit import LLM, SamplingParams
from lmkit_cli import run
from lmkit_testing.serving import real

DEMO = Path(lmkit_model_demo.__file__).parent / "checkpoint"
QUESTION = [{"role": "user", "content": "What is 17 + 25?"}]
Make = Callable[..., Path]


@pytest.fixture
def wrong(tmp_path: Path) -> Make:
    """The demo, whose configuration knows <|endoftext|> alone. `settings` replace those of its tokenizer."""

    def make(**settings: Any) -> Path:
        path = tmp_path / "model"
        shutil.copytree(DEMO, path)
        (path / "generation_config.json").unlink()
        (path / "special_tokens_map.json").unlink()
        edit(path / "config.json", eos_token_id=0)
        edit(path / "tokenizer_config.json", **settings)
        return path

    return make


def edit(file: Path, **values: Any) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), **values}))


def call(capsys: pytest.CaptureFixture[str], *args: str) -> tuple[int, Any]:
    status = run([*args, "--json"])
    return status, json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("eos", ["<|im_end|>", {"content": "<|im_end|>"}, "<|endoftext|>", None])
@pytest.mark.one_in(4)
def test_inspect_shows_what_names_each_end(wrong: Make, eos: object, capsys: pytest.CaptureFixture[str]) -> None:
    path = wrong(eos_token=eos)
    _, found = call(capsys, "inspect", str(path))
    ends = {end["id"]: (end["token"], end["from"]) for end in found["ends"]}
    own = ["tokenizer"] if eos not in ("<|endoftext|>", None) else []
    assert ends == {
        0: ("<|endoftext|>", ["config", *(["tokenizer"] if eos == "<|endoftext|>" else [])]),
        2: ("<|im_end|>", [*own, "chat template"]),
    }
    status, checks = call(capsys, "verify", str(path))
    (check,) = [c for c in checks if c["name"] == "end of turn"]
    assert (status, check["status"]) == (0, "ok")
    assert "<|im_end|>" in check["detail"]


def test_answers_end(wrong: Make) -> None:
    with LLM(str(wrong(eos_token="<|endoftext|>")), kv_memory="8MiB") as llm:
        (output,) = llm.chat(QUESTION, SamplingParams(temperature=0.0, max_tokens=40))
        assert output.finish_reason == "stop"
        assert output.token_ids[-1] == 2
        assert "user" not in output.text
        (output,) = llm.chat(QUESTION, SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True))
        assert (output.finish_reason, len(output.token_ids)) == ("length", 40)


async def test_the_server_takes_them_too(wrong: Make) -> None:
    async with real(str(wrong(eos_token="<|endoftext|>"))) as served:
        assert served.facts.eos_token_ids == (0, 2)
        assert served.text.tokenizer.eos_token_ids == (0, 2)


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("behind", "status"), [("<|im_fin|>\n", "failed"), ("<|im_start|>", "ok"), ("\n\n", "warning")]
)
def test_verify_says_when_nothing_ends_a_turn(
    behind: str, status: str, wrong: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    template = tmp_path / "t.jinja"
    template.write_text("{% for m in messages %}{{ m.role }}: {{ m.content }}" + behind + "{% endfor %}")
    path = wrong(eos_token="<|endoftext|>")
    code, checks = call(capsys, "verify", str(path), "--chat-template", str(template), "--tool-parser", "none")
    (check,) = [c for c in checks if c["name"] == "end of turn"]
    assert check["status"] == status
    assert code == (status == "failed")
