"""Tools of MCP servers, real ones, over pipes and HTTP: called while an answer is made, allowed by a file alone."""

from __future__ import annotations

import asyncio
import json
import runpy
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import msgspec
import openai
import pytest
from lmkit.api import ConfigError, EngineDead
from lmkit_dialect_responses import answer, servers
from lmkit_dialect_responses.dialect import Responses
from lmkit_http.admission import Bucket
from lmkit_http.settings import ServerSettings
from lmkit_testing.serving import ServedLLM, listening, scripted

pytest.importorskip("mcp", reason="the library mcp is not installed")

from mcp import Client

PROGRAM = Path(__file__).parent / "mcp_server.py"
SERVER = runpy.run_path(str(PROGRAM))["server"]
STDIO = {"command": sys.executable, "args": [str(PROGRAM)]}
MCP: dict[str, Any] = {"type": "mcp", "server_label": "sums", "require_approval": "never"}
ASK: dict[str, Any] = {"model": "scripted", "input": "What is 17 + 25?", "tools": [MCP]}
TIME = {"type": "function", "name": "get_time", "parameters": {"type": "object", "properties": {}}}


def call(name: str, **arguments: Any) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {json.dumps(arguments)}}}\n</tool_call>'


def allowed(folder: Path, **listed: Any) -> str:
    """The file of allowed servers."""
    path = folder / "mcp.json"
    path.write_text(json.dumps({"mcpServers": listed}))
    return str(path)


def inside() -> Responses:
    """The same server in this process, which starts sooner."""

    class Inside(servers.Server):
        @asynccontextmanager
        async def _connection(self) -> AsyncIterator[Client]:
            async with Client(SERVER) as client:
                yield client

    dialect = Responses()
    dialect._servers = servers.Servers([Inside("sums", servers.Given(command="none"), 30.0)])
    return dialect


@asynccontextmanager
async def client_of(
    llm: ServedLLM, dialect: Responses, settings: ServerSettings | None = None
) -> AsyncIterator[openai.AsyncOpenAI]:
    """Once all servers are there."""
    async with (
        listening(llm, settings or ServerSettings(port=0), dialects=[dialect]) as url,
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="a", max_retries=0) as client,
    ):
        async with asyncio.timeout(60):
            while any(server.problem for server in dialect._servers._by_label.values()):
                await asyncio.sleep(0.02)
        yield client


def prompt_of(llm: ServedLLM, number: int) -> str:
    return llm.text.decode_all(llm.client.requests[number].token_ids)


def shapes(items: list[Any]) -> list[tuple[Any, ...]]:
    return [
        (item.type, item.status, item.name, item.output, item.error) if item.type == "mcp_call" else (item.type,)
        for item in items
    ]


async def test_a_call_is_made_and_the_answer_goes_on(tmp_path: Path) -> None:
    llm = scripted("<think>sum</think>" + call("add", a=17, b=25), "It is 42.", "And so.")
    async with client_of(llm, Responses(allowed(tmp_path, sums=STDIO))) as client:
        found = await client.responses.create(**ASK)
        assert found.output_text == "It is 42."
        assert shapes(found.output) == [
            ("mcp_list_tools",), ("reasoning",), ("mcp_call", "completed", "add", "42", None), ("message",),
        ]  # fmt: skip
        listing, made = found.output[0], found.output[2]
        assert listing.server_label == made.server_label == "sums"
        assert {tool.name for tool in listing.tools} == {"add", "fail", "die", "long"}
        assert json.loads(made.arguments) == {"a": 17, "b": 25}
        assert "Adds two numbers." in prompt_of(llm, 0)
        assert "42<|end|>" in prompt_of(llm, 1)
        assert found.usage.input_tokens == sum(len(r.token_ids) for r in llm.client.requests)
        # the conversation goes on: by its id, and by its items; the tools are not listed again
        later = await client.responses.create(**ASK | {"input": "And?"}, previous_response_id=found.id)
        assert shapes(later.output) == [("message",)]
        items = [{"role": "user", "content": ASK["input"]}, *(item.model_dump() for item in found.output)]
        await client.responses.create(**ASK | {"input": [*items, {"role": "user", "content": "And?"}]})
        assert prompt_of(llm, 2) == prompt_of(llm, 3)
        assert "42" in prompt_of(llm, 2)
        listed = [item.type async for item in client.responses.input_items.list(later.id, order="asc")]
        assert listed == ["message", "mcp_list_tools", "reasoning", "mcp_call", "message", "message"]


