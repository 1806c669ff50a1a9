"""The demo checkpoint as a GGUF file: served as it is, and greedy tokens are those of llama.cpp on the same file."""

from __future__ import annotations

import json
from pathlib import Path

import openai
import pytest
from lmkit import LLM, SamplingParams
from lmkit_model_demo.hooks import DIRECTORY

from .conftest import lmkit, serving

pytest.importorskip("gguf", reason="files are written with the library gguf")
from lmkit_testing.gguf_files import vocabulary, write

# Token ids of prompts, and the greedy tokens behind them by llama-cpp-python 0.3.36, of what `write` gives with F16:
# `python tests/quant_parity/tokens_of_llamacpp.py FILE.gguf PROMPTS.json`.
GREEDY = json.loads(Path(__file__).with_name("llamacpp.json").read_text())
SUMS = [(a, b) for a in (3, 17, 28, 46, 59) for b in (2, 14, 35, 40)]
ASKED = [[{"role": "user", "content": f"What is {a} + {b}?"}] for a, b in SUMS]


def demo(target: Path, kind: str) -> Path:
    return write(DIRECTORY, target, "llama", kind, **vocabulary(DIRECTORY))


def test_greedy_tokens_are_those_of_llamacpp(tmp_path: Path) -> None:
    with LLM(str(demo(tmp_path / "demo.gguf", "F16")), dtype="float32") as llm:
        params = SamplingParams(max_tokens=len(GREEDY["tokens"][0]), temperature=0.0, ignore_eos=True)
        outputs = llm.generate(GREEDY["prompts"], params, progress=False)
    assert [list(output.token_ids) for output in outputs] == GREEDY["tokens"]


@pytest.mark.full("lmkit-loader-gguf")
@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "Q5_1"])
def test_a_file_is_served(kind: str, tmp_path: Path) -> None:
    """Weights, tokenizer and chat template come from it, and nothing else is there."""
    file = demo(tmp_path / "demo.gguf", kind)
    with serving(str(file)) as server:
        with openai.OpenAI(base_url=server.url() + "/v1", api_key="none", max_retries=0) as client:
            name = client.models.list().data[0].id
            answers = [
                client.chat.completions.create(model=name, messages=messages, temperature=0, max_tokens=48)  # type: ignore[arg-type]
                for messages in ASKED
            ]
        assert server.stop() == 0, server.output
    said = [answer.choices[0].message.content or "" for answer in answers]
    right = sum(str(a + b) in text.partition("=")[2] for (a, b), text in zip(SUMS, said, strict=True))
    assert right >= 0.9 * len(SUMS), said
    assert all(answer.choices[0].finish_reason == "stop" for answer in answers)


@pytest.mark.full("lmkit-loader-gguf")
def test_inspect_tells_of_a_file(tmp_path: Path) -> None:
    done = lmkit("inspect", str(demo(tmp_path / "demo.gguf", "Q4_0")))
    assert done.returncode == 0, done.stderr
    for part in ("gguf, 1 files", "LlamaForCausalLM", "linear:int4", "linear_integer_native"):
        assert part in done.stdout
