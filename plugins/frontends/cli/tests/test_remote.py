"""`lmkit chat --url`: a server's answers, and what servers say instead."""

from __future__ import annotations

import json
import sys
from io import StringIO
from typing import Any

import httpx
import lmkit_cli
import pytest
from lmkit.api import ConfigError, EngineError
from lmkit_cli import remote as module
from lmkit_cli.remote import Remote, RemoteError

MODELS = {"object": "list", "data": [{"id": "m"}]}
CHUNKS = [
    {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]},
    {"choices": [{"index": 0, "delta": {"reasoning_content": "Hm."}}]},
    {"choices": [{"index": 0, "delta": {"content": "Good "}}]},
    {"choices": [{"index": 0, "delta": {"content": "day"}, "finish_reason": "stop"}], "usage": None},
    {
        "choices": [],
        "usage": {"prompt_tokens": 5, "completion_tokens": 4, "prompt_tokens_details": {"cached_tokens": 2}},
    },
]


def events(*chunks: Any) -> httpx.Response:
    text = "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks) + "data: [DONE]\n\n"
    return httpx.Response(200, text=text, headers={"content-type": "text/event-stream"})


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> tuple[list[httpx.Request], dict[str, httpx.Response]]:
    """What was asked, and the answers by path: a server without a socket."""
    asked: list[httpx.Request] = []
    answers = {"/v1/models": httpx.Response(200, json=MODELS), "/v1/chat/completions": events(*CHUNKS)}

    def handle(request: httpx.Request) -> httpx.Response:
        asked.append(request)
        return answers[request.url.path]

    made = httpx.Client

    def client(**kwargs: Any) -> httpx.Client:
        return made(transport=httpx.MockTransport(handle), **kwargs)

    monkeypatch.setattr(module.httpx, "Client", client)
    return asked, answers


def test_an_answer_is_the_sum_of_its_changes(server: Any) -> None:
    asked, _ = server
    with Remote("http://host:1/v1/", "secret", {"temperature": 0.5}) as remote:
        changes = list(remote.answers([{"role": "user", "content": "hi"}], True))
    assert "".join(c.content for c in changes) == "Good day"
    assert "".join(c.reasoning for c in changes) == "Hm."
    usage = changes[-1].finish.usage  # type: ignore[union-attr]
    assert (usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens) == (5, 4, 2)
    body = json.loads(asked[1].content)
    assert body == {
        "model": "m", "messages": [{"role": "user", "content": "hi"}], "stream": True, "temperature": 0.5,
        "stream_options": {"include_usage": True}, "chat_template_kwargs": {"enable_thinking": True},
    }  # fmt: skip
    assert {request.headers["authorization"] for request in asked} == {"Bearer secret"}


def test_only_what_was_given_is_sent(server: Any) -> None:
    asked, _ = server
    with Remote("http://host", model="other") as remote:
        list(remote.answers([], None))
    assert set(json.loads(asked[0].content)) == {"model", "messages", "stream", "stream_options"}
    assert "authorization" not in asked[0].headers


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (httpx.Response(400, json={"error": {"message": "too long"}}), "too long"),
        (httpx.Response(502, text="<html>"), "HTTP 502"),
        (httpx.Response(400, json={"error": "no"}), "HTTP 400"),
        (httpx.Response(200, text="hello", headers={"content-type": "text/plain"}), "broke off"),
        (events({"error": {"message": "the engine is gone"}}), "engine is gone"),
        (events({"error": "gone"}), "gone"),
        (events([]), "broke off"),
        (events({"usage": {"x": 1}}), "broke off"),
        (events({"choices": [3]}), "broke off"),
    ],
)
def test_what_is_said_instead(server: Any, answer: httpx.Response, words: str) -> None:
    _, answers = server
    answers["/v1/chat/completions"] = answer
    with pytest.raises(RemoteError, match=words), Remote("http://host") as remote:
        list(remote.answers([], None))


@pytest.mark.parametrize("answer", [httpx.Response(200, json={}), httpx.Response(404), httpx.Response(200, text="x")])
def test_who_is_no_server_is_found_at_once(server: Any, answer: httpx.Response) -> None:
    _, answers = server
    answers["/v1/models"] = answer
    with pytest.raises(EngineError, match="does not say what it serves"), Remote("http://host"):
        pass


def test_a_key_that_lacks(server: Any) -> None:
    _, answers = server
    answers["/v1/models"] = httpx.Response(401)
    with pytest.raises(EngineError, match="wants a key") as found, Remote("http://host"):
        pass
    assert "--api-key" in found.value.fix


def test_no_address() -> None:
    with pytest.raises(ConfigError, match="no address"):
        Remote("host:8000")


def test_a_conversation(server: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    asked, answers = server
    monkeypatch.setattr(sys, "stdin", StringIO("hi\n/think\nagain\n"))
    assert lmkit_cli.run(("chat", "--url", "http://host", "--temperature", "0", "--system", "Be brief.")) == 0
    assert capsys.readouterr().out.count("Good day") == 2
    messages = json.loads(asked[-1].content)["messages"]
    assert [m["role"] for m in messages] == ["system", "user", "assistant", "user"]
    answers["/v1/chat/completions"] = httpx.Response(400, json={"error": {"message": "too long"}})
    monkeypatch.setattr(sys, "stdin", StringIO("hi\n"))
    assert lmkit_cli.run(("chat", "--url", "http://host")) == 0
    assert "too long" in capsys.readouterr().out


def test_settings_of_an_engine_are_refused(server: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert lmkit_cli.run(("chat", "m", "--url", "http://host", "--max-rows", "4")) != 0
    assert "sched.max_rows" in capsys.readouterr().err