@pytest.mark.one_in(3)
@pytest.mark.parametrize("per_event", [1, 1000])
@pytest.mark.parametrize(
    "texts",
    [
        [call("add", a=1, b=2), "3"],
        [call("add", a=1, b=2) + call("add", a=3, b=4), "So.", "3 and 7"],
        ["Let me see." + call("fail", why="no luck"), call("add", a=1, b=2), "3"],
        [call("add", a=1, b=2) + call("get_time")],
        [call("add", a="x", b=2), "That was wrong."],
        ["Nothing to call."],
    ],
    ids=["one", "two at once", "one after the other", "the client's, too", "wrong arguments", "none"],
)
async def test_streamed_is_whole(texts: list[str], per_event: int) -> None:
    dialect = inside()
    body = ASK | {"tools": [MCP, TIME], "store": False}
    async with client_of(scripted(*texts, per_event=per_event), dialect) as client:
        whole = await client.responses.create(**body)
    dialect = inside()
    async with client_of(scripted(*texts, per_event=per_event), dialect) as client:
        events = [event async for event in await client.responses.create(**body, stream=True)]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    last = events[-1]
    assert last.type == "response.completed"

    def plain(items: Any) -> Any:
        return [{k: v for k, v in item.model_dump().items() if k not in ("id", "call_id")} for item in items]

    assert plain(last.response.output) == plain(whole.output)
    done = {event.output_index: event.item for event in events if event.type == "response.output_item.done"}
    assert [done[i] for i in sorted(done)] == last.response.output
    for i, item in enumerate(whole.output):
        kinds = [event.type for event in events if getattr(event, "output_index", None) == i]
        if item.type == "mcp_call":
            kinds = [kind for kind in kinds if not kind.endswith("arguments.delta")]
            ends = "completed" if item.error is None else "failed"
            assert kinds == [
                "response.output_item.added", "response.mcp_call.in_progress", "response.mcp_call_arguments.done",
                f"response.mcp_call.{ends}", "response.output_item.done",
            ]  # fmt: skip
        if item.type == "mcp_list_tools":
            assert kinds == [
                "response.output_item.added", "response.mcp_list_tools.in_progress",
                "response.mcp_list_tools.completed", "response.output_item.done",
            ]  # fmt: skip


async def test_calls_have_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(servers, "MAX_RESULT", 100)
    endless = scripted(call("add", a=1, b=2))
    async with client_of(endless, inside()) as client:
        found = await client.responses.create(**ASK, max_tool_calls=2)
        calls = [item for item in found.output if item.type == "mcp_call"]
        assert [item.output for item in calls[:2]] == ["3", "3"]
        assert len(endless.client.requests) == 3
        assert "add" not in prompt_of(endless, 2).rpartition("<|end|>")[2]  # it is not offered any more
        monkeypatch.setattr(answer, "MAX_CALLS", 1)
        before = len(endless.client.requests)
        await client.responses.create(**ASK)
        assert len(endless.client.requests) == before + 2
        none = await client.responses.create(**ASK, max_tool_calls=0)
        assert "mcp_list_tools" not in {item.type for item in none.output}
        short = await client.responses.create(**ASK, max_output_tokens=len(call("add", a=1, b=2)) + 1)
        assert (short.status, short.incomplete_details.reason) == ("incomplete", "max_output_tokens")
        assert short.output[-1].output == "3"
    llm = scripted(call("long", num=1000), "So.")
    async with client_of(llm, inside()) as client:
        found = await client.responses.create(**ASK)
        said = "the tool answered with 1000 characters; at most 100 are read here"
        assert found.output[1].error.content == [{"type": "text", "text": said}]
        assert said in prompt_of(llm, 1)


@pytest.mark.full
@pytest.mark.parametrize("stream", [False, True])
async def test_no_call_is_made_in_a_turn_with_a_call_that_was_cut(stream: bool) -> None:
    """Cut by the model's own end, and by the limit of tokens; also where an earlier call of the turn is complete."""
    whole = call("add", a=17, b=25)
    for script, limit in ((whole[:-20], None), (whole, len(whole) - 20), (whole + call("add", a=1, b=2)[:-20], None)):
        llm = scripted(script, "It is 42.")
        async with client_of(llm, inside()) as client:
            body = ASK | {"tools": [MCP], "max_output_tokens": limit}
            found = await client.responses.create(**body, stream=stream)
            if stream:
                found = [event async for event in found][-1].response
        assert len(llm.client.requests) == 1
        made = [item for item in found.output if item.type == "mcp_call"]
        assert made
        assert all((item.status, item.output) == ("incomplete", None) for item in made)


