"""--quantization of a checkpoint that is not quantized: the model still says what it said."""

from __future__ import annotations

import pytest
from lmkit import LLM
from lmkit.api import LmkitError, SamplingParams
from lmkit.config import from_options
from lmkit.plugins.resolve import resolve

QUESTION = [{"role": "user", "content": "What is lmkit?"}]
OPTIONS = [
    ("int8", {}),
    ("int8", {"quantization.int8.group_size": 32}),
    ("w8a8", {}),
    ("int4", {"quantization.int4.group_size": 32}),
    ("fp8", {}),
]


PLAIN = 2 * resolve(from_options({"model": "demo"}))[2].num_parameters  # bytes of bfloat16, however it is packed


def answer(**options: object) -> tuple[str, int]:
    with LLM("demo", max_rows=4, **options) as llm:
        (result,) = llm.chat(QUESTION, SamplingParams(max_tokens=24, temperature=0))
        return result.outputs[0].text, llm.facts.weight_bytes


@pytest.fixture(scope="module")
def unquantized() -> str:
    return answer(quantization="none")[0]


@pytest.mark.one_in(2)
@pytest.mark.parametrize(("name", "options"), OPTIONS, ids=str)
def test_the_answer_is_the_same(unquantized: str, name: str, options: dict[str, object]) -> None:
    text, size = answer(quantization=name, **options)
    assert text == unquantized
    assert size < 0.6 * PLAIN


@pytest.mark.full("lmkit-quantization-bitsandbytes")
def test_what_runs_dequantized_is_no_smaller(unquantized: str) -> None:
    """There is one copy of each weight, in the type of activations."""
    text, size = answer(quantization="nf4", dtype="bfloat16", op="linear_reference")  # pinned: what dequantizes
    assert text == unquantized
    assert size == pytest.approx(PLAIN, rel=0.1)


def test_a_format_of_checkpoints_is_refused() -> None:
    with pytest.raises(LmkitError, match="not quantized"):
        LLM("demo", quantization="gptq")
