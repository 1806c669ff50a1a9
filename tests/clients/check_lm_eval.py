"""lm-eval's API models: log-likelihoods are those that a request computes directly, and greedy ones are."""

from __future__ import annotations

import json
import urllib.request
from typing import Any

import pytest
from lm_eval.api.instance import Instance
from lm_eval.models.openai_completions import LocalChatCompletion, LocalCompletionsAPI

PAIRS = [("What is 12 + 30?", " 42"), ("Hello", " there, how are you?"), ("one, two, three,", " four"), ("Größe", " é")]


def asked(url: str, **body: Any) -> Any:
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{url}", json.dumps({"model": "demo"} | body).encode(), headers)
    with urllib.request.urlopen(request, timeout=60) as response:
        return json.load(response)


def ids(url: str, text: str) -> list[int]:
    return list(asked(f"{url}/tokenize", prompt=text, add_special_tokens=False)["tokens"])


@pytest.fixture(scope="module", params=[False, True], ids=["text", "ids"])
def model(url: str, request: pytest.FixtureRequest) -> LocalCompletionsAPI:
    more = {"tokenizer_backend": "remote", "tokenized_requests": request.param}
    return LocalCompletionsAPI(model="demo", base_url=f"{url}/v1/completions", max_length=2048, **more)


def test_loglikelihood(url: str, model: LocalCompletionsAPI) -> None:
    found = model.loglikelihood([Instance("loglikelihood", {}, pair, i) for i, pair in enumerate(PAIRS)])
    for (context, continuation), (logprob, greedy) in zip(PAIRS, found, strict=True):
        prompt = ids(url, context)
        rest = ids(url, context + continuation)[len(prompt) :]  # as lm-eval parts them
        route = f"{url}/v1/completions"
        sent = asked(route, prompt=prompt + rest, max_tokens=0, echo=True, logprobs=1)
        assert logprob == pytest.approx(sum(sent["choices"][0]["logprobs"]["token_logprobs"][len(prompt) :]), abs=1e-4)
        best = asked(route, prompt=prompt, max_tokens=len(rest), temperature=0, return_token_ids=True)
        assert greedy == (best["choices"][0]["token_ids"] == rest)


def test_loglikelihood_rolling(url: str, model: LocalCompletionsAPI) -> None:
    (found,) = model.loglikelihood_rolling([Instance("loglikelihood_rolling", {}, ("Hello there.",), 0)])
    assert found < 0


def test_generate_until(model: LocalCompletionsAPI) -> None:
    options = {"until": ["\n"], "max_gen_toks": 8, "temperature": 0}
    (found,) = model.generate_until([Instance("generate_until", {}, ("Hello", options), 0)])
    assert "\n" not in found


def test_chat_generate_until(url: str) -> None:
    model = LocalChatCompletion(model="demo", base_url=f"{url}/v1/chat/completions", max_length=2048)
    text = model.apply_chat_template([{"role": "user", "content": "What is 12 + 30?"}])
    options = {"until": ["\n\n"], "max_gen_toks": 40, "temperature": 0}
    (found,) = model.generate_until([Instance("generate_until", {}, (text, options), 0)])
    assert "42" in found
