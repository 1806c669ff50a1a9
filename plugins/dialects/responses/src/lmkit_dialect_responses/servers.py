"""MCP servers (https://modelcontextprotocol.io) whose tools answers may use: those of a file, and no others.

The file has the form that other clients of MCP read: {"mcpServers": {"LABEL": {"command": "program", "args": []}}} for
a program that is started here, {"LABEL": {"url": "https://..."}} for one that listens elsewhere (streamable HTTP).
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import logging
import re
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import NoneType
from typing import TYPE_CHECKING, Any, Literal

import msgspec
from lmkit.api import ConfigError, RequestError
from lmkit_http.dialect import UnsupportedField
from lmkit_http.strict import MAX_TOOLS, InvalidBody

from lmkit_dialect_responses.schema import Tool

if TYPE_CHECKING:
    from mcp import Client

MAX_RESULT = 1 << 18  # characters that a tool may answer
MAX_DEFINITION = 1 << 16  # bytes of one tool's description and schema
_AT_ONCE = 16  # calls of one server
_LOOK = 60.0  # seconds between looks whether a server is there, and which tools it has
_PAUSES = (1.0, 60.0)  # seconds before a server that is away is tried again: they double
_PATIENCE = 30.0  # seconds that connecting may take
_AWAY = "it cannot be reached"
_CLOSED, _TIMEOUT = -32000, -32001  # codes of the protocol: the connection is closed, a request took too long
_LABEL = re.compile(r"[\w.-]{1,64}", re.ASCII)
log = logging.getLogger("lmkit.responses")


Fault = dict[str, Any]  # why a call failed, as an item says it


def protocol_fault(message: str, code: int = _CLOSED) -> Fault:
    return {"type": "mcp_protocol_error", "code": code, "message": message}


def _failed(text: str) -> Fault:
    return {"type": "mcp_tool_execution_error", "content": [{"type": "text", "text": text}]}


def fault_text(fault: str | Mapping[str, Any]) -> str:
    """A fault of an item, which may be a client's, as a model reads it."""
    if isinstance(fault, str):
        return fault
    content = fault.get("content", fault.get("message", ""))
    blocks = content if isinstance(content, list) else [content]
    texts = [block.get("text") if isinstance(block, Mapping) else block for block in blocks]
    return "\n".join(text for text in texts if isinstance(text, str)) or "the tool failed"


class NotThere(RequestError):
    """The server is allowed, but cannot be reached."""

    code = "mcp-server"
    status = 424


