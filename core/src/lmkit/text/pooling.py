"""Calls of a pooling model: prompts become requests, vectors become answers. The same for Python and HTTP.

A Call holds the requests and what to make of their vectors; whoever runs the engine runs it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from lmkit.api import InvalidParam, Pooled, PoolerInfo, PoolingParams, PoolingTask, UnsupportedTask
from lmkit.text.side import TextSide

Prompt = str | Sequence[int]
Vector = NDArray[np.float32]  # [size], or [tokens, size] of a token task
Answer = TypeVar("Answer")


@dataclass(frozen=True, slots=True)
class PoolingRequest:
    """One prompt on its way. `text` is None when token ids were given."""

    token_ids: list[int]
    params: PoolingParams
    text: str | None = None


@dataclass(frozen=True, slots=True)
class Call(Generic[Answer]):
    requests: list[PoolingRequest]
    finish: Callable[[list[Vector]], Answer]  # vectors in the order of `requests`


@dataclass(slots=True)
class PoolingOutput:
    """The answer to one prompt: an embedding, scores of classes, or one of these per token."""

    prompt: str | None
    prompt_token_ids: list[int]
    data: Vector


def vector_of(pooled: Pooled) -> Vector:
    return np.frombuffer(pooled.data, "<f4").reshape(pooled.shape)


def check_task(pooler: PoolerInfo | None, task: PoolingTask) -> PoolerInfo:
    """Raises UnsupportedTask."""
    if pooler is None or task not in pooler.tasks:
        raise UnsupportedTask(task, ("generate",) if pooler is None else pooler.tasks)
    return pooler


def encode_call(
    text: TextSide,
    pooler: PoolerInfo | None,
    prompts: Sequence[Prompt],
    params: PoolingParams,
    *,
    add_special: bool = True,
    limit: int | None = None,
) -> Call[list[PoolingOutput]]:
    """The vectors of each prompt. `limit`: longer prompts are cut to so many tokens, special ones kept."""
    check_task(pooler, params.task)
    requests = []
    for prompt in prompts:
        if isinstance(prompt, str):
            ids = text.encode_prompt(prompt, add_special=add_special, limit=limit)
            requests.append(PoolingRequest(ids, params, prompt))
        else:
            requests.append(PoolingRequest(list(prompt)[:limit], params))

    def finish(vectors: list[Vector]) -> list[PoolingOutput]:
        return [PoolingOutput(r.text, r.token_ids, v) for r, v in zip(requests, vectors, strict=True)]

    return Call(requests, finish)


def score_call(
    text: TextSide,
    pooler: PoolerInfo | None,
    queries: Sequence[str],
    documents: Sequence[str],
    *,
    activation: bool | None = None,
    limit: int | None = None,
) -> Call[list[float]]:
    """How well documents answer queries, pair by pair; one query goes with every document.

    A cross-encoder (a classifier with one class) reads both texts at once. Embeddings are compared by cosine; vectors
    per token by the sum over the query's of the best match (ColBERT, arXiv:2004.12832).
    """
    pairs = _pairs(queries, documents)
    if pooler is not None and pooler.task == "classify" and pooler.size == 1:
        crossed = [_pair(text, q, d, activation, limit) for q, d in pairs]
        return Call(crossed, lambda vectors: [float(v[0]) for v in vectors])
    if pooler is None or pooler.task not in ("embed", "token_embed"):
        raise UnsupportedTask("score", ("generate",) if pooler is None else pooler.tasks)
    texts = list(dict.fromkeys([*queries, *documents]))
    params = PoolingParams(pooler.task)
    requests = [PoolingRequest(text.encode_prompt(t, limit=limit), params, t) for t in texts]

    def finish(vectors: list[Vector]) -> list[float]:
        unit = [_unit(v) for v in vectors]
        of = dict(zip(texts, unit, strict=True))
        return [_similarity(of[q], of[d]) for q, d in pairs]

    return Call(requests, finish)


def _pairs(queries: Sequence[str], documents: Sequence[str]) -> list[tuple[str, str]]:
    for name, texts in (("queries", queries), ("documents", documents)):
        if not texts or not all(isinstance(t, str) for t in texts):
            raise InvalidParam(name, texts, "at least one text")
    if len(queries) not in (1, len(documents)):
        raise InvalidParam("queries", len(queries), f"one, or as many as documents ({len(documents)})")
    return list(zip(queries if len(queries) > 1 else [*queries] * len(documents), documents, strict=True))


def _pair(text: TextSide, query: str, document: str, activation: bool | None, limit: int | None) -> PoolingRequest:
    ids, second = text.encode_pair(query, document, limit=limit)
    return PoolingRequest(ids, replace(PoolingParams("classify", activation=activation), second=second))


def _unit(vectors: Vector) -> Vector:
    length = np.linalg.norm(vectors, axis=-1, keepdims=True)
    return vectors / np.maximum(length, 1e-12)


def _similarity(query: Vector, document: Vector) -> float:
    if query.ndim == 1:
        return float(query @ document)
    return float((query @ document.T).max(axis=1).sum())
