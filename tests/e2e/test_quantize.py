"""A quantized checkpoint is one as any other: served by lmkit, loaded by transformers."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast

import openai
import pytest
import torch
from lmkit import LLM, SamplingParams
from lmkit_cli import run

from .conftest import serving

SUMS = [(a, b) for a in (3, 17, 28, 46, 59) for b in (2, 14, 35, 40)]
GREEDY = SamplingParams(max_tokens=32, temperature=0.0)
MORE = pytest.mark.full("lmkit-quantize")
REAL = pytest.mark.skipif(find_spec("llmcompressor") is None, reason="needs lmkit-quantize[calibration]")
WAYS = [
    ("--scheme int4", False),
    *(pytest.param(f"--scheme {scheme}", True, marks=MORE) for scheme in ("int4", "int8", "w8a8", "fp8")),
    *(
        pytest.param(f"--scheme int4 --method {method} --calibration-tokens 4096", True, marks=REAL)
        for method in ("gptq", "awq")
    ),
]


@pytest.mark.parametrize(("way", "served"), WAYS)
def test_the_result_is_loaded_and_served(way: str, served: bool, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("compressed_tensors", reason="with which transformers reads the format")
    output = tmp_path / "made"
    assert run(("quantize", "demo", "-o", str(output), *way.split())) == 0

    with LLM(str(output)) as llm:
        asked = [[{"role": "user", "content": f"What is {a} + {b}?"}] for a, b in SUMS]
        answers = llm.chat(asked, GREEDY)
        right = sum(str(a + b) in o.text.partition("=")[2] for (a, b), o in zip(SUMS, answers, strict=True))
    assert right >= 0.95 * len(SUMS), [o.text for o in answers]

    if served:
        with serving(str(output)) as server:
            with openai.OpenAI(base_url=server.url() + "/v1", api_key="none", max_retries=0) as client:
                name, messages = client.models.list().data[0].id, cast(Any, asked[0])
                reply = client.chat.completions.create(model=name, messages=messages, temperature=0, max_tokens=32)
            assert server.stop() == 0, server.output
        assert reply.choices[0].message.content == answers[0].text

    model = transformers.AutoModelForCausalLM.from_pretrained(output, dtype=torch.float32)
    for answer in answers[:3]:  # it multiplies the same weights by activations that are rounded otherwise, or not
        tokens = [*answer.prompt_token_ids, *answer.token_ids]
        with torch.no_grad():
            logits = model(torch.tensor([tokens])).logits[0, len(answer.prompt_token_ids) - 1 : -1]
        assert logits.argmax(-1).tolist() == list(answer.token_ids)
