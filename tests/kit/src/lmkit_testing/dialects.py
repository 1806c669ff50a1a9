"""Conformance of dialects: whatever comes in is answered, refusals in the dialect's own shape; streams say what whole
answers say."""

from __future__ import annotations

import asyncio
import itertools
import json
import re
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, ClassVar

import httpx
import pytest
from lmkit.api import ErrorInfo, RequestError
from lmkit_http.app import build_app
from lmkit_http.dialect import Answer, Dialect, Exchange, Incoming, Served
from lmkit_http.dialects import installed_dialects, load_dialects

from lmkit_testing.serving import ServedLLM, scripted
from lmkit_testing.specs import PluginConformance

SAID = "The sum is 42 \N{EN DASH} \N{HUGGING FACE}."  # what the engine of the kit answers, whatever is asked
GARBAGE: tuple[bytes, ...] = (
    b"", b" ", b"\xff\xfe", b"{", b"[]", b"null", b'"text"', b"1e999", b"{}", b'{"a": 1, "a": 2}', b"[" * 5000,
    b'{"a":' * 3000, b'{"model": 1, "messages": "x", "prompt": {}, "input": null}',
    b'{"model": "' + b"x" * 5000 + b'", "messages": [], "prompt": "", "input": []}',
    b'{"max_tokens": 1e400, "temperature": -1, "stream": "yes", "n": 99999999999999999999}', b"\x00" * 64,
)  # fmt: skip
INFOS = [ErrorInfo(f"code-{status}", f"what went wrong {status}", fix="what to do", status=status)
         for status in (400, 401, 404, 413, 429, 500, 503, 504)]  # fmt: skip
CLIENT_ERRORS = range(400, 500)


@dataclass(frozen=True)
class Asked:
    """A request that the dialect understands: its route as it declares it, and bodies for the same answer whole and
    as a stream (None: it has none)."""

    route: str
    whole: bytes | Mapping[str, Any]
    streamed: bytes | Mapping[str, Any] | None = None
    query: str = ""  # of the streamed one
    headers: Mapping[str, str] | None = None

    @property
    def method(self) -> str:
        return self.route.partition(" ")[0]

    @property
    def path(self) -> str:
        return filled(self.route)


def filled(route: str) -> str:
    """The path of a route, with something in place of its parameters."""
    return re.sub(r"\{[^}]*\}", "x1", route.partition(" ")[2])


def body_of(value: bytes | Mapping[str, Any]) -> bytes:
    return value if isinstance(value, bytes) else json.dumps(value).encode()


