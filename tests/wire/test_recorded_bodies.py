"""Bodies as routers, gateways and applications send them, without their texts: each is answered.

They were recorded from vllm-router 0.1.17, sglang-router 0.3.2, LiteLLM 1.75, aider 0.86.1, langchain-ollama 1.1.0 and
ollama 0.6.3; those of Home Assistant and Open WebUI have the fields that their sources set.
"""

from __future__ import annotations

from typing import Any

import httpx
import msgspec
import pytest
from lmkit.api import PoolerInfo
from lmkit_http.app import build_app
from lmkit_http.settings import ServerSettings
from lmkit_testing.serving import scripted

SAID = [{"role": "user", "content": "x"}]
FUNCTION = {"name": "f", "description": "d", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}}
TOOL = {"type": "function", "function": FUNCTION}
CALLED = [
    *SAID, {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {"a": 1}}}]},
    {"role": "tool", "content": "3"},
]  # fmt: skip
VLLM_ROUTER = {
    "logprobs": False, "no_stop_trim": False, "ignore_eos": False, "continue_final_message": False,
    "skip_special_tokens": True, "separate_reasoning": True, "stream_reasoning": True, "return_hidden_states": False,
    "include_reasoning": True,
}  # fmt: skip
SGLANG_ROUTER = {name: value for name, value in VLLM_ROUTER.items() if name != "include_reasoning"}
COMPLETION = {
    "stream": False, "echo": False, "no_stop_trim": False, "ignore_eos": False, "skip_special_tokens": True,
    "return_hidden_states": False,
}  # fmt: skip
STREAMED = {"stream": True, "stream_options": {"include_usage": True}, "tools": [TOOL], "tool_choice": "auto"}
LANGCHAIN = {
    "mirostat": 0, "mirostat_eta": 0.1, "mirostat_tau": 5.0, "num_ctx": 2048, "num_gpu": 1, "num_thread": 2,
    "num_predict": 128, "repeat_last_n": 64, "repeat_penalty": 1.1, "temperature": 0.8, "seed": 1, "stop": ["z"],
    "tfs_z": 1.0, "top_k": 40, "top_p": 0.9,
}  # fmt: skip
EMBED_OPTIONS = dict.fromkeys(LANGCHAIN) | {"mirostat": 0, "num_ctx": 2048, "repeat_last_n": 64}
WEBUI = {
    "temperature": 0.7, "top_p": 0.9, "min_p": 0.0, "seed": 3, "mirostat": 0, "mirostat_eta": 0.1, "mirostat_tau": 3.0,
    "num_ctx": 8192, "num_batch": 512, "num_keep": 24, "num_predict": 64000, "repeat_last_n": 64, "repeat_penalty": 1.1,
    "tfs_z": 1.0, "top_k": 40, "use_mmap": True, "use_mlock": False, "num_thread": 8, "num_gpu": 99, "num_gqa": 8,
    "typical_p": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0,
}  # fmt: skip
CHAT, COMPLETIONS, OLLAMA = "/v1/chat/completions", "/v1/completions", "/api/chat"