async def test_a_server_that_dies_comes_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(servers, "_PAUSES", (0.01, 0.1))
    llm = scripted(call("die"), "So.", call("add", a=1, b=2), "3")
    dialect = Responses(allowed(tmp_path, sums=STDIO))
    async with client_of(llm, dialect) as client:
        found = await client.responses.create(**ASK)
        assert (found.output_text, found.output[1].status) == ("So.", "failed")
        assert found.output[1].error
        refused = set()
        async with asyncio.timeout(60):
            while True:
                try:
                    again = await client.responses.create(**ASK)
                    break
                except openai.APIStatusError as error:
                    refused.add((error.status_code, error.code))
                    await asyncio.sleep(0.05)
        assert (again.output_text, again.output[1].output) == ("3", "3")
        assert refused <= {(424, "mcp-server")}


async def test_an_engine_that_dies_during_a_call() -> None:
    llm = scripted(call("add", a=1, b=2), "So.")
    dialect = inside()
    async with client_of(llm, dialect) as client:
        server = dialect._servers._by_label["sums"]
        before = server.call

        async def dying(name: str, arguments: str) -> Any:
            found = await before(name, arguments)
            llm.client.kill()
            return found

        server.call = dying  # type: ignore[method-assign]
        with pytest.raises(openai.APIStatusError) as raised:
            await client.responses.create(**ASK)
        assert raised.value.code == EngineDead.code


