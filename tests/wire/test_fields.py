"""The tables of fields (docs/reference/fields.md) say what happens: each field is sent to each route."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from lmkit.api import PoolerInfo
from lmkit_dialect_batches.dialect import Batches
from lmkit_http.app import build_app
from lmkit_http.settings import ServerSettings
from lmkit_testing.serving import scripted

TABLE = Path(__file__).parents[2] / "docs" / "reference" / "fields.md"
Body = dict[str, Any]
States = dict[str, dict[str, str]]  # route -> field -> state
FUNCTION = {"name": "f", "parameters": {"type": "object"}}
TOOL = {"type": "function", "function": FUNCTION}
FORMAT = {"type": "json_schema", "schema": {"type": "object"}}
INPUT = {"input": "x"}
PAIR = {"queries": "x", "documents": "y"}
TEXTS = {"query": "x", "documents": ["y"]}
SAID: Body = {"messages": [{"role": "user", "content": "x"}]}
UPLOAD: Body = {"filename": "a.jsonl", "bytes": 2, "purpose": "batch", "mime_type": "application/jsonl"}
# what each route needs
LEAST: dict[str, Body] = {
    "/v1/chat/completions": SAID,
    "/v1/completions": {"prompt": "x"},
    "/v1/chat/completions/batch": {"messages": [SAID["messages"]]},
    "/v1/messages": SAID | {"max_tokens": 9, "model": "scripted"},
    "/v1/messages/count_tokens": SAID | {"model": "scripted"},
    "/v1/responses": {"input": "x"},
    "/v1/responses/input_tokens": {"input": "x"},
    "/v1/responses/compact": {"input": "x"},
    "/inference/v1/generate": {"token_ids": [1], "sampling_params": {"max_tokens": 2}},
    "/api/chat": SAID | {"model": "scripted"},
    "/api/generate": {"model": "scripted", "prompt": "x"},
    "/api/embed": {"model": "scripted", "input": "x"},
    "/api/embeddings": {"model": "scripted", "prompt": "x"},
    **dict.fromkeys(("/v1/embeddings", "/pooling", "/classify"), INPUT),
    **dict.fromkeys(("/score", "/v1/score"), PAIR),
    **dict.fromkeys(("/rerank", "/v1/rerank", "/v2/rerank"), TEXTS),
    "/v1/batches": {"endpoint": "/v1/completions", "completion_window": "24h"},
    "/v1/uploads": UPLOAD,
    "/v1/uploads/{id}/complete": {},
}
COMPLETE = "/v1/uploads/{id}/complete"
TASKS = {"/classify": "classify"}  # other routes of pooling take embeddings

# a value that says something; 1 where it is left out
SAMPLES: Body = {
    "model": "scripted", "messages": [{"role": "user", "content": "y"}], "prompt": "y", "echo": True, "stop": "z",
    "stream": True, "logit_bias": {"1": 1}, "user": "u", "stop_token_ids": [1], "ignore_eos": True, "store": True,
    "include_stop_str_in_output": True, "no_stop_trim": True, "include_usage": True,
    "continuous_usage_stats": True, "skip_special_tokens": False, "cache_salt": "s", "return_token_ids": True,
    "resume": True, "vllm_xargs": {"no_repeat_ngram": {"size": 3}}, "truncation_side": "left",
    "return_tokens_as_token_ids": True, "request_id": "r", "session_id": "s", "bad_words": ["no"],
    "allowed_token_ids": [1], "response_format": {"type": "text"}, "structured_outputs": {"regex": "a"},
    "tools": [TOOL], "parallel_tool_calls": True, "metadata": {"a": "b"}, "safety_identifier": "s",
    "prompt_cache_key": "k", "prompt_cache_retention": "24h", "service_tier": "flex", "include_reasoning": True,
    "use_beam_search": True, "add_generation_prompt": True, "add_special_tokens": True, "input": "y", "system": "s",
    "stop_in": "output", "top_p": 0.5, "min_p": 0.5, "output_mode": "tokens", "token_ids": [2],
    "context_management": {"edits": [1]}, "cache_control": {"type": "ephemeral"},
    "inference_geo": "eu", "speed": "fast", "betas": ["b"],
    "stop_sequences": ["z"], "output_config": {"format": FORMAT}, "output_format": FORMAT,
    "thinking": {"type": "enabled", "budget_tokens": 1024}, "instructions": "i", "reasoning": {"effort": "low"},
    "enable_thinking": False, "normalize": False, "embed_dtype": "float16", "endianness": "big", "texts": ["z"],
    "raw_scores": True, "return_text": True, "use_activation": True, "effort": "low", "enabled": True,
    "exclude": True, "type": "enabled",
    "text": {"format": {"type": "text"}}, "truncation": "auto", "include": ["message.output_text.logprobs"],
    "background": True, "prompt_cache_options": {"a": 1}, "chat_template_kwargs": {"x": 1},
    "documents": [{"text": "x"}], "reasoning_effort": "low", "keep_alive": "5m", "format": "json", "think": True,
    "raw": True, "truncate": True, "encoding_format": "base64", "activation": True, "return_documents": True,
    "text_1": "a", "text_2": "b", "queries": "q", "query": "q", "task": "embed", "endpoint": "/v1/chat/completions",
    "filename": "b.jsonl", "bytes": 3, "purpose": "batch", "mime_type": "text/plain",
    "md5": "99914b932bd37a50b983c5e7c90ae93b", "expires_after": {"anchor": "created_at", "seconds": 3600},
    "completion_window": "24h", "output_expires_after": {"anchor": "created_at", "seconds": 3600},
}  # fmt: skip
ON_MESSAGES: Body = {"tools": [{"name": "f", "input_schema": {"type": "object"}}], "tool_choice": {"type": "auto"}}
ON_RESPONSES: Body = {"tools": [{"type": "function", **FUNCTION}], "stream_options": {"include_obfuscation": True}}
ON_DOCUMENTS: Body = {"documents": ["z"]}
# the same, where it is something else on some route
ON: dict[str, Body] = {
    "/v1/chat/completions": {"logprobs": True},
    "/v1/chat/completions/batch": {"logprobs": True, "messages": [SAID["messages"]] * 2},
    "/api/chat": {"logprobs": True},
    "/api/generate": {"logprobs": True},
    **dict.fromkeys(
        ("/v1/messages", "/v1/messages/count_tokens"),
        ON_MESSAGES,
    ),
    **dict.fromkeys(
        ("/v1/responses", "/v1/responses/input_tokens", "/v1/responses/compact"),
        ON_RESPONSES,
    ),
    **dict.fromkeys(("/score", "/v1/score", "/rerank", "/v1/rerank", "/v2/rerank"), ON_DOCUMENTS),
}
ENDS = [{"role": "assistant", "content": "x"}]
RANKED: Body = {"documents": None, "texts": ["z"]}
# what a field needs beside it; None: what it stands without
BESIDE: dict[str, Body] = {
    "length_penalty": {"use_beam_search": True}, "early_stopping": {"use_beam_search": True},
    "stream_options": {"stream": True}, "top_logprobs": {"logprobs": True}, "tool_choice": {"tools": [TOOL]},
    "continue_final_message": {"messages": ENDS},
    "embed_dtype": {"encoding_format": "base64"}, "endianness": {"encoding_format": "base64"},
    "texts": {"documents": None}, "raw_scores": RANKED, "return_text": RANKED,
    "truncate": RANKED,
    "text_1": {"queries": None}, "text_2": {"documents": None}, "output_mode": {},
}  # fmt: skip
SAMPLES |= {
    "length_penalty": 2, "early_stopping": "never", "stream_options": {"include_usage": True}, "tool_choice": "auto",
    "continue_final_message": True,
}  # fmt: skip
# honoured by templates that read them, which the one of the tests does not
READ = {"documents": "template"}
# the same, and dropped by all others
SWITCHES = {"chat_template_kwargs": "chat_template_kwargs.x", "reasoning_effort": "reasoning_effort",
            "reasoning": "reasoning.effort", "enable_thinking": "reasoning_effort",
    "thinking.type": "reasoning_effort",
            "reasoning.effort": "reasoning_effort", "reasoning.enabled": "reasoning_effort"}  # fmt: skip


CONVERSED = ("messages", "add_generation_prompt", "continue_final_message")


def tables() -> States:
    found: States = {}
    routes: list[str] = []
    for line in TABLE.read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("| field | `"):
            routes = [cell.strip("`") for cell in cells[1:]]
        elif not line.startswith("|"):
            routes = []
        elif line.startswith("| `"):
            for route, state in zip(routes, cells[1:], strict=False):
                if state:
                    found.setdefault(route, {})[cells[0].strip("`")] = state
    return found


TABLES = tables()


def body_of(route: str, field: str, state: str) -> Body:
    part, _, name = field.rpartition(".")
    unread = state == "refused" or (state == "dropped" and isinstance(SAMPLES.get(name, True), bool))
    value = {"a": 1} if unread else ON.get(route, {}).get(name, SAMPLES.get(name, 1))
    beside = BESIDE.get(name, {}) if state != "refused" else {}
    if "responses" in route or "messages" in route:
        beside = {k: ON[route].get(k, v) for k, v in beside.items() if k != "logprobs"}
    if name in CONVERSED and route in ("/v1/embeddings", "/pooling", "/classify"):
        beside = {"input": None, "messages": SAID["messages"] if name == "add_generation_prompt" else ENDS}
    if route == "/api/embed":
        beside = {}
    if "batch" in route and "messages" in beside:
        beside = {"messages": [ENDS]}
    least = LEAST[route]
    if part:
        return least | BESIDE.get(part, {}) | {part: {**least.get(part, {}), **beside, name: value}}
    return {k: v for k, v in {**least, **beside, name: value}.items() if v is not None}


def wrong(route: str, field: str, state: str, answer: httpx.Response) -> str:
    """What is not as the table says; "": nothing."""
    named = answer.headers.get("x-lmkit-warnings", "").removeprefix("dropped: ").split(", ")
    if state == "refused":
        said = answer.status_code == 400 and field in answer.text
    elif field in READ and ("chat" in route or "responses" in route):
        said = READ[field] in answer.text
    elif field in SWITCHES and state == "works" and ("chat" in route or "responses" in route):
        said = answer.status_code == 200 and SWITCHES[field] in named
    else:
        said = answer.status_code == 200 and (field in named) == (state == "dropped")
    return "" if said else f"{field}: {state}, but {answer.status_code} {named} {answer.text[:200]}"


@pytest.mark.one_in(2)
@pytest.mark.parametrize("route", TABLES)
async def test_each_field_does_what_the_table_says(route: str, tmp_path: Path) -> None:
    llm = scripted("ok")
    if (LEAST[route].keys() & {"input", "query", "queries"} and "responses" not in route) or route == "/api/embeddings":
        info = PoolerInfo(TASKS.get(route, "embed"), 4)  # type: ignore[arg-type]
        llm.client.facts = msgspec.structs.replace(llm.facts, pooler=info)  # type: ignore[misc]
    dialects = [Batches(str(tmp_path))] if route in ("/v1/batches", "/v1/uploads", COMPLETE) else None
    transport = httpx.ASGITransport(build_app(llm, dialects=dialects))
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        found = []
        for field, state in TABLES[route].items():
            body = body_of(route, field, state)
            if route == "/v1/batches":
                files = {"file": ("a.jsonl", b"{}"), "purpose": (None, "batch")}
                body["input_file_id"] = (await client.post("/v1/files", files=files)).json()["id"]
            path = route
            if route == COMPLETE:
                id = (await client.post("/v1/uploads", json=UPLOAD)).json()["id"]
                part = (await client.post(f"/v1/uploads/{id}/parts", files={"data": ("a", b"{}")})).json()["id"]
                body, path = body | {"part_ids": [part]}, route.format(id=id)
            if field == "previous_response_id":
                body[field] = (await client.post("/v1/responses", json={"input": "x"})).json()["id"]
            found.append(wrong(route, field, state, await client.post(path, json=body)))
    assert "\n".join(filter(None, found)) == ""


@pytest.mark.parametrize(("route", "part"), [("/api/chat", "options"), ("/inference/v1/generate", "sampling_params")])
async def test_a_field_of_a_part_is_named_with_it(route: str, part: str) -> None:
    body = LEAST[route] | {part: {**LEAST[route].get(part, {}), "nobody_knows": 1}}
    answers = []
    for settings in (ServerSettings(unknown_fields="refuse"), None):
        transport = httpx.ASGITransport(build_app(scripted("ok"), settings))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            answers.append(await client.post(route, json=body))
    refused, dropped = answers
    assert (refused.status_code, dropped.status_code) == (400, 200)
    assert f"{part}.nobody_knows" in refused.text
    assert dropped.headers["x-lmkit-warnings"] == f"dropped: {part}.nobody_knows"


def test_every_route_is_in_a_table() -> None:
    assert set(TABLES) == set(LEAST)
