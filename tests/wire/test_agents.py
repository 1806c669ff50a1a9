"""Requests as coding agents and other programs send them: recorded, with their texts replaced (clients/requests)."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from lmkit_dialect_anthropic.dialect import Anthropic
from lmkit_dialect_ollama.dialect import Ollama
from lmkit_dialect_openai.dialect import OpenAI
from lmkit_dialect_responses.dialect import Responses
from lmkit_http.app import build_app
from lmkit_http.settings import ServerSettings
from lmkit_testing.serving import ServedLLM, scripted

FILES = sorted((Path(__file__).parents[1] / "clients" / "requests").glob("*.json"))
CONTEXT = 1 << 17  # tokens, which are bytes here
DIALECTS: tuple[Callable[[], Any], ...] = (OpenAI, Responses, Anthropic, Ollama)
# what the last event of a stream says
ENDS = {"/v1/chat/completions": "[DONE]", "/v1/responses": "response.completed", "/v1/messages": "message_stop",
        "/api/chat": '"done":true'}  # fmt: skip
# what is left out of each request, besides what changes nothing anywhere
LEFT_OUT = {
    "codex-additional-tools": {"client_metadata", "text.verbosity", "tools.format"},
    "codex-custom-tools": {"client_metadata", "text.verbosity", "tools.format", "tools.web_search"},
    "codex-unknown-model": {"client_metadata", "tools.web_search"},
    "claude-code": {"context_management", "metadata"},
}


def recorded(file: Path) -> dict[str, Any]:
    return json.loads(file.read_text())


async def post(llm: ServedLLM, request: dict[str, Any], body: dict[str, Any], **options: Any) -> httpx.Response:
    app = build_app(llm, ServerSettings(**options), [make() for make in DIALECTS])
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        return await client.post(request["path"], json=body, headers=request["headers"])


def prompt_of(llm: ServedLLM) -> str:
    return llm.text.decode_all(llm.client.requests[0].token_ids)


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
async def test_the_requests_of_agents_are_answered(file: Path, stream: bool) -> None:
    request, llm = recorded(file), scripted("Done.", max_length=CONTEXT)
    body = request["body"] | {"stream": stream}
    if not stream:
        body.pop("stream_options", None)
    answer = await post(llm, request, body)
    assert answer.status_code == 200, answer.text
    assert (ENDS[request["path"].partition("?")[0]] in answer.text) if stream else ("Done." in answer.text)
    left_out = set(answer.headers.get("x-lmkit-warnings", "").removeprefix("dropped: ").split(", "))
    assert LEFT_OUT.get(file.stem, set()) <= left_out
    assert not any("function" in name for name in left_out)


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
async def test_the_model_reads_every_tool_and_every_call(file: Path) -> None:
    request, llm = recorded(file), scripted("Done.", max_length=CONTEXT)
    answer = await post(llm, request, request["body"])
    assert answer.status_code == 200, answer.text
    prompt = prompt_of(llm)
    for name in tool_names(request["body"]):
        assert name in prompt, name


def tool_names(body: dict[str, Any]) -> list[str]:
    """The names of the tools that a client runs, wherever they are declared."""
    tools = [*body.get("tools", ())]
    if isinstance(body.get("input"), list):
        tools += [tool for item in body["input"] if item["type"] == "additional_tools" for tool in item["tools"]]
    members = [member for tool in tools if tool.get("type") == "namespace" for member in tool["tools"]]
    named = [tool.get("function", tool) for tool in [*tools, *members] if tool.get("type") != "web_search"]
    return [tool["name"] for tool in named if "name" in tool]


async def test_a_namespaced_tool_of_an_agent_is_named_back() -> None:
    request = recorded(next(file for file in FILES if file.stem == "codex-additional-tools"))
    said = '<tool_call>\n{"name": "clock__sleep", "arguments": {"duration_ms": 1}}\n</tool_call>'
    llm = scripted(said, max_length=CONTEXT)
    answer = await post(llm, request, request["body"] | {"stream": False})
    (call,) = answer.json()["output"]
    assert (call["type"], call["namespace"], call["name"]) == ("function_call", "clock", "sleep")


@pytest.mark.parametrize("file", [file for file in FILES if recorded(file)["path"].startswith("/v1/messages")],
                         ids=lambda file: file.stem)  # fmt: skip
async def test_tokens_of_an_agents_request_are_counted(file: Path) -> None:
    request, llm = recorded(file), scripted("Done.", max_length=CONTEXT)
    body = {name: value for name, value in request["body"].items() if name not in ("max_tokens", "stream")}
    answer = await post(llm, request | {"path": "/v1/messages/count_tokens?beta=true"}, body)
    assert answer.status_code == 200, answer.text
    assert answer.json()["input_tokens"] > 1000


async def test_the_strict_mode_refuses_unknown_fields_of_agents_by_name() -> None:
    request = recorded(next(file for file in FILES if file.stem == "codex-unknown-model"))
    answer = await post(scripted("x"), request, request["body"], unknown_fields="refuse")
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "client_metadata"
