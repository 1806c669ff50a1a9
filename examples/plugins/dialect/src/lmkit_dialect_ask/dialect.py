"""POST /ask {"question": "...", "tokens": 64, "stream": true}; GET /ask says what can be asked."""

import json
from typing import Annotated

from lmkit.api import SamplingParams
from lmkit_http.dialect import Answer, ChatAsk, Dialect, Exchange, error_text
from lmkit_http.strict import Content, Strict, parse
from pydantic import Field


class Question(Strict):
    """The body: a field that is unknown, missing or of another type is a 400 that names it."""

    question: Content
    tokens: Annotated[int, Field(ge=1)] | None = None
    stream: bool = False


class Ask(Dialect):
    """Contract: lmkit_http.dialect.Dialect. Functions of data: what came in, as an exchange that says what is asked
    of the engine and how the answer is written. The server does all else: queues, streams, keys, metrics."""

    routes = ("POST /ask",)
    light_routes = ("GET /ask",)  # answered without the engine, also when it is busy
    stream_type = "application/x-ndjson"
    stream_end = b'{"end": true}\n'

    def __init__(self, tokens=256):
        self._most = tokens

    def parse(self, incoming, served):
        """Raises RequestError and nothing else. May run in several threads at once."""
        if incoming.route == "GET /ask":
            return Answer(line({"model": served.names[0], "tokens": self._most}))
        body = parse(Question, incoming.body)
        params = {**served.default_params, "max_tokens": min(body.tokens or self._most, self._most)}
        messages = [{"role": "user", "content": body.question}]
        return Asked(ChatAsk(messages=messages, params=SamplingParams(**params)), body.stream)

    def error(self, info):
        return line({"error": error_text(info), "field": info.field})

    def error_chunk(self, info):
        return self.error(info)


class Asked(Exchange):
    """One question and its answer: whole, or a line for each change."""

    id_kind = "ask"

    def __init__(self, ask, streamed):
        super().__init__(ask)
        self.streamed = streamed

    def whole(self, turns):
        turn = turns[0]
        return line({"answer": turn.message.content, "finish": turn.message.finish.reason})

    def chunk(self, turn, change):
        return line({"piece": change.content}) if change.content else b""


def line(what):
    return json.dumps(what, ensure_ascii=False).encode() + b"\n"