async def test_over_http_with_the_headers_of_the_file(tmp_path: Path) -> None:
    import uvicorn

    app, keys = SERVER.streamable_http_app(), set()

    async def guarded(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            keys.add(dict(scope["headers"]).get(b"x-key"))
        await app(scope, receive, send)

    sock = socket.create_server(("127.0.0.1", 0))
    other = uvicorn.Server(uvicorn.Config(guarded, log_level="warning"))
    task = asyncio.create_task(other._serve([sock]))
    url = f"http://127.0.0.1:{sock.getsockname()[1]}/mcp"
    try:
        llm = scripted(call("add", a=17, b=25), "It is 42.")
        dialect = Responses(allowed(tmp_path, web={"url": url, "headers": {"x-key": "secret"}}))
        async with client_of(llm, dialect) as client:
            asked = MCP | {"server_label": "mine", "server_url": url, "allowed_tools": ["add"]}
            found = await client.responses.create(**ASK | {"tools": [asked]})
            assert (found.output_text, found.output[1].output, found.output[1].server_label) == (
                "It is 42.", "42", "mine",
            )  # fmt: skip
            assert [tool.name for tool in found.output[0].tools] == ["add"]
            assert "fail" not in prompt_of(llm, 0)
            assert keys == {b"secret"}
    finally:
        other.should_exit = other.force_exit = True
        await task


async def test_in_the_background() -> None:
    llm = scripted(call("add", a=17, b=25), "It is 42.")
    async with client_of(llm, inside()) as client:
        found = await client.responses.create(**ASK, background=True)
        async with asyncio.timeout(60):
            while found.status in ("queued", "in_progress"):
                await asyncio.sleep(0.01)
                found = await client.responses.retrieve(found.id)
        assert (found.output_text, found.output[1].output) == ("It is 42.", "42")
        priorities = {request.priority for request in llm.client.requests}
        assert len(priorities) == 1, "later turns stay behind what clients wait for"


async def test_prompts_of_later_turns_are_paid_for(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[float] = []
    monkeypatch.setattr(Bucket, "take", lambda self, amount, now: taken.append(amount))
    llm = scripted(call("add", a=17, b=25), "It is 42.")
    async with client_of(llm, inside(), ServerSettings(port=0, key_tokens=100_000)) as client:
        found = await client.responses.create(**ASK)
        assert sum(taken) == found.usage.total_tokens


@pytest.mark.parametrize(
    ("tool", "words"),
    [
        ({"server_label": "others"}, "'others' is not allowed here. Connect to it yourself"),
        ({"server_url": "http://127.0.0.1:1/mcp"}, "is not allowed here"),
        ({"require_approval": "always"}, 'Send "never"'),
        ({"require_approval": None}, 'Send "never"'),
        ({"require_approval": {"never": {"tool_names": ["add"]}}}, 'Send "never"'),
        ({"headers": {"a": "b"}}, "Leave it out"),
        ({"authorization": "token"}, "Leave it out"),
        ({"connector_id": "connector_gmail"}, "There are no connectors here".lower()),
        ({"allowed_tools": ["subtract"]}, "It has: add"),
        ({"allowed_tools": {"read_only": True}}, "Send tool_names"),
        ({"server_label": None}, "server_label is required"),
    ],
    ids=str,
)
async def test_what_is_refused(monkeypatch: pytest.MonkeyPatch, tool: dict[str, Any], words: str) -> None:
    server = servers.Server("sums", servers.Given(command="none"), 1.0)
    one = servers.Remote(server, "sums", "add", "", {"type": "object"})
    server.problem, server.tools = None, (one,)

    async def idle(self: Any) -> None: ...

    monkeypatch.setattr(servers.Servers, "run", idle)
    dialect = Responses()
    dialect._servers = servers.Servers([server])
    async with listening(scripted("x"), dialects=[dialect]) as url, httpx.AsyncClient() as http:
        found = await http.post(f"{url}/v1/responses", json=ASK | {"tools": [MCP | tool]})
        assert found.status_code == 400
        assert words in found.json()["error"]["message"]
        assert found.json()["error"]["param"].startswith("tools.0.")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "mcp.json"),
        ('{"mcpServers": {"a": {}}}', "needs a command or a url"),
        ('{"mcpServers": {"a": {"command": "x", "url": "http://x"}}}', "needs a command or a url"),
        ('{"mcpServers": {"a": {"command": "x", "headers": {"a": "b"}}}}', "mixes"),
        ('{"mcpServers": {"a": {"url": "http://x", "type": "stdio"}}}', "mixes"),
        ('{"mcpServers": {"a": {"url": "ftp://x"}}}', "is no address"),
        ('{"mcpServers": {"a": {"url": "http://x", "type": "sse"}}}', "sse"),
        ('{"mcpServers": {"a b": {"url": "http://x"}}}', "is no label"),
        ('{"mcpServers": {"a": {"url": "http://x", "timeout": 3}}}', "timeout"),
    ],
)
def test_files_that_are_refused(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "mcp.json").write_text(text)
    with pytest.raises(ConfigError, match=words):
        Responses(str(tmp_path / "mcp.json"))


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        Responses(str(tmp_path / "none.json"))


def test_what_is_beside_the_servers_is_for_others() -> None:
    msgspec.json.decode(b'{"mcpServers": {}, "theme": "dark"}', type=servers.Listed)


def merged(events: list[Any]) -> list[dict[str, Any]]:
    """Without numbers, and with each text in one piece."""
    found: list[dict[str, Any]] = []
    for event in events:
        told = event.model_dump(exclude={"sequence_number"})
        if event.type.endswith(".delta") and found and found[-1]["type"] == event.type:
            found[-1]["delta"] += told["delta"]
            found[-1]["logprobs"] = (found[-1].get("logprobs") or []) + (told.get("logprobs") or [])
        else:
            found.append(told)
    return [{k: v for k, v in event.items() if v not in (None, [])} for event in found]


@pytest.mark.parametrize(
    "texts",
    [
        ["<think>sum</think>Let me see." + call("add", a=1, b=2), call("get_time") + call("fail", why="x")],
        ["<think>hm</think>A long answer that is cut"],
        [""],
    ],
    ids=["calls", "cut", "empty"],
)
async def test_a_kept_answer_is_streamed_as_it_was(texts: list[str]) -> None:
    body = ASK | {"tools": [MCP, TIME], "top_logprobs": 1}
    if "cut" in texts[0]:
        body["max_output_tokens"] = len(texts[0]) - 3
    async with client_of(scripted(*texts), inside()) as client:
        events = [event async for event in await client.responses.create(**body, stream=True)]
        id = events[0].response.id
        again = [event async for event in await client.responses.retrieve(id, stream=True)]
        assert merged(again) == merged(events)
        assert again[-1].response == events[-1].response
        rest = [event async for event in await client.responses.retrieve(id, stream=True, starting_after=3)]
        assert rest == again[4:]
