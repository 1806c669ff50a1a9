"""embed, classify, score, reward and encode: what LLM and AsyncLLM offer of a pooling model."""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator, Sequence
from time import monotonic
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from lmkit.api import (
    EngineBusy,
    EngineRequest,
    InvalidParam,
    PoolerInfo,
    PoolingParams,
    PoolingTask,
    SamplingParams,
    TokenEvent,
    UnsupportedTask,
)
from lmkit.engine.messages import error_of
from lmkit.text.pooling import Call, PoolingOutput, Prompt, Vector, encode_call, score_call, vector_of

if TYPE_CHECKING:
    from lmkit.engine.client import EngineClient
    from lmkit.engine.messages import EngineFacts
    from lmkit.text.side import TextSide


class PoolingCalls:
    """`_pooled` runs a Call: in LLM at once, in AsyncLLM as a coroutine, so each method answers as its owner does.

    All raise UnsupportedTask when the model does something else, and RequestError for a prompt it cannot take.
    `truncate`: cut longer prompts to so many tokens (default: refuse what the model cannot read whole).
    """

    if TYPE_CHECKING:
        text: TextSide

        @property
        def facts(self) -> EngineFacts: ...

        def _pooled(self, call: Call[Any]) -> Any: ...

    @property
    def _pooler(self) -> PoolerInfo | None:
        return self.facts.pooler

    def encode(
        self, prompts: Prompt | Sequence[Prompt], params: PoolingParams | None = None, *, truncate: int | None = None
    ) -> Any:
        """A PoolingOutput per prompt for any task; default: the model's own."""
        pooler = self._pooler
        params = params or PoolingParams(pooler.task if pooler is not None else "embed")
        return self._pooled(encode_call(self.text, pooler, as_prompts(prompts), params, limit=truncate))

    def embed(
        self, prompts: Prompt | Sequence[Prompt], *, dimensions: int | None = None, truncate: int | None = None
    ) -> Any:
        """A PoolingOutput per prompt whose `data` [size] float32 is its embedding."""
        return self.encode(prompts, PoolingParams("embed", dimensions), truncate=truncate)

    def classify(
        self, prompts: Prompt | Sequence[Prompt], *, activation: bool | None = None, truncate: int | None = None
    ) -> Any:
        """A PoolingOutput per prompt whose `data` has a score per class; `facts.pooler.labels` names them."""
        return self.encode(prompts, PoolingParams("classify", activation=activation), truncate=truncate)

    def reward(self, prompts: Prompt | Sequence[Prompt], *, truncate: int | None = None) -> Any:
        """A PoolingOutput per prompt with scores before any activation: one vector, or one per token."""
        pooler = self._pooler
        if pooler is None or pooler.task not in ("classify", "token_classify"):
            raise UnsupportedTask("reward", ("generate",) if pooler is None else pooler.tasks)
        task: PoolingTask = pooler.task
        return self.encode(prompts, PoolingParams(task, activation=False), truncate=truncate)

    def score(
        self,
        queries: str | Sequence[str],
        documents: str | Sequence[str],
        *,
        activation: bool | None = None,
        truncate: int | None = None,
    ) -> Any:
        """How well each document answers its query (or the only one): a list of floats."""
        several = [[t] if isinstance(t, str) else list(t) for t in (queries, documents)]
        return self._pooled(
            score_call(self.text, self._pooler, several[0], several[1], activation=activation, limit=truncate)
        )


async def pool(
    client: EngineClient,
    call: Call[Any],
    *,
    id: str = "",
    priority: int = 0,
    adapter: str | None = None,
    salt: str | None = None,
) -> list[Vector]:
    """Runs a call's requests, as many at a time as the engine runs. The first that fails ends the others."""
    id = id or f"pool-{uuid4().hex}"
    vectors: list[Vector] = []
    running: deque[tuple[str, AsyncIterator[TokenEvent]]] = deque()
    waiting = deque(enumerate(call.requests))
    try:
        while waiting or running:
            while waiting and len(running) < max(16, 2 * client.facts.max_rows):
                number, one = waiting.popleft()
                name, params = f"{id}-{number}", SamplingParams()
                request = EngineRequest(
                    name, one.token_ids, params, priority, monotonic(), adapter, salt, pooling=one.params
                )  # fmt: skip
                running.append((name, client.submit(request)))
            vectors.append(answer_of(await anext(running[0][1])))
            running.popleft()
    finally:
        client.abort([name for name, _ in running])
    return vectors


def answer_of(event: TokenEvent) -> Vector:
    """The vector of the only event of a pooling request. Raises what ended it."""
    if event.pooled is None:
        raise error_of(event.error) if event.error is not None else EngineBusy("the request was aborted")
    return vector_of(event.pooled)


def is_list(value: object) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, (str, bytes, bytearray, memoryview))


PROMPT = "a text or a list of token ids"


def as_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """A single text or list of ids is one prompt. Raises InvalidParam."""
    if isinstance(prompts, str):
        return [prompts]
    if not is_list(prompts):
        raise InvalidParam("prompts", prompts, f"{PROMPT}, or several of them")
    several: list[Any] = list(prompts)
    if several and all(isinstance(p, int) for p in several):
        return [several]
    for i, prompt in enumerate(several):
        if not isinstance(prompt, str) and not (is_list(prompt) and all(isinstance(t, int) for t in prompt)):
            raise InvalidParam(f"prompts[{i}]", prompt, PROMPT)
    return several


__all__ = ["PROMPT", "PoolingCalls", "PoolingOutput", "answer_of", "as_prompts", "is_list", "pool"]
