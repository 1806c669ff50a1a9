"""Dialects: what bytes of a client mean, and the bytes that answer them. Functions of data, without a server.

    class Echo(Dialect):
        routes = ("POST /echo",)

        def parse(self, incoming, served):
            return EchoExchange(TextAsk(prompts=[incoming.body.decode()]))

    class EchoExchange(Exchange):
        def whole(self, turns):
            return turns[0].message.content.encode()

A dialect parses what came in into an exchange: the ask, and how its answer is written. Whoever serves it prepares the
ask, plays its turns and sends what the exchange writes: the whole answer, or a chunk for each change. Where nothing is
asked of the engine, it makes an answer at once. This module is all that a dialect imports of the front.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar
from uuid import uuid4

import msgspec
from lmkit.api import Choice, ErrorInfo, PoolerInfo, RequestError, Tokenizer, owner_of
from lmkit.text.stream import Finish, Usage
from lmkit_python.front.ask import Ask, ChatAsk, PoolAsk, ScoreAsk, TextAsk, UnsupportedField
from lmkit_python.front.limits import ContextTooLong
from lmkit_python.front.message import CallChange, Change, Message, Part, ToolCall
from lmkit_python.front.prepare import Turn
from lmkit_python.front.vectors import scores_of

_KINDS = {400: "invalid_request_error", 401: "authentication_error", 404: "not_found_error",
          413: "invalid_request_error", 429: "rate_limit_error", 431: "invalid_request_error",
          503: "service_unavailable", 504: "timeout_error"}  # fmt: skip


class UnknownModel(RequestError):
    """No model is served under this name."""

    code = "model_not_found"
    status = 404
    field = "model"


@dataclass(frozen=True)
class Incoming:
    """One HTTP request, of which everything but its meaning has been checked."""

    route: str  # as the dialect declares it
    body: bytes | bytearray = b""
    path: Mapping[str, str] = field(default_factory=dict)  # the parameters of the path
    query: Mapping[str, str] = field(default_factory=dict)  # those behind the '?'; of several with a name the last
    headers: Mapping[str, str] = field(default_factory=dict)  # names in small letters; without keys
    tenant: str = ""  # what is kept for one is nothing that another may see


@dataclass(frozen=True)
class Answer:
    """A whole answer for which the engine is not needed."""

    body: bytes | Path  # a file is sent piece by piece
    status: int = 200
    media_type: str = "application/json"
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Served:
    """What a dialect may know of the model that is served."""

    names: tuple[str, ...]  # the main one first
    adapters: Collection[str]  # names under which requests get the model with an adapter
    tokenizer: Tokenizer
    default_params: Mapping[str, Any]  # fields of SamplingParams that the checkpoint recommends
    max_length: int  # tokens of a prompt with its output
    max_choices: int  # prompts x n
    max_values: int  # of all lists and objects of a body together
    pooler: PoolerInfo | None = None  # None: it generates
    about: Mapping[str, Any] = field(default_factory=dict)  # the model itself, as GET /v1/models describes it
    words: Collection[str] = ()  # names and texts in the chat template: what of a message it may read
    lenient: bool = True  # unknown fields are dropped and named, not refused

    def check_model(self, name: str | None) -> None:
        """Raises UnknownModel. None is the model itself."""
        if name is not None and name not in self.names and name not in self.adapters:
            known = " or ".join(map(repr, [*self.names, *sorted(self.adapters)][:8]))
            raise UnknownModel(f"there is no model {name[:200]!r} here", fix=f"use {known}")

    def prompt_room(self, max_tokens: int | None) -> int:
        """The tokens that a prompt may have beside an output of `max_tokens`, which is cut when it fits beside none."""
        return self.max_length - (max_tokens if max_tokens and max_tokens < self.max_length else 1)

    def adapter(self, name: str | None) -> str | None:
        """The adapter that a request asks for by the model's name; None: the model itself."""
        return name if name in self.adapters else None


