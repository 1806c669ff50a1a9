"""What a stream says is what the whole answer says: every route that streams, on STREAM_PROMPTS seeded prompts.

The model is the hash-model on the byte tokenizer: each prompt gets another answer, most of which are no UTF-8, end in
the middle of a character or hold back what might be a stop text.
"""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import httpx
import pytest
from lmkit_http.app import build_app
from lmkit_testing.serving import hashed

PROMPTS = int(os.environ.get("STREAM_PROMPTS", "10"))
Said = dict[str, Any]


class Wanted(NamedTuple):
    """One request, in the words of no dialect."""

    prompt: str
    max_tokens: int
    temperature: float
    seed: int
    stop: list[str]
    n: int
    logprobs: int | None

    @classmethod
    def of(cls, number: int) -> Wanted:
        r = random.Random(number)
        text = "".join(r.choices("abc é漢😀\n<>", k=r.randint(1, 40)))
        stop = r.sample(["a", "e", "\ufffd\ufffd", "0", "<think>"], r.randint(0, 2))
        return cls(text, r.randint(1, 48), r.choice([0.0, 0.7, 1.5]), number, stop, r.choice([1, 1, 3]),
                   r.choice([None, 0, 2]))  # fmt: skip


def events(text: str) -> Iterator[Said]:
    """The JSON of server-sent events; the end is marked, where a dialect marks it, once and at last."""
    blocks = text.split("\n\n")
    assert blocks.pop() == ""
    data = [block.rpartition("data: ")[2] for block in blocks]
    if data[-1] == "[DONE]":
        data.pop()
    yield from map(json.loads, data)


def added(choice: Said, more: Said) -> None:
    """Puts what a chunk says behind what was said: texts and lists grow, the rest is said once."""
    for name, value in more.items():
        old = choice.get(name)
        if isinstance(value, dict):
            added(choice.setdefault(name, {}) if old is None else old, value)
        elif isinstance(value, str | list) and isinstance(old, type(value)) and name not in ("role", "object"):
            choice[name] = old + value
        elif value is not None:
            assert old is None or old == value, (name, old, value)
            choice[name] = value


def filled(value: Any) -> Any:
    """Without what is null or empty: a stream leaves out what it has nothing to say of."""
    if isinstance(value, dict):
        return {k: kept for k, v in value.items() if (kept := filled(v)) not in (None, "", [], {})}
    return [filled(v) for v in value] if isinstance(value, list) else value


def usage(said: Said) -> Said:
    """Counts; where a prompt comes from is another thing at the second request, which finds it in the cache."""
    read = said.get("cache_read_input_tokens") or 0
    counts = {k: v for k, v in said.items() if isinstance(v, int) and "cache" not in k}
    return counts | ({"input_tokens": counts["input_tokens"] + read} if read else {})


def openai(body: Said) -> Said:
    """Of a whole answer; also of one with token ids."""
    choices = [{k: v for k, v in choice.items() if k != "message"} for choice in body["choices"]]
    for choice, shown in zip(choices, body["choices"], strict=True):
        choice["delta"] = shown.get("message", {})
    return filled({"choices": choices, "usage": usage(body["usage"]), "prompt": body.get("prompt_token_ids")})


def openai_stream(text: str) -> Said:
    *chunks, last = events(text)
    choices: dict[int, Said] = {}
    prompts = [chunk["prompt_token_ids"] for chunk in chunks if "prompt_token_ids" in chunk]
    assert len(prompts) <= 1
    for chunk in chunks:
        for choice in chunk["choices"]:
            assert "finish_reason" not in choices.get(choice["index"], {}), "nothing follows the end"
            more = {k: v for k, v in choice.items() if k != "index" and v is not None}
            added(choices.setdefault(choice["index"], {"index": choice["index"]}), more)
    assert last["choices"] == []
    shown = [choices[i] for i in sorted(choices)]
    return filled({"choices": shown, "usage": usage(last["usage"]), "prompt": prompts and prompts[0]})


def anthropic(body: Said) -> Said:
    return {"content": filled(body["content"]), "stop": [body["stop_reason"], body["stop_sequence"]],
            "usage": usage(body["usage"])}  # fmt: skip


def anthropic_stream(text: str) -> Said:
    first, *between, delta, last = events(text)
    assert (first["type"], delta["type"], last["type"]) == ("message_start", "message_delta", "message_stop")
    blocks: list[Said] = []
    for event in between:
        if event["type"] == "content_block_start":
            assert event["index"] == len(blocks)
            blocks.append(event["content_block"])
        elif event["type"] == "content_block_delta":
            assert event["index"] == len(blocks) - 1
            added(blocks[-1], {k: v for k, v in event["delta"].items() if k != "type"})
    counts = usage(first["message"]["usage"]) | usage(delta["usage"])
    stop = [delta["delta"]["stop_reason"], delta["delta"]["stop_sequence"]]
    return {"content": filled(blocks), "stop": stop, "usage": counts}


