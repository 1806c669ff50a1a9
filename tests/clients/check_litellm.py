"""litellm: the library by each of its ways to such a server, and its proxy in front of one."""

from __future__ import annotations

import gc
import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from secrets import token_hex
from typing import Any

import litellm
import openai
import pytest

SUM = [{"role": "user", "content": "What is 12 + 30?"}]
KEY = "sk-" + token_hex(32)  # of the proxy
WAYS = ["openai/", "hosted_vllm/", "anthropic/", "ollama_chat/"]


@pytest.fixture(autouse=True)
def _collected_between_tests() -> Iterator[None]:
    """litellm leaves streams open, and httpcore closes those that are collected: where its pool allocates meanwhile, it
    waits for a lock that it holds."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.fixture(params=WAYS)
def options(url: str, request: pytest.FixtureRequest) -> dict[str, Any]:
    base = f"{url}/v1" if request.param in ("openai/", "hosted_vllm/") else url
    return {"model": f"{request.param}demo", "api_base": base, "api_key": "none", "temperature": 0,
            "max_tokens": 200, "num_retries": 0}  # fmt: skip


def test_completion_and_the_next_turn(options: dict[str, Any]) -> None:
    message = litellm.completion(messages=SUM, **options).choices[0].message
    assert "42" in message.content
    again = [*SUM, message, {"role": "user", "content": "What is 20 + 3?"}]
    assert "23" in litellm.completion(messages=again, **options).choices[0].message.content


def test_completion_streamed(options: dict[str, Any]) -> None:
    parts = litellm.completion(messages=SUM, stream=True, **options)
    said = "".join(part.choices[0].delta.content or "" for part in parts)
    assert said == litellm.completion(messages=SUM, **options).choices[0].message.content


@pytest.mark.parametrize("stream", [False, True])
def test_tools(options: dict[str, Any], weather: dict[str, Any], stream: bool) -> None:
    messages = [{"role": "user", "content": "What is the weather in Berlin?"}]
    tools = [{"type": "function", "function": weather}]
    answer = litellm.completion(messages=messages, tools=tools, stream=stream, **options)
    if stream:
        answer = litellm.stream_chunk_builder(list(answer), messages=messages)
    message = answer.choices[0].message
    (call,) = message.tool_calls
    assert call.function.name == "get_weather"
    result = {"role": "tool", "tool_call_id": call.id, "name": "get_weather", "content": '{"temperature": 21}'}
    assert litellm.completion(messages=[*messages, message, result], tools=tools, **options).choices[0].message.content


def test_cache_control(url: str) -> None:
    """A mark that clients of other models set."""
    content = [{"type": "text", "text": "What is 12 + 30?", "cache_control": {"type": "ephemeral"}}]
    answer = litellm.completion(
        model="openai/demo", api_base=f"{url}/v1", api_key="none", messages=[{"role": "user", "content": content}]
    )
    assert answer.choices[0].message.content


@pytest.mark.parametrize("stream", [False, True])
def test_responses(url: str, stream: bool) -> None:
    answer = litellm.responses(
        model="openai/demo",
        api_base=f"{url}/v1",
        api_key="none",
        input="What is 12 + 30?",
        temperature=0,
        stream=stream,
    )
    if stream:
        answer = list(answer)[-1].response
    assert "42" in answer.output[0].content[0].text


def test_text_completion(url: str) -> None:
    answer = litellm.text_completion(
        model="text-completion-openai/demo", api_base=f"{url}/v1", api_key="none", prompt="Hello", max_tokens=8
    )
    assert answer.choices[0].text


def test_embedding(embed_url: str) -> None:
    answer = litellm.embedding(model="openai/demo", api_base=f"{embed_url}/v1", api_key="none", input=["a", "b"])
    assert len(answer.data) == 2


@pytest.fixture(scope="module")
def proxy(url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    config = tmp_path_factory.mktemp("proxy") / "config.yaml"
    config.write_text(
        "model_list:\n  - model_name: demo\n    litellm_params:\n      model: hosted_vllm/demo\n"
        f"      api_base: {url}/v1\n      api_key: none\n"
    )
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    program = str(Path(sys.executable).with_name("litellm"))
    command = [program, "--config", str(config), "--host", "127.0.0.1", "--port", str(port)]
    output = config.with_name("output").open("w")
    process = subprocess.Popen(
        command, stdout=output, stderr=subprocess.STDOUT, env=os.environ | {"LITELLM_MASTER_KEY": KEY}
    )
    address = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + 600  # it imports for a minute where the machine is busy
        while True:
            assert time.monotonic() < deadline, Path(output.name).read_text()
            assert process.poll() is None, Path(output.name).read_text()
            try:
                urllib.request.urlopen(f"{address}/health/liveliness", timeout=5).close()
                break
            except OSError:
                time.sleep(0.2)
        yield address
    finally:
        process.terminate()
        process.wait()
        output.close()


@pytest.mark.parametrize("stream", [False, True])
def test_proxy_chat(proxy: str, stream: bool) -> None:
    client = openai.OpenAI(base_url=proxy, api_key=KEY, max_retries=0)
    answer = client.chat.completions.create(model="demo", messages=SUM, temperature=0, stream=stream)
    if stream:
        text = "".join(part.choices[0].delta.content or "" for part in answer)
    else:
        text = answer.choices[0].message.content
    assert "42" in text


def test_proxy_responses(proxy: str) -> None:
    client = openai.OpenAI(base_url=proxy, api_key=KEY, max_retries=0)
    assert "42" in client.responses.create(model="demo", input="What is 12 + 30?", temperature=0).output_text