class Exchange:
    """One request and how its answer is written: whole, or as a stream of chunks."""

    media_type: ClassVar[str] = "application/json"
    id_kind: ClassVar[str] = "req"  # the first part of the id of its requests
    played: ClassVar[bool] = True  # False: its turns are prepared, and that is what `whole` answers with
    streamed: bool = False

    def __init__(self, ask: Ask) -> None:
        self.ask = ask
        self.headers: dict[str, str] = {}  # of its answer
        self.id = f"{self.id_kind}-{uuid4().hex}"

    @property
    def dropped(self) -> set[str]:
        """Fields of the request that were accepted and change nothing. The server names them in a header."""
        return self.ask.dropped or set()

    def turns(self, prepare: Callable[[Ask, str], list[Turn]]) -> list[Turn]:
        """The turns of its ask, whose requests have ids that begin with its own. Who asks several things at once
        prepares them all. Raises RequestError."""
        return prepare(self.ask, self.id)

    def whole(self, turns: Sequence[Turn]) -> bytes:
        """The body of a whole answer, from the messages of its turns."""
        raise UnsupportedAnswer("whole answers")

    def chunk(self, turn: Turn, change: Change) -> bytes:
        """What is sent of a change; b"": nothing."""
        raise UnsupportedAnswer("streams")

    async def more(self, turns: Sequence[Turn]) -> Ask | None:
        """What else is asked of the engine, when all turns have ended: its turns are put behind them, and played as
        part of the same answer. None: nothing, the answer ends."""
        return None

    def end(self, turns: Sequence[Turn]) -> bytes:
        """What follows the last chunk of an answer without an error."""
        return b""

    def explained(self, told: bytes) -> bytes:
        """What a stream says of itself at its end, to who asked for it: `told` is JSON."""
        return b"event: lmkit\ndata: " + told + b"\n\n"


class UnsupportedAnswer(RequestError):
    code = "unsupported"

    def __init__(self, what: str) -> None:
        super().__init__(f"this dialect has no {what}", fix="ask another route")


class Dialect(ABC):
    """Made once per server, as target(**options). `parse` may run in several threads at once.

    Routes are a method and a path, whose parameters are in braces: "GET /items/{id}"; {id:path} may have slashes.
    """

    routes: ClassVar[tuple[str, ...]] = ()
    light_routes: ClassVar[tuple[str, ...]] = ()  # the same for what the engine is not asked: answered when it is busy
    keeps: ClassVar[bool] = True  # what one request leaves may matter to the next: all come to one process of a server
    files: ClassVar[bool] = False  # `parse` reads or writes files: it runs in threads that no other dialect waits for
    mark: ClassVar[str | None] = None  # a header by which clients tell it from others that have the same path
    choice: Choice | None = None  # the plugin that it is; set where it is made, for errors to name it
    third_party: bool = False  # set where it is made: routes that are lmkit's own come before its routes
    stream_type: ClassVar[str] = "text/event-stream; charset=utf-8"
    stream_end: ClassVar[bytes] = b""  # the last bytes of a stream, after an error, too

    @property
    def owner(self) -> str:
        """How errors name the plugin."""
        return owner_of(self.choice) if self.choice is not None else f"dialect {type(self).__name__}"

    @abstractmethod
    def parse(self, incoming: Incoming, served: Served) -> Exchange | Answer | Incoming:
        """CPU work only, except in a dialect that declares `files`. What it makes of a request for another dialect is
        answered as if that had come; one that does not keep anything hands on to such others only.

        Raises RequestError, which names the field.
        """

    async def work(self, answer: Callable[[Incoming], Awaitable[Answer]]) -> None:
        """What is done beside answering, while the server runs; then it is cancelled. `answer` says what whoever speaks
        the route would, errors too, when there is room: behind all that clients wait for."""
        return

    def waiting(self) -> bytes:
        """The bytes sent while a stream waits, for proxies that cut silent connections; no parser of the stream may see
        it: a comment among events, a blank before a line of JSON. b"": nothing."""
        if self.stream_type.startswith("text/event-stream"):
            return b": waiting\n\n"
        return b" " if self.stream_type.startswith("application/x-ndjson") else b""

    def error(self, info: ErrorInfo) -> bytes:
        """The JSON body of an error."""
        return error_json(info)

    def error_chunk(self, info: ErrorInfo) -> bytes:
        """An error in the middle of a stream."""
        return b"data: " + self.error(info) + b"\n\n"


def error_text(info: ErrorInfo) -> str:
    """The message and its fix, so that every client shows it."""
    return f"{info.message}. {info.fix[:1].upper()}{info.fix[1:]}" if info.fix else info.message


def error_json(info: ErrorInfo) -> bytes:
    """An error as most clients read it."""
    kind = _KINDS.get(info.status, "invalid_request_error" if info.status < 500 else "server_error")
    error = {"message": error_text(info), "type": kind, "param": info.field, "code": info.code}
    return msgspec.json.encode({"error": error})


__all__ = [
    "Answer", "Ask", "CallChange", "Change", "ChatAsk", "ContextTooLong", "Dialect", "Exchange", "Finish",
    "Incoming", "Message", "Part", "PoolAsk", "ScoreAsk", "Served", "TextAsk", "ToolCall", "Turn", "UnknownModel",
    "UnsupportedField", "Usage", "error_json", "error_text", "scores_of",
]  # fmt: skip
