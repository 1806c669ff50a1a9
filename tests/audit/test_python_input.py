"""What users pass by mistake from Python: a typed error that names the field, never an answer to something else."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from lmkit import LLM, SamplingParams
from lmkit.api import CheckpointError, InvalidParam

PARAMS = SamplingParams(temperature=0, max_tokens=2)
HELLO = {"role": "user", "content": "Hello"}


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("demo", max_length=256, kv_memory="8MiB", threads=1) as llm:
        yield llm


@pytest.mark.parametrize(
    "prompts", [None, 5, b"x", {"text": "x"}, [1.5], [["a"]], [[1], 2], "", [], [[]], [-1], [True], [10**6]]
)
def test_prompts(llm: LLM, prompts: Any) -> None:
    if prompts == []:
        assert llm.generate(prompts, PARAMS) == []
        with pytest.raises(InvalidParam):
            list(llm.stream(prompts, PARAMS))
        return
    with pytest.raises(InvalidParam) as caught:
        llm.generate(prompts, PARAMS)
    assert caught.value.field.startswith("prompt")
    with pytest.raises(InvalidParam):
        list(llm.stream(prompts, PARAMS))


@pytest.mark.parametrize(
    "messages",
    [None, [], "hi", {}, [{}], ["hi"], [{"role": "user"}], [{"role": "user", "content": 5}], [[]], [[HELLO], "hi"],
     [{"role": 3, "content": "x"}], [HELLO, 5]],
)  # fmt: skip
def test_messages(llm: LLM, messages: Any) -> None:
    with pytest.raises(InvalidParam) as caught:
        llm.chat(messages, PARAMS)
    assert caught.value.field.startswith("messages")


def test_params_and_n(llm: LLM) -> None:
    for params in ({"temperature": 0}, [{"temperature": 0}], 0.5):
        with pytest.raises(InvalidParam):
            llm.generate("x", params)  # type: ignore[arg-type]
    for n in (0, True, "2", 1.5):
        with pytest.raises(InvalidParam):
            llm.generate("x", PARAMS, n=n)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "field", [{"logit_bias": {"a": 1}}, {"logit_bias": 5}, {"logit_bias": {1.5: 1}}, {"logit_bias": {1: "2"}},
              {"logit_bias": [1, 2]}, {"ignore_eos": 3}, {"stop": 1.5}, {"stop_token_ids": 1.5}, {"extra": []}],
)  # fmt: skip
def test_sampling_params(field: dict[str, Any]) -> None:
    with pytest.raises(InvalidParam) as caught:
        SamplingParams(**field)
    assert caught.value.field == next(iter(field))


def test_the_nearest_checkpoint_name_is_offered() -> None:
    with pytest.raises(CheckpointError) as caught:
        LLM("dmo")
    assert caught.value.fix == "did you mean 'demo'?"