class DialectConformance(PluginConformance):
    """Set `asked`: requests that are understood, one for each route that asks the engine, and override `text`, which
    reads what was said out of an answer. Without them only what holds of all dialects is tested."""

    asked: ClassVar[Sequence[Asked]] = ()
    options: ClassVar[Mapping[str, Any]] = {}  # of the plugin

    def text(self, answer: bytes, streamed: bool) -> str:
        """What the model said, out of the bytes of an answer."""
        pytest.fail("`text` is not overridden: the class of the test says how to read an answer")

    @pytest.fixture
    def dialect(self, target: Any) -> Dialect:
        made: Dialect = target(**self.options)
        return made

    def llm(self) -> ServedLLM:
        return scripted(SAID)

    def app(self, dialect: Dialect) -> Any:
        """A server that speaks it, and beside it what it hands requests on to."""
        rest = [other for other in installed_dialects() if not isinstance(other, type(dialect))]
        return build_app(self.llm(), dialects=[dialect, *rest])

    @pytest.fixture
    def served(self, dialect: Dialect) -> Served:
        found: Served = self.app(dialect).state.backend.served
        return found

    def test_routes(self, dialect: Dialect) -> None:
        assert isinstance(dialect, Dialect), "a subclass of lmkit_http.dialect.Dialect"
        routes = dialect.routes + dialect.light_routes
        assert routes, "a dialect without routes is never asked"
        assert len(set(routes)) == len(routes), "a route stands once, in `routes` or in `light_routes`"
        for route in routes:
            assert re.fullmatch(r"(GET|POST|PUT|PATCH|DELETE) /\S*", route), (
                f"{route!r}: write it like 'POST /path/{{id}}'"
            )
        assert dialect.mark is None or dialect.mark == dialect.mark.lower(), "names of headers come in small letters"
        assert isinstance(dialect.stream_end, bytes)

    def test_the_server_speaks_it(self, host: Any, dialect: Dialect) -> None:
        given = {f"dialect.{self.plugin.partition(':')[2]}": dict(self.options)}
        assert any(type(each) is type(dialect) for each in load_dialects(host, given)), "the server's log says why not"

    def test_errors_are_json_that_says_what_and_why(self, dialect: Dialect) -> None:
        """Whole, and in the middle of a stream: an object with the message, and with its fix, which clients show."""
        for info in INFOS:
            found = json.loads(dialect.error(info))
            assert isinstance(found, dict), "the body of an error is a JSON object"
            shown = " ".join(texts(found))
            assert info.message in shown, "the message is missing"
            assert info.fix.lower() in shown.lower(), "the fix is missing: lmkit_http.dialect.error_text has both"
            chunk = dialect.error_chunk(info)
            assert info.message in chunk.decode(), "the message is missing in the middle of a stream"
            assert chunk.endswith(b"\n"), "what follows would be read as a part of it"

    def test_garbage_is_refused_in_words(self, dialect: Dialect, served: Served) -> None:
        """`parse` gives an exchange, an answer or another's request, or raises RequestError; never anything else."""
        for garbage, route in itertools.product(GARBAGE, dialect.routes + dialect.light_routes):
            path = dict.fromkeys(re.findall(r"\{(\w+)", route), "x1")
            try:
                found = dialect.parse(Incoming(route, garbage, path), served)
            except RequestError as error:
                info = error.info()
                assert info.message, f"{route}: a refusal without words"
                assert info.status in CLIENT_ERRORS or info.status == 503, f"{route}: {info.status} blames the server"
                json.loads(dialect.error(info))
                continue
            assert isinstance(found, Exchange | Answer | Incoming), f"{route} of {garbage[:40]!r} gave {found!r:.60}"

    def test_garbage_over_http(self, dialect: Dialect) -> None:
        """Refused with an error of the dialect's shape."""
        shape = json.loads(dialect.error(INFOS[0])).keys()
        for route in dialect.routes:
            method, _, _ = route.partition(" ")
            for answer in self.send(dialect, [(method, filled(route), garbage, None) for garbage in GARBAGE[:6]]):
                assert answer.status_code < 500, f"{route}: {answer.status_code} {answer.text[:200]}"
                if answer.status_code in (400, 422):
                    assert answer.json().keys() == shape, f"{route}: {answer.text[:200]}"

    def send(
        self, dialect: Dialect, requests: Sequence[tuple[str, str, bytes, Mapping[str, str] | None]]
    ) -> list[httpx.Response]:
        app = self.app(dialect)
        mark = {} if dialect.mark is None else {dialect.mark: "1"}
        sent = {"content-type": "application/json", **mark}

        async def talk() -> list[httpx.Response]:
            transport = httpx.ASGITransport(app)
            async with httpx.AsyncClient(transport=transport, base_url="http://localhost", timeout=60) as client:
                return [
                    await client.request(method, path, content=body, headers={**sent, **(headers or {})})
                    for method, path, body, headers in requests
                ]

        return asyncio.run(talk())

    def parsed(self, dialect: Dialect, served: Served, asked: Asked) -> Any:
        return dialect.parse(Incoming(asked.route, body_of(asked.whole), headers=asked.headers or {}), served)

    def test_what_is_understood(self, dialect: Dialect, served: Served) -> None:
        """The same request is the same ask, from any thread, and each has an id of its own."""
        self.needs_asked()
        for asked in self.asked:
            assert asked.route in dialect.routes, f"{asked.route} is none of its routes"
            with ThreadPoolExecutor(4) as pool:
                found = list(pool.map(lambda _, asked=asked: self.parsed(dialect, served, asked), range(8)))
            if isinstance(found[0], Exchange):
                assert all(each.ask == found[0].ask for each in found), "the same bytes, another ask"
                assert len({each.id for each in found}) == len(found), "ids are told apart"

    def test_answers(self, dialect: Dialect) -> None:
        """Whole and streamed they say what the engine said, and a stream ends as declared."""
        self.needs_asked()
        for asked in self.asked:
            requests = [(asked.method, asked.path, body_of(asked.whole), asked.headers)]
            if asked.streamed is not None:
                path = f"{asked.path}{asked.query}"
                requests.append((asked.method, path, body_of(asked.streamed), asked.headers))
            whole, *streams = self.send(dialect, requests)
            assert whole.status_code == 200, f"{asked.route}: {whole.status_code} {whole.text[:300]}"
            assert self.text(whole.content, False) == SAID, f"{asked.route}: {whole.text[:300]}"
            for stream in streams:
                assert stream.status_code == 200, stream.text[:300]
                assert stream.headers["content-type"] == dialect.stream_type, "streams have `stream_type`"
                assert stream.content.endswith(dialect.stream_end), "a stream ends with `stream_end`"
                assert self.text(stream.content, True) == SAID, f"{asked.route} as a stream: {stream.text[:300]}"

    def needs_asked(self) -> None:
        if not self.asked:
            pytest.skip("`asked` is empty: the class of the test says what requests are understood")


def texts(value: Any) -> list[str]:
    """All texts in a JSON value."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, dict | list):
        return [text for each in (value.values() if isinstance(value, dict) else value) for text in texts(each)]
    return []


__all__ = ["SAID", "Asked", "DialectConformance"]
