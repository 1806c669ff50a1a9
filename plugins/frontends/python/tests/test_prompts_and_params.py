"""Prompts and parameters as scripts for other engines have them, and what they mean: the same as over HTTP."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import pytest_asyncio
from lmkit import LLM, SamplingParams
from lmkit.api import ConfigError, InvalidParam
from lmkit.config import from_options
from lmkit.config.schema import leaves
from lmkit_http.app import build_app
from lmkit_python.elsewhere import ELSEWHERE
from lmkit_python.front.ask import text_asks
from lmkit_python.llm import AsyncLLM

OPTIONS: dict[str, Any] = {"dtype": "float32", "max_rows": 8, "threads": 1, "kv_memory": "8MiB", "max_length": 256}


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("demo", **OPTIONS) as llm:
        yield llm


def test_dict_prompts(llm: LLM) -> None:
    params = SamplingParams(max_tokens=6, temperature=0.0)
    ids = llm.text.encode_prompt("Tell me")
    (text,) = llm.generate("Tell me", params)
    both = {"prompt": "Tell me", "prompt_token_ids": ids}
    prompts = [{"prompt": "Tell me"}, {"prompt_token_ids": ids}, both, "Tell me"]
    assert [o.token_ids for o in llm.generate(prompts, params)] == [text.token_ids] * 4
    assert llm.generate({"prompt": "Tell me"}, params)[0].token_ids == text.token_ids
    assert "".join(llm.stream_text({"prompt": "Tell me"}, params)) == text.text


@pytest.mark.parametrize(
    "prompt",
    [{}, {"prompt": 5}, {"prompt_token_ids": []}, {"prompt_token_ids": ["a"]}, {"text": "x"},
     {"prompt": "x", "multi_modal_data": {"image": 1}}, {"prompt": ["a", "b"]}],
)  # fmt: skip
def test_dict_prompts_that_are_refused(prompt: dict[str, Any]) -> None:
    with pytest.raises(InvalidParam, match="prompt"):
        text_asks(prompt)
    with pytest.raises(InvalidParam, match=r"prompts\[1\]"):
        text_asks(["a", prompt])


CASES: list[dict[str, Any]] = [
    {"n": 2, "temperature": 0.8, "seed": 5},
    {"skip_special_tokens": False},
    {"skip_special_tokens": False, "spaces_between_special_tokens": False},
    {"stop": ["e"], "include_stop_str_in_output": True},
    {"stop": "e"},
    {"bad_words": ["the", " a", "I"]},
    {"allowed_token_ids": [40, 41, 42, 43]},
    {"truncate_prompt_tokens": 2},
    {"truncate_prompt_tokens": -1},
    {"top_k": -1, "temperature": 0.7, "seed": 3},
    {"top_k": 3, "temperature": 0.7, "seed": 3},
    {"min_tokens": 5, "seed": 1},
    {"prompt_logprobs": 2},
    {"logit_bias": {"40": 5.0}},
]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server() -> Any:
    async with AsyncLLM("demo", **OPTIONS) as served:
        transport = httpx.ASGITransport(build_app(served))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost", timeout=120) as client:
            yield client


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("fields", CASES, ids=lambda fields: next(iter(fields)))
async def test_params_mean_what_they_mean_over_http(
    llm: LLM, fields: dict[str, Any], server: httpx.AsyncClient
) -> None:
    given = {"max_tokens": 8, "temperature": 0.0, **fields}
    (output,) = await asyncio.to_thread(llm.generate, "Tell me about the server", SamplingParams(**given))
    answer = await server.post("/v1/completions", json={"prompt": "Tell me about the server", **given})
    assert answer.status_code == 200, answer.text
    choices = answer.json()["choices"]
    assert [one.text for one in output.outputs] == [choice["text"] for choice in choices]
    assert len(output.outputs) == given.get("n", 1)
    if "prompt_logprobs" in fields:
        assert output.prompt_logprobs is not None
        assert choices[0]["prompt_logprobs"] is not None
    if fields.get("truncate_prompt_tokens") == 2:
        assert len(output.prompt_token_ids) == 2 == answer.json()["usage"]["prompt_tokens"]


@pytest.mark.asyncio(loop_scope="module")
async def test_chat_params_mean_what_they_mean_over_http(llm: LLM, server: httpx.AsyncClient) -> None:
    messages = [{"role": "user", "content": "What is 2 + 3?"}]
    given: dict[str, Any] = {"max_tokens": 8, "temperature": 0.0, "skip_special_tokens": False, "bad_words": ["5"]}
    given["n"] = 2
    (output,) = await asyncio.to_thread(llm.chat, messages, SamplingParams(**given))
    answer = (await server.post("/v1/chat/completions", json={"messages": messages, **given})).json()
    assert [one.text for one in output.outputs] == [choice["message"]["content"] for choice in answer["choices"]]


def test_priority_reaches_the_engine(llm: LLM) -> None:
    (ask,) = text_asks("a", SamplingParams(priority=-3))
    ((turn,),) = llm.prepare([ask])
    assert turn.request.priority == -3


def test_n_is_said_once() -> None:
    assert text_asks("a", SamplingParams(n=3))[0].n == text_asks("a", n=3)[0].n == 3
    with pytest.raises(InvalidParam, match="n: got 2"):
        text_asks("a", SamplingParams(n=3), n=2)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"n": 0}, "n"), ({"n": True}, "n"), ({"bad_words": [""]}, "bad_words"), ({"bad_words": [5]}, "bad_words"),
        ({"bad_words": ["a"] * 1000}, "bad_words"), ({"allowed_token_ids": [-1]}, "allowed_token_ids"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"), ({"priority": "high"}, "priority"),
        ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens"), ({"skip_special_tokens": 1}, "skip_special_tokens"),
        ({"top_k": -2}, "top_k"), ({"logprobs": -1}, "logprobs"), ({"prompt_logprobs": -1}, "prompt_logprobs"),
    ],
)  # fmt: skip
def test_values_that_are_refused(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidParam) as caught:
        SamplingParams(**fields)
    assert caught.value.field == said
    if -1 in fields.values() and "logprobs" in said:
        assert f"{said}=20" in caught.value.fix


@pytest.mark.parametrize(
    ("name", "here"),
    [
        ("structured_outputs", "Grammar("), ("guided_decoding", "Grammar("), ("best_of", "beam_search"),
        ("max_new_tokens", "max_tokens"), ("extra_args", "extra="), ("temprature", "did you mean 'temperature'"),
    ],
)  # fmt: skip
def test_parameters_of_other_names_say_how_they_are_called(name: str, here: str) -> None:
    with pytest.raises(InvalidParam, match=name) as caught:
        SamplingParams(**{name: 1})
    assert here in caught.value.fix


@pytest.mark.parametrize("name", ELSEWHERE)
def test_options_of_other_names_say_how_they_are_called(name: str) -> None:
    """Whatever option they name is one."""
    with pytest.raises(ConfigError, match=f"no option '{name}'") as caught:
        LLM("demo", **{name: 1})
    known = {leaf.flag.removeprefix("--").replace("-", "_") for leaf in leaves().values()}
    assert name not in known
    here = ELSEWHERE[name]
    if not here.startswith("-"):
        option = here.removeprefix("AsyncLLM(..., ").partition("=")[0]
        assert option in known | {"params"}, here
        assert option in caught.value.fix
    assert from_options({"model": "demo"})