def responses(body: Said) -> Said:
    output = json.loads(json.dumps(body["output"]).replace(body["id"].removeprefix("resp_"), "ID"))
    return {"output": filled(output), "status": [body["status"], body["incomplete_details"]],
            "usage": usage(body["usage"])}  # fmt: skip


def responses_stream(text: str) -> Said:
    """The last event has the answer; the deltas say the same texts."""
    *before, last = events(text)
    texts: dict[tuple[int, int], str] = {}
    for event in before:
        if event["type"] in ("response.output_text.delta", "response.reasoning_text.delta"):
            place = event["output_index"], event["content_index"]
            texts[place] = texts.get(place, "") + event["delta"]
    said = [part["text"] for item in last["response"]["output"] for part in item.get("content") or []]
    assert list(texts.values()) == [text for text in said if text]
    assert [event["sequence_number"] for event in (*before, last)] == list(range(len(before) + 1))
    return responses(last["response"])


def ollama(body: Said) -> Said:
    return filled({k: v for k, v in body.items() if k != "created_at" and not k.endswith("duration")})


def ollama_stream(text: str) -> Said:
    *lines, last = map(json.loads, text.splitlines())
    whole: Said = {}
    for line in lines:
        assert line["done"] is False
    for line in (*lines, last):
        added(whole, {k: v for k, v in ollama(line).items() if k not in ("done", "model")})
    return filled(whole | {"done": last["done"], "model": last["model"]})


def sampled(w: Wanted) -> Said:
    counted = {"include_usage": True}
    return {"max_tokens": w.max_tokens, "temperature": w.temperature, "seed": w.seed, "stop": w.stop, "n": w.n,
            "stream_options": counted, "return_token_ids": True}  # fmt: skip


def chat(w: Wanted) -> Said:
    top = {} if w.logprobs is None else {"logprobs": True, "top_logprobs": w.logprobs}
    return {"messages": [{"role": "user", "content": w.prompt}], **sampled(w), **top}


def completions(w: Wanted) -> Said:
    return {"prompt": w.prompt, "logprobs": w.logprobs, **sampled(w)}


def tokens(w: Wanted) -> Said:
    params = {"max_tokens": w.max_tokens, "temperature": w.temperature, "seed": w.seed, "stop": w.stop, "n": w.n,
              "logprobs": w.logprobs}  # fmt: skip
    counted = {"include_usage": True}
    return {"token_ids": list(w.prompt.encode()), "sampling_params": params, "stream_options": counted}


def messages(w: Wanted) -> Said:
    return {"messages": [{"role": "user", "content": w.prompt}], "max_tokens": w.max_tokens, "temperature": 0,
            "stop_sequences": w.stop}  # fmt: skip


def respond(w: Wanted) -> Said:
    top = {} if w.logprobs is None else {"top_logprobs": w.logprobs, "include": ["message.output_text.logprobs"]}
    return {"input": w.prompt, "max_output_tokens": w.max_tokens, "temperature": w.temperature, "seed": w.seed, **top}


def options(w: Wanted) -> Said:
    top = {} if w.logprobs is None else {"logprobs": True, "top_logprobs": w.logprobs}
    how = {"num_predict": w.max_tokens, "temperature": w.temperature, "seed": w.seed, "stop": w.stop}
    return {"model": "hash", "options": how, **top}


def ollama_chat(w: Wanted) -> Said:
    return {"messages": [{"role": "user", "content": w.prompt}], **options(w)}


def ollama_generate(w: Wanted) -> Said:
    return {"prompt": w.prompt, **options(w)}


ROUTES: dict[str, tuple[Callable[[Wanted], Said], Callable[[Said], Said], Callable[[str], Said]]] = {
    "/v1/chat/completions": (chat, openai, openai_stream),
    "/v1/completions": (completions, openai, openai_stream),
    "/inference/v1/generate": (tokens, openai, openai_stream),
    "/v1/messages": (messages, anthropic, anthropic_stream),
    "/v1/responses": (respond, responses, responses_stream),
    "/api/chat": (ollama_chat, ollama, ollama_stream),
    "/api/generate": (ollama_generate, ollama, ollama_stream),
}


@pytest.mark.parametrize("route", ROUTES)
async def test_streams_say_what_whole_answers_say(route: str) -> None:
    body_of, of_whole, of_stream = ROUTES[route]
    async with hashed() as llm:
        transport = httpx.ASGITransport(build_app(llm))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost", timeout=60) as client:
            model = (await client.get("/v1/models")).json()["data"][0]["id"]
            for number in range(PROMPTS):
                body = body_of(Wanted.of(number)) | {"model": model}
                whole = await client.post(route, json=body | {"stream": False})
                streamed = await client.post(route, json=body | {"stream": True})
                assert (whole.status_code, streamed.status_code) == (200, 200), (whole.text, streamed.text)
                assert of_stream(streamed.text) == of_whole(whole.json()), f"prompt {number}"