BODIES: dict[str, tuple[str, dict[str, Any]]] = {
    "vllm-router chat": (CHAT, {"messages": SAID, "stream": False, **VLLM_ROUTER}),
    "vllm-router stream": (CHAT, {"messages": SAID, **VLLM_ROUTER, **STREAMED}),
    "vllm-router render": (CHAT + "/render", {"messages": SAID, **VLLM_ROUTER, **STREAMED}),
    "vllm-router completion": (COMPLETIONS, {"prompt": "x", "max_tokens": 5, **COMPLETION}),
    "vllm-router completion render": (COMPLETIONS + "/render", {"prompt": "x", "max_tokens": 5, **COMPLETION}),
    "vllm-router rerank": (
        "/v1/rerank",
        {"query": "x", "documents": ["a"], "top_k": None, "return_documents": True, "rid": None, "user": None},
    ),
    "sglang-router chat": (CHAT, {"messages": SAID, "stream": False, **SGLANG_ROUTER}),
    "sglang-router stream": (CHAT, {"messages": SAID, **SGLANG_ROUTER, **STREAMED}),
    "sglang-router responses": (
        "/v1/responses",
        {"input": "x", "store": True, "stream": None, "temperature": 1.0, "top_p": 1.0, "priority": 0, "top_k": -1,
         "min_p": 0.0, "repetition_penalty": 1.0},
    ),
    "sglang client": (
        CHAT,
        {"messages": SAID, "rid": "r", "bootstrap_host": "h", "bootstrap_port": 1, "bootstrap_room": 2,
         "lora_path": None, "session_params": None, "data_parallel_rank": 0, "return_cached_tokens_details": False,
         "use_audio_in_video": False, "max_dynamic_patch": None, "custom_logit_processor": None},
    ),
    "litellm": (CHAT, {"messages": SAID, "max_tokens": 32000, "temperature": 0.5, "top_k": 4, "stream": True,
                       "stream_options": {"include_usage": True}}),
    "litellm ollama_chat": (OLLAMA, {"messages": SAID, "options": {"temperature": 0.5, "num_predict": 32000}}),
    "litellm ollama": (
        "/api/generate",
        {"prompt": "x", "options": {"temperature": 0.5, "num_predict": 32000}, "stream": False, "images": []},
    ),
    "aider": (CHAT, {"messages": SAID, "stream": True, "temperature": 0}),
    "langchain-ollama": (OLLAMA, {"stream": True, "options": LANGCHAIN, "keep_alive": "5m", "messages": SAID,
                                  "tools": [], "think": False}),
    "langchain-ollama tools": (OLLAMA, {"stream": True, "options": {}, "messages": CALLED, "tools": [TOOL]}),
    "langchain-ollama generate": (
        "/api/generate",
        {"stream": True, "options": LANGCHAIN, "format": "", "keep_alive": "5m", "prompt": "x", "think": False},
    ),
    "langchain-ollama embed": ("/api/embed", {"input": ["x"], "options": EMBED_OPTIONS}),
    "home assistant": (OLLAMA, {"messages": SAID, "tools": [TOOL], "stream": True, "keep_alive": "-1s",
                                "options": {"num_ctx": 8192}, "think": False, "format": None}),
    "open webui ollama": (OLLAMA, {"messages": SAID, "options": WEBUI, "keep_alive": -1, "think": True}),
    "open webui openai": (
        CHAT,
        {"messages": SAID, "stream": True, "stream_options": {"include_usage": True}, "temperature": 0.7, "top_p": 0.9,
         "min_p": 0.0, "max_tokens": 64000, "frequency_penalty": 0.0, "presence_penalty": 0.0, "seed": 3, "stop": ["z"],
         "reasoning_effort": "none", "chat_id": "c", "session_id": "s", "metadata": {"a": {"b": [1]}},
         "chat_template_kwargs": {"enable_thinking": False}},
    ),
}  # fmt: skip


@pytest.mark.parametrize("unknown_fields", ["warn", "refuse"])
@pytest.mark.parametrize("name", BODIES)
async def test_a_recorded_body_is_answered(name: str, unknown_fields: str) -> None:
    """The strict mode is for fields that nobody knows; what these programs send is known but for the names below."""
    route, body = BODIES[name]
    llm = scripted("ok", max_length=2000)
    if "embed" in route or "rerank" in route:
        llm.client.facts = msgspec.structs.replace(llm.facts, pooler=PoolerInfo("embed", 4))  # type: ignore[misc]
    app = build_app(llm, ServerSettings(unknown_fields=unknown_fields))  # type: ignore[arg-type]
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as client:
        answer = await client.post(route, json={"model": "scripted", **body})
    unknown = {"sglang-router responses", "open webui openai"} if unknown_fields == "refuse" else set()
    assert answer.status_code == (400 if name in unknown else 200), answer.text
    assert '"error":{' not in answer.text or name in unknown


async def test_what_was_left_out_is_named() -> None:
    llm = scripted("ok", max_length=2000)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(build_app(llm)), base_url="http://localhost") as client:
        answer = await client.post(OLLAMA, json={"model": "scripted", **BODIES["langchain-ollama"][1]})
    named = answer.headers["x-lmkit-warnings"]
    options = ", ".join(f"options.{name}" for name in ("num_ctx", "num_gpu", "num_thread", "repeat_last_n"))
    assert named == f"dropped: keep_alive, {options}, think"  # the template of the scripted model has no switch
    (request,) = llm.client.requests  # type: ignore[attr-defined]
    params = request.params
    assert (params.repetition_penalty, params.top_k, params.max_tokens, params.stop) == (1.1, 40, 128, ("z",))