class Given(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """One entry of the file."""

    type: Literal["stdio", "http", "streamable-http"] | None = None
    command: str | None = None
    args: list[str] = []
    env: dict[str, str] = {}
    cwd: str | None = None
    url: str | None = None
    headers: dict[str, str] = {}


class Listed(msgspec.Struct, frozen=True):
    """The file. What it has beside is for other programs."""

    mcpServers: dict[str, Given]  # noqa: N815 (the name of the file's form)


@dataclass(frozen=True)
class Remote:
    """A tool of a server, as a request may use it."""

    server: Server
    label: str  # as the request calls the server
    name: str
    description: str
    schema: dict[str, Any]

    @property
    def function(self) -> dict[str, Any]:
        return {"name": self.name, "description": self.description, "parameters": self.schema}

    @property
    def shown(self) -> dict[str, Any]:
        return {"name": self.name, "description": self.description, "input_schema": self.schema, "annotations": None}


class Server:
    """One server. Whoever `run`s it keeps it connected; `call` is for the same event loop."""

    def __init__(self, label: str, given: Given, seconds: float) -> None:
        self.label, self.url, self._given, self._seconds = label, given.url, given, seconds
        self.tools: tuple[Remote, ...] = ()
        self.problem: str | None = "it is not connected yet"
        self._client: Client | None = None
        self._lost: asyncio.Event | None = None
        self._few: asyncio.Semaphore | None = None

    async def run(self) -> None:
        """Until it is cancelled: connected, or tried again after a pause."""
        pause = _PAUSES[0]
        self._lost, self._few = asyncio.Event(), asyncio.Semaphore(_AT_ONCE)  # belong to this event loop
        while True:
            try:
                async with self._connection() as client:
                    while not self._lost.is_set():
                        self.tools = await self._listing(client)
                        self._client, self.problem, pause = client, None, _PAUSES[0]
                        try:
                            await asyncio.wait_for(self._lost.wait(), _LOOK)
                        except TimeoutError:
                            pass
            except Exception as error:
                self.problem = _AWAY
                log.warning("the MCP server %r cannot be reached: %s", self.label, _said(error))
            finally:
                self._client = None
            self._lost.clear()
            await asyncio.sleep(pause)
            pause = min(_PAUSES[1], 2 * pause)

    @asynccontextmanager
    async def _connection(self) -> AsyncIterator[Client]:
        import httpx2
        from mcp import Client, StdioServerParameters
        from mcp.client.streamable_http import streamable_http_client

        given = self._given
        async with AsyncExitStack() as stack:
            server: Any
            if given.url is not None:
                timeout = httpx2.Timeout(self._seconds, connect=min(_PATIENCE, self._seconds))
                http = await stack.enter_async_context(httpx2.AsyncClient(headers=given.headers, timeout=timeout))
                server = streamable_http_client(given.url, http_client=http)
            else:
                assert given.command is not None
                server = StdioServerParameters(command=given.command, args=given.args, env=given.env, cwd=given.cwd)
            yield await stack.enter_async_context(Client(server, read_timeout_seconds=self._seconds))

    async def _listing(self, client: Client) -> tuple[Remote, ...]:
        """All pages. A tool that is too large is left out, and logged."""
        found: list[Remote] = []
        cursor: str | None = None
        while len(found) < MAX_TOOLS:
            page = await client.list_tools(cursor=cursor, cache_mode="refresh")
            for tool in page.tools:
                one = Remote(self, self.label, tool.name, tool.description or "", tool.input_schema)
                if len(msgspec.json.encode(one.function)) > MAX_DEFINITION:
                    log.warning("the tool %r of the MCP server %r is too large to be used", tool.name, self.label)
                else:
                    found.append(one)
            cursor = page.next_cursor
            if not cursor:
                break
        return tuple(found[:MAX_TOOLS])

    async def call(self, name: str, arguments: str) -> tuple[str | None, Fault | None]:
        """What the tool answered, or what went wrong, as a model may read it."""
        client, few = self._client, self._few
        if client is None or few is None:
            return None, protocol_fault("the server of this tool cannot be reached now")
        from mcp import MCPError

        try:
            given = json.loads(arguments or "{}")
            async with few, asyncio.timeout(self._seconds):
                result = await client.call_tool(name, given)
        except MCPError as error:
            if error.code == _CLOSED:
                self._lose(client)
            return None, protocol_fault(str(error)[:1000], error.code)
        except TimeoutError:
            return None, protocol_fault(f"the tool did not answer within {self._seconds:g} seconds", _TIMEOUT)
        except Exception as error:
            log.warning("a call of %r of the MCP server %r failed: %s", name, self.label, _said(error))
            self._lose(client)
            return None, protocol_fault("the tool could not be called")
        text = _text(result)
        if len(text) > MAX_RESULT:
            return None, _failed(f"the tool answered with {len(text)} characters; at most {MAX_RESULT} are read here")
        return (None, _failed(text or "the tool failed")) if result.is_error else (text, None)

    def _lose(self, client: Client) -> None:
        """The connection is of no use any more."""
        if client is self._client and self._lost is not None:
            self._client, self.problem = None, _AWAY
            self._lost.set()


class Servers:
    """Those that are allowed."""

    def __init__(self, servers: Sequence[Server] = ()) -> None:
        self._by_label = {server.label: server for server in servers}
        self._by_url = {server.url: server for server in servers if server.url is not None}

    @classmethod
    def read(cls, path: Path, seconds: float) -> Servers:
        """Raises ConfigError."""
        if importlib.util.find_spec("mcp") is None:
            raise ConfigError("MCP servers need the library mcp", fix="pip install 'lmkit-dialect-responses[mcp]'")
        try:
            listed = msgspec.json.decode(path.read_bytes(), type=Listed)
        except OSError as error:
            raise ConfigError(f"{path} cannot be read: {error.strerror}", fix="name a file of MCP servers") from None
        except msgspec.DecodeError as error:
            raise ConfigError(f"{path}: {error}", fix='{"mcpServers": {"LABEL": {"command": ...}}}') from None
        for label, given in listed.mcpServers.items():
            if not _LABEL.fullmatch(label):
                raise ConfigError(f"{path}: {label[:100]!r} is no label", fix="use letters, digits and any of _ . -")
            _check(f"{path}: {label}", given)
        return cls([Server(label, given, seconds) for label, given in listed.mcpServers.items()])

    async def run(self) -> None:
        """Until it is cancelled."""
        await asyncio.gather(*(server.run() for server in self._by_label.values()))

    def tools(self, tool: Tool, where: str) -> list[Remote]:
        """The tools that an entry of a request means. Raises UnsupportedField, NotThere."""
        label = tool.server_label
        if not label:
            raise InvalidBody(f"{where}.server_label is required", f"{where}.server_label")
        _check_entry(tool, where)
        server = self._found(label, tool.server_url, where)
        if server.problem is not None:
            raise NotThere(f"the MCP server {label[:100]!r} is not there: {server.problem}", fix="try again in a while")
        found, wanted = {one.name: replace(one, label=label) for one in server.tools}, tool.allowed_names
        if wanted is None:
            return list(found.values())
        if missing := [name for name in wanted if name not in found]:
            known = ", ".join(list(found)[:20])
            raise UnsupportedField(
                f"{where}.allowed_tools", f"{label!r} has no tool {missing[0][:100]!r}", fix=f"it has: {known}"
            )
        return [found[name] for name in dict.fromkeys(wanted)]

    def _found(self, label: str, url: str | None, where: str) -> Server:
        """By its address if the request names one, else by its label."""
        server = self._by_label.get(label) if url is None else self._by_url.get(url)
        if server is None:
            name, said = ("server_label", label) if url is None else ("server_url", url)
            raise UnsupportedField(
                f"{where}.{name}", f"the MCP server {said[:200]!r} is not allowed here",
                fix="connect to it yourself and declare its tools as functions, or let whoever runs this server add "
                "it to the file of --dialect.responses.mcp",
            )  # fmt: skip
        return server


class Pinned(Servers):
    """The tools as they were when a request came, whatever becomes of the servers while it is answered."""

    def __init__(self, servers: Servers) -> None:
        super().__init__()
        self._servers = servers
        self._seen: dict[str, list[Remote]] = {}

    def tools(self, tool: Tool, where: str) -> list[Remote]:
        if where not in self._seen:
            self._seen[where] = self._servers.tools(tool, where)
        return self._seen[where]


def _check(where: str, given: Given) -> None:
    """Raises ConfigError."""
    stdio, http = (given.command, given.args, given.env, given.cwd), (given.url, given.headers)
    if (given.command is None) == (given.url is None):
        raise ConfigError(f"{where} needs a command or a url, and not both", fix="leave one out")
    if any(http if given.command is not None else stdio) or (given.type is not None and (given.type == "stdio") != (
        given.url is None)):  # fmt: skip
        raise ConfigError(
            f"{where} mixes what a program and what an address needs",
            fix="command, args, env and cwd, or url and headers",
        )
    if given.url is not None and not given.url.startswith(("http://", "https://")):
        raise ConfigError(f"{where}: {given.url[:200]!r} is no address", fix="write https://HOST/PATH")


def _check_entry(tool: Tool, where: str) -> None:
    """What a request may not say of a server. Raises UnsupportedField."""
    if tool.connector_id:
        raise UnsupportedField(f"{where}.connector_id", "there are no connectors here", fix="send server_label")
    if not isinstance(tool.allowed_tools, (list, NoneType)) and tool.allowed_tools.read_only is not None:
        raise UnsupportedField(
            f"{where}.allowed_tools.read_only", "what a tool changes is not known here", fix="send tool_names"
        )
    for name in ("headers", "authorization"):
        if getattr(tool, name):
            raise UnsupportedField(
                f"{where}.{name}", "servers are asked with the headers of the file that allows them",
                fix="leave it out, and let whoever runs this server write it there",
            )  # fmt: skip
    if tool.require_approval != "never":
        raise UnsupportedField(
            f"{where}.require_approval", "an answer does not stop to ask whether a call is approved",
            fix='send "never"; or connect to the server yourself, and declare its tools as functions',
        )  # fmt: skip


def _text(result: Any) -> str:
    """What a model can read of a result: texts, of resources too; what else there is is named."""
    parts = []
    for block in result.content:
        text = getattr(block, "text", None)
        if text is None:
            text = getattr(getattr(block, "resource", None), "text", None)
        parts.append(text if text is not None else f"[{block.type}]")
    if not parts and result.structured_content is not None:
        return json.dumps(result.structured_content, ensure_ascii=False)
    return "\n".join(parts)


def _said(error: BaseException) -> str:
    """The first cause of what a group of tasks raised."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return f"{type(error).__name__}: {error}"[:500]
