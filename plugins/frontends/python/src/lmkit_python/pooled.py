"""embed, classify, score, reward and encode: what LLM and AsyncLLM offer of a pooling model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from lmkit.api import PoolingParams, UnsupportedTask

from lmkit_python.front.ask import Ask, PoolAsk, Prompts, ScoreAsk, as_prompts
from lmkit_python.front.prepare import Turn
from lmkit_python.front.vectors import scores_of
from lmkit_python.outputs import pooling_output

if TYPE_CHECKING:
    from lmkit.engine.messages import EngineFacts


class PoolingCalls:
    """`_read` answers asks: in LLM at once, in AsyncLLM as a coroutine, so each method answers as its owner does.

    All raise UnsupportedTask when the model does something else, and RequestError for a prompt it cannot take.
    `truncate`: cut longer prompts to so many tokens (default: refuse what the model cannot read whole).
    """

    if TYPE_CHECKING:

        @property
        def facts(self) -> EngineFacts: ...

        def _read(self, asks: Sequence[Ask], read: Callable[[list[list[Turn]]], Any]) -> Any: ...

    def encode(
        self,
        prompts: Prompts,
        params: PoolingParams | None = None,
        *,
        truncate: int | None = None,
    ) -> Any:
        """A PoolingOutput per prompt for any task; default: the model's own."""
        asks = [PoolAsk(prompts=[prompt], params=params, limit=truncate) for prompt in as_prompts(prompts)]
        return self._read(asks, lambda groups: [pooling_output(turn) for (turn,) in groups])

    def embed(
        self,
        prompts: Prompts,
        *,
        dimensions: int | None = None,
        truncate: int | None = None,
    ) -> Any:
        """A PoolingOutput per prompt whose `data` [size] float32 is its embedding."""
        return self.encode(prompts, PoolingParams("embed", dimensions), truncate=truncate)

    def classify(
        self,
        prompts: Prompts,
        *,
        activation: bool | None = None,
        truncate: int | None = None,
    ) -> Any:
        """A PoolingOutput per prompt whose `data` has a score per class; `facts.pooler.labels` names them."""
        return self.encode(prompts, PoolingParams("classify", activation=activation), truncate=truncate)

    def reward(self, prompts: Prompts, *, truncate: int | None = None) -> Any:
        """A PoolingOutput per prompt with scores before any activation: one vector, or one per token."""
        pooler = self.facts.pooler
        if pooler is None or pooler.task not in ("classify", "token_classify"):
            raise UnsupportedTask("reward", ("generate",) if pooler is None else pooler.tasks)
        return self.encode(prompts, PoolingParams(pooler.task, activation=False), truncate=truncate)

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
        ask = ScoreAsk(queries=several[0], documents=several[1], activation=activation, limit=truncate)
        return self._read([ask], lambda groups: scores_of(ask, groups[0]))
