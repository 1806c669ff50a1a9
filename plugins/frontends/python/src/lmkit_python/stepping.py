"""LLMEngine: an `LLM` step by step, for programs that have a loop of their own.

with LLM("demo") as llm, LLMEngine(llm) as engine:
    engine.add_request("a", "What is 2 + 3?", SamplingParams(max_tokens=16))
    while engine.has_unfinished_requests():
        for output in engine.step():
            print(output.request_id, output.text, output.finished)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lmkit.api import InvalidParam, SamplingParams, TokenEvent, info_of

from lmkit_python.asks import one_ask
from lmkit_python.front.ask import Messages, Prompt
from lmkit_python.front.run import by_request, dealt
from lmkit_python.outputs import RequestOutput, output_of

if TYPE_CHECKING:
    from lmkit_python.front.prepare import Turn
    from lmkit_python.llm import LLM


@dataclass(slots=True)
class _Request:
    """What was added under one id."""

    id: str
    turns: list[Turn]
    see: Callable[[TokenEvent], None] | None  # shows events to plugins that watch

    @property
    def finished(self) -> bool:
        return all(turn.stream.finished for turn in self.turns)


class LLMEngine:
    """The requests of one program with `llm`, which others may use beside it. One thread calls it.

    `add_request` checks and tokenizes, `step` lets the engine go on, `abort_request` forgets. Closing forgets all.
    """

    def __init__(self, llm: LLM) -> None:
        self._llm = llm
        self._stack = ExitStack()
        self._call = self._stack.enter_context(llm.shared.open())
        self._requests: dict[str, _Request] = {}
        self._owners: dict[str, tuple[_Request, list[Turn]]] = {}  # by request of the engine

    def add_request(
        self,
        request_id: str,
        prompt: Prompt | Messages,
        params: SamplingParams | None = None,
        *,
        n: int = 1,
        adapter: str | None = None,
    ) -> None:
        """A text, token ids or a conversation. Raises RequestError; what the engine refuses comes as an error of the
        first output."""
        if request_id in self._requests:
            raise InvalidParam("request_id", request_id, "an id that no unfinished request has")
        ask = one_ask(prompt, params, n=n, adapter=adapter)
        (turns,) = self._llm.prepare([ask])
        request = self._requests[request_id] = _Request(request_id, turns, self._llm.watch(turns))
        for id, several in by_request(turns).items():
            self._owners[id] = (request, several)
            self._call.add(several[0].request)

    def step(self) -> list[RequestOutput]:
        """Lets the engine make steps until there is news of a request; all that is known of those with news.

        [] when nothing is unfinished. Raises EngineDead.
        """
        if not self._requests:
            return []
        news: dict[str, _Request] = {}
        for id, event in self._call.wait():
            request, turns = self._owners[id]
            if isinstance(event, Exception):
                error = info_of(event)
                fed = [(turn, turn.stream.fail(error)) for turn in turns]
            else:
                if request.see is not None:
                    request.see(event)
                fed = [(turn, turn.stream.feed(own)) for turn, own in dealt(event, turns)]
            for turn, events in fed:
                turn.message.feed(events)
            if all(turn.stream.finished for turn in turns):
                del self._owners[id]
                if turns[0].stream.must_abort:
                    self._call.abort(id)
            news[request.id] = request
        for id in [id for id, request in news.items() if request.finished]:
            del self._requests[id]
        return [self._output(request) for request in news.values()]

    def _output(self, request: _Request) -> RequestOutput:
        output = output_of(request.turns)
        output.request_id = request.id
        return output

    def abort_request(self, request_ids: str | Iterable[str]) -> None:
        """Idempotent; no output follows."""
        for request_id in [request_ids] if isinstance(request_ids, str) else request_ids:
            request = self._requests.pop(request_id, None)
            for id in [id for id, (owner, _) in self._owners.items() if owner is request]:
                del self._owners[id]
                self._call.abort(id)

    def has_unfinished_requests(self) -> bool:
        return bool(self._requests)

    def get_num_unfinished_requests(self) -> int:
        return len(self._requests)

    def close(self) -> None:
        """Idempotent."""
        self._requests.clear()
        self._owners.clear()
        self._stack.close()

    def __enter__(self) -> LLMEngine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
