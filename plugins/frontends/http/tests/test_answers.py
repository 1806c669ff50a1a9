"""What the generating routes answer, whole and streamed alike (T4), exactly as scripted."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from lmkit_testing.serving import scripted
from lmkit_tokenizer_json.render import Renderer

HELLO = {"messages": [{"role": "user", "content": "Hello"}]}
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
ANSWER = '<think>hm é</think>Ok.\n<tool_call>{"name": "f", "arguments": {"a": "😀"}}</tool_call>'


def chunks(text: str) -> list[dict[str, Any]]:
    lines = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def assemble(events: list[dict[str, Any]], n: int = 1) -> list[dict[str, Any]]:
    """What a client makes of the chunks."""
    choices: list[dict[str, Any]] = [
        {"content": "", "reasoning": "", "calls": [], "finish": None, "tokens": []} for _ in range(n)
    ]
    for event in events:
        for c in event["choices"]:
            made, delta = choices[c["index"]], c["delta"]
            assert made["finish"] is None, "nothing comes after the finish"
            made["content"] += delta.get("content") or ""
            made["reasoning"] += delta.get("reasoning_content") or ""
            assert delta.get("reasoning") == delta.get("reasoning_content")
            for call in delta.get("tool_calls", ()):
                if "id" in call:
                    made["calls"].append([call["function"]["name"], ""])
                made["calls"][call["index"]][1] += call["function"].get("arguments", "")
            made["finish"] = c["finish_reason"]
            made["tokens"] += [e["token"] for e in (c.get("logprobs") or {}).get("content", ())]
    return choices


@pytest.mark.parametrize("per_event", [1, 3, 1000])
async def test_chat_streamed_equals_whole(connect: Any, per_event: int) -> None:
    client = connect(scripted(ANSWER, per_event=per_event))
    body = HELLO | {"tools": TOOLS, "model": "scripted"}
    whole = (await client.post("/v1/chat/completions", json=body)).json()
    message = whole["choices"][0]["message"]
    assert message["content"] == "Ok.\n"
    assert message["reasoning_content"] == message["reasoning"] == "hm é"
    assert message["tool_calls"][0]["function"] == {"name": "f", "arguments": '{"a": "😀"}'}
    assert whole["choices"][0]["finish_reason"] == "tool_calls"
    streamed = chunks(
        (
            await client.post(
                "/v1/chat/completions", json=body | {"stream": True, "stream_options": {"include_usage": True}}
            )
        ).text
    )
    (made,) = assemble(streamed)
    assert made["content"] == message["content"]
    assert made["reasoning"] == message["reasoning"]
    assert made["calls"] == [["f", '{"a": "😀"}']]
    assert made["finish"] == "tool_calls"
    assert streamed[-1]["choices"] == []
    assert streamed[-1]["usage"] == whole["usage"]
    assert all(c["usage"] is None for c in streamed[:-1])
    assert len({c["id"] for c in streamed}) == 1
    assert whole["usage"]["completion_tokens"] == len(ANSWER.encode()) + 1
    assert whole["usage"]["completion_tokens_details"]["reasoning_tokens"] > 0


async def test_several_choices(connect: Any) -> None:
    body = HELLO | {"n": 3, "stream": True}
    response = await connect(scripted("a", "bb", "ccc")).post("/v1/chat/completions", json=body)
    assert [c["content"] for c in assemble(chunks(response.text), 3)] == ["a", "bb", "ccc"]
    whole = (await connect(scripted("a", "bb", "ccc")).post("/v1/chat/completions", json=HELLO | {"n": 3})).json()
    assert [c["message"]["content"] for c in whole["choices"]] == ["a", "bb", "ccc"]
    assert whole["usage"]["completion_tokens"] == 9
    assert whole["usage"]["total_tokens"] == 9 + whole["usage"]["prompt_tokens"]


async def test_stop_strings_end_the_request(connect: Any) -> None:
    llm = scripted("one STOP two")
    body = HELLO | {"stop": ["STOP"]}
    choice = (await connect(llm).post("/v1/chat/completions", json=body)).json()["choices"][0]
    assert (choice["message"]["content"], choice["finish_reason"], choice["stop_reason"]) == ("one ", "stop", "STOP")
    assert len(llm.client.aborted) == 1  # type: ignore[attr-defined]
    body |= {"include_stop_str_in_output": True}
    choice = (await connect(llm).post("/v1/chat/completions", json=body)).json()["choices"][0]
    assert choice["message"]["content"] == "one STOP"


async def test_reasoning_can_be_left_out(connect: Any) -> None:
    body = HELLO | {"include_reasoning": False}
    client = connect(scripted("<think>secret</think>answer"))
    response = await client.post("/v1/chat/completions", json=body)
    assert response.json()["choices"][0]["message"] == {"role": "assistant", "content": "answer", "refusal": None}
    response = await client.post("/v1/chat/completions", json=body | {"stream": True})
    assert "secret" not in response.text


async def test_tools_are_not_parsed_without_tools(connect: Any) -> None:
    for extra in ({}, {"tools": TOOLS, "tool_choice": "none"}):
        response = await connect(scripted(ANSWER)).post("/v1/chat/completions", json=HELLO | extra)
        choice = response.json()["choices"][0]
        assert "<tool_call>" in choice["message"]["content"]
        assert choice["finish_reason"] == "stop"


async def test_one_call_when_parallel_calls_are_off(connect: Any) -> None:
    call = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    llm = scripted(call + call)
    body = HELLO | {"tools": TOOLS, "parallel_tool_calls": False}
    choice = (await connect(llm).post("/v1/chat/completions", json=body)).json()["choices"][0]
    assert len(choice["message"]["tool_calls"]) == 1
    assert choice["finish_reason"] == "tool_calls"
    (made,) = assemble(chunks((await connect(llm).post("/v1/chat/completions", json=body | {"stream": True})).text))
    assert made["calls"] == [["f", "{}"]]
    assert made["finish"] == "tool_calls"


async def test_chat_logprobs_join_to_the_content(connect: Any) -> None:
    client = connect(scripted("<think>a</think>bé"))
    body = HELLO | {"logprobs": True, "top_logprobs": 2}
    choice = (await client.post("/v1/chat/completions", json=body)).json()["choices"][0]
    entries = choice["logprobs"]["content"]
    assert bytes(b for e in entries for b in e["bytes"]).decode() == "bé"
    assert all(len(e["top_logprobs"]) == 2 for e in entries)
    (made,) = assemble(chunks((await client.post("/v1/chat/completions", json=body | {"stream": True})).text))
    assert made["tokens"] == [e["token"] for e in entries]


async def test_cut_by_max_tokens(connect: Any) -> None:
    response = await connect(scripted("abcdef")).post("/v1/chat/completions", json=HELLO | {"max_completion_tokens": 3})
    choice = response.json()["choices"][0]
    assert (choice["message"]["content"], choice["finish_reason"]) == ("abc", "length")


async def test_token_ids_and_prompt_logprobs(connect: Any) -> None:
    body = HELLO | {"return_token_ids": True, "prompt_logprobs": 1}
    answer = (await connect(scripted("ab")).post("/v1/chat/completions", json=body)).json()
    assert len(answer["choices"][0]["token_ids"]) == 3
    assert len(answer["prompt_logprobs"]) == len(answer["prompt_token_ids"]) == answer["usage"]["prompt_tokens"]
    assert answer["prompt_logprobs"][0] is None


async def test_continued_messages(connect: Any) -> None:
    llm = scripted("four")
    messages = [*HELLO["messages"], {"role": "assistant", "content": "It is "}]
    response = await connect(llm).post(
        "/v1/chat/completions", json={"messages": messages, "continue_final_message": True}
    )
    assert response.json()["choices"][0]["message"]["content"] == "four"
    prompt = llm.text.tokenizer.decode(llm.client.requests[0].token_ids, skip_special=False)  # type: ignore[attr-defined]
    assert prompt.endswith("<|assistant|>It is ")


@pytest.mark.parametrize(
    ("prompt", "n", "expected"),
    [("x", 1, ["a"]), (["x", "y"], 1, ["a", "b"]), ([1, 2], 1, ["a"]), ([[1], [2]], 2, ["a", "b", "c", "a"])],
)
async def test_completions_of_all_kinds_of_prompts(connect: Any, prompt: Any, n: int, expected: list[str]) -> None:
    body = {"prompt": prompt, "n": n}
    answer = (await connect(scripted("a", "b", "c")).post("/v1/completions", json=body)).json()
    assert [c["text"] for c in answer["choices"]] == expected
    assert [c["index"] for c in answer["choices"]] == list(range(len(expected)))
    response = await connect(scripted("a", "b", "c")).post("/v1/completions", json=body | {"stream": True})
    texts = [""] * len(expected)
    for chunk in chunks(response.text):
        for c in chunk["choices"]:
            texts[c["index"]] += c["text"]
    assert texts == expected


async def test_echo_with_logprobs(connect: Any) -> None:
    """The token that ends an answer has no text, and an entry: harnesses count from the end."""
    body = {"prompt": "é x", "echo": True, "logprobs": 1, "max_tokens": 4}
    client = connect(scripted("ab"))
    choice = (await client.post("/v1/completions", json=body)).json()["choices"][0]
    assert choice["text"] == "é xab"
    logprobs = choice["logprobs"]
    assert logprobs["token_logprobs"][0] is None
    assert len(logprobs["tokens"]) == len(logprobs["text_offset"]) == len(logprobs["top_logprobs"]) == 4 + 3
    assert logprobs["text_offset"] == [0, 0, 1, 2, 3, 4, 5]
    streamed = chunks((await client.post("/v1/completions", json=body | {"stream": True})).text)
    assert "".join(c["choices"][0]["text"] for c in streamed) == "é xab"
    offsets = [at for c in streamed for at in (c["choices"][0]["logprobs"] or {}).get("text_offset", ())]
    assert offsets == logprobs["text_offset"]


async def test_scoring_a_prompt(connect: Any) -> None:
    """max_tokens=0 with echo, as evaluation harnesses ask."""
    body = {"prompt": "abc", "echo": True, "logprobs": 0, "max_tokens": 0}
    answer = (await connect(scripted("zzz")).post("/v1/completions", json=body)).json()
    assert answer["choices"][0]["text"] == "abc"
    assert len(answer["choices"][0]["logprobs"]["tokens"]) == 3
    assert answer["usage"]["completion_tokens"] == 0
    response = await connect(scripted("zzz")).post("/v1/completions", json={"prompt": "abc", "max_tokens": 0})
    assert response.status_code == 400


async def test_tools_that_cannot_work_are_refused(connect: Any) -> None:
    llm = scripted("a")
    llm.text = replace(llm.text, tool_format=None)
    response = await connect(llm).post("/v1/chat/completions", json=HELLO | {"tools": TOOLS})
    assert response.status_code == 400
    assert "--tool-parser" in response.json()["error"]["message"]
    llm = scripted("a")
    llm.text = replace(llm.text, renderer=Renderer("{{ messages[0].content }}", {}))
    response = await connect(llm).post("/v1/chat/completions", json=HELLO | {"tools": TOOLS})
    assert response.json()["error"]["param"] == "tools"


async def test_an_effort_turns_thinking_on_or_off(connect: Any) -> None:
    llm = scripted("a")
    llm.text = replace(llm.text, renderer=Renderer("{{ messages[0].content }}{{ enable_thinking }}", {}))
    for effort, prompt in (("none", "False"), ("low", "True"), ("max", "True"), ("banana", None)):
        body = HELLO | {"reasoning_effort": effort, "return_token_ids": True}
        answer = (await connect(llm).post("/v1/chat/completions", json=body)).json()
        if prompt is None:
            assert answer["error"]["param"] == "reasoning_effort"
        else:
            assert llm.text.tokenizer.decode(answer["prompt_token_ids"]).endswith(prompt)


async def test_too_many_choices(connect: Any) -> None:
    response = await connect(scripted("a")).post("/v1/completions", json={"prompt": ["x"] * 100, "n": 2})
    assert response.status_code == 400
    assert "200" in response.json()["error"]["message"] or "100 prompts" in response.json()["error"]["message"]


async def test_tokenize_and_back(connect: Any) -> None:
    client = connect(scripted("a"))
    answer = (await client.post("/tokenize", json={"prompt": "hé", "return_token_strs": True})).json()
    assert answer["count"] == 3
    assert len(answer["token_strs"]) == 3
    assert (await client.post("/detokenize", json={"tokens": answer["tokens"]})).json() == {"prompt": "hé"}
    chat = (await client.post("/tokenize", json=HELLO | {"tools": TOOLS})).json()
    text = (await client.post("/detokenize", json={"tokens": chat["tokens"]})).json()["prompt"]
    assert text.startswith("<|user|>Hello<|end|>")
    assert text.endswith("<|assistant|>")
    assert (await client.post("/tokenize", json={})).status_code == 400
    assert (await client.post("/detokenize", json={"tokens": [-1]})).status_code == 400


async def test_information(connect: Any) -> None:
    client = connect(scripted("a"))
    models = (await client.get("/v1/models")).json()
    assert models["data"][0]["id"] == "scripted"
    assert models["data"][0]["max_model_len"] == 4096
    assert (await client.get("/v1/models/scripted")).json() == models["data"][0]
    assert (await client.get("/v1/models/other")).status_code == 404
    for path in ("/live", "/ready", "/health", "/version", "/debug/plan"):
        assert (await client.get(path)).status_code == 200, path
    assert (await client.get("/nope")).json()["error"]["code"] == "not-found"
    assert (await client.post("/live")).status_code == 405
    page = await client.get("/")
    assert page.headers["content-type"].startswith("text/html")


async def test_metrics_are_a_contract(connect: Any) -> None:
    client = connect(scripted("abc"))
    await client.post("/v1/chat/completions", json=HELLO)
    text = (await client.get("/metrics")).text
    names = """
        lmkit_engine_up lmkit_requests_waiting lmkit_requests_running lmkit_kv_usage_ratio lmkit_kv_blocks
        lmkit_kernels_compiled_total
        lmkit_steps_total
        lmkit_preemptions_total lmkit_engine_prompt_tokens_total lmkit_output_tokens_total
        lmkit_engine_output_tokens_total lmkit_prefix_cache_queries_total lmkit_prefix_cache_hits_total
        lmkit_time_to_first_token_seconds_bucket lmkit_inter_token_latency_seconds_bucket lmkit_request_seconds_bucket
        lmkit_requests_finished_total lmkit_prompt_tokens_total lmkit_http_requests_total
        lmkit_request_queue_seconds_bucket lmkit_request_prefill_seconds_bucket lmkit_request_decode_seconds_bucket
    """
    for name in names.split():
        assert f"\n{name}" in text, name
    assert 'lmkit_output_tokens_total{model_name="scripted"} 4.0' in text
    assert 'lmkit_time_to_first_token_seconds_count{model_name="scripted"} 1.0' in text
    assert 'lmkit_http_requests_total{route="/v1/chat/completions",status="200"} 1.0' in text
