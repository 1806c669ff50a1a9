"""/v1/embeddings, /score, /rerank, /classify and /pooling: calls of a pooling model in the shapes that clients know.

Embeddings as in the OpenAI API; rerank as in those of Jina and Cohere.
"""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from base64 import b64encode
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import msgspec
from lmkit.api import ErrorInfo, PoolingParams
from lmkit.pooled import pool
from lmkit.text.pooling import Call, PoolingOutput, Vector, encode_call, score_call

from lmkit_http.access import Caller
from lmkit_http.generate import GenerationFailed, new_id
from lmkit_http.limits import check_texts
from lmkit_http.pooling_schema import (
    ClassifyRequest,
    EmbeddingRequest,
    InputRequest,
    PoolingBase,
    PoolingRequest,
    RerankRequest,
    ScoreRequest,
)

if TYPE_CHECKING:
    from lmkit_http.app import Backend

_encode = msgspec.json.Encoder().encode
Request = TypeVar("Request", bound=PoolingBase)
Answer = TypeVar("Answer")


class PoolingRun:
    """A call being answered; `fail` ends it from this side."""

    backlog = 0  # its answer is one

    def __init__(self, backend: Backend, call: Call[Any], id: str, request: PoolingBase, salt: str | None) -> None:
        self._backend, self.call, self._id = backend, call, id
        self._how: dict[str, Any] = {
            "priority": request.priority or 0, "adapter": backend.adapter(request.model), "salt": salt
        }  # fmt: skip
        self._error: ErrorInfo | None = None
        self._task: asyncio.Task[list[Vector]] | None = None

    @property
    def num_tokens(self) -> int:
        return sum(len(r.token_ids) for r in self.call.requests)

    async def vectors(self) -> list[Vector]:
        """Raises what the engine says, or what `fail` was told."""
        began = time.monotonic()
        work = pool(self._backend.client, self.call, id=self._id, **self._how)
        self._task = asyncio.ensure_future(work)
        try:
            found = await self._task
        except asyncio.CancelledError:
            self._task.cancel()
            if self._error is None:
                raise
            raise GenerationFailed(self._error) from None
        self._backend.metrics.pooled(len(found), self.num_tokens, time.monotonic() - began)
        return found

    def fail(self, error: ErrorInfo) -> None:
        self._error = error
        if self._task is not None:
            self._task.cancel()


class _Dialect(ABC, Generic[Request, Answer]):
    """One request: `prepare` makes the call, `body` shapes its answer. Both are CPU work and run in a thread."""

    kind = "pool"

    def __init__(self, backend: Backend, request: Request, caller: Caller) -> None:
        self.backend, self.request, self._caller = backend, request, caller
        self._id = new_id(self.kind)
        self._created = int(time.time())

    def prepare(self) -> PoolingRun:
        if self.limit is None:  # else they are cut
            for text in self.request.contents():
                check_texts(self.backend.text.tokenizer, [text], self.backend.facts)
        return PoolingRun(self.backend, self.call(), self._id, self.request, self._caller.salt(None))

    async def whole(self, run: PoolingRun) -> bytes:
        vectors = await run.vectors()
        return await asyncio.to_thread(lambda: _encode(self._whole(run.call.finish(vectors), run.num_tokens)))

    def _whole(self, answer: Answer, num_tokens: int) -> dict[str, Any]:
        usage = {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
        head = {"id": self._id, "created": self._created, "model": self.request.model or self.backend.model}
        return {**head, **self.body(answer), "usage": usage}

    @property
    def limit(self) -> int | None:
        """Tokens to which longer texts are cut; None: they are refused."""
        limit = self.request.truncate_prompt_tokens
        return self.backend.facts.max_length if limit == -1 else limit

    @abstractmethod
    def call(self) -> Call[Answer]: ...

    @abstractmethod
    def body(self, answer: Answer) -> dict[str, Any]: ...


class _Inputs(_Dialect[Request, list[PoolingOutput]]):
    """What answers each input by itself."""

    @abstractmethod
    def params(self) -> PoolingParams: ...

    def call(self) -> Call[list[PoolingOutput]]:
        request = self.request
        assert isinstance(request, InputRequest)
        return encode_call(
            self.backend.text, self.backend.facts.pooler, request.prompts(), self.params(),
            add_special=request.add_special_tokens is not False, limit=self.limit,
        )  # fmt: skip


class Embeddings(_Inputs[EmbeddingRequest]):
    kind = "embd"

    def params(self) -> PoolingParams:
        return PoolingParams("embed", self.request.dimensions)

    def body(self, answer: list[PoolingOutput]) -> dict[str, Any]:
        form = self.request.encoding_format
        data = [{"index": i, "object": "embedding", "embedding": _shown(a, form)} for i, a in enumerate(answer)]
        return {"object": "list", "data": data}


class Pooling(_Inputs[PoolingRequest]):
    def params(self) -> PoolingParams:
        pooler, r = self.backend.facts.pooler, self.request
        task = r.task or (pooler.task if pooler is not None else "embed")
        return PoolingParams(task, r.dimensions, r.activation)

    def body(self, answer: list[PoolingOutput]) -> dict[str, Any]:
        form = self.request.encoding_format
        data = [{"index": i, "object": "pooling", "data": _shown(a, form)} for i, a in enumerate(answer)]
        return {"object": "list", "data": data}


class Classify(_Inputs[ClassifyRequest]):
    kind = "classify"

    def params(self) -> PoolingParams:
        return PoolingParams("classify", activation=self.request.activation)

    def body(self, answer: list[PoolingOutput]) -> dict[str, Any]:
        pooler = self.backend.facts.pooler
        labels = pooler.labels if pooler is not None else ()
        data = []
        for i, a in enumerate(answer):
            best = int(a.data.argmax())
            label = labels[best] if best < len(labels) else None
            data.append({"index": i, "label": label, "probs": a.data.tolist(), "num_classes": len(a.data)})
        return {"object": "list", "data": data}


class Score(_Dialect[ScoreRequest, list[float]]):
    kind = "score"

    def call(self) -> Call[list[float]]:
        queries, documents = self.request.sides()
        return score_call(
            self.backend.text, self.backend.facts.pooler, queries, documents,
            activation=self.request.activation, limit=self.limit,
        )  # fmt: skip

    def body(self, answer: list[float]) -> dict[str, Any]:
        data = [{"index": i, "object": "score", "score": score} for i, score in enumerate(answer)]
        return {"object": "list", "data": data}


class Rerank(_Dialect[RerankRequest, list[float]]):
    kind = "rerank"

    def call(self) -> Call[list[float]]:
        r = self.request
        return score_call(
            self.backend.text, self.backend.facts.pooler, [r.query], r.texts(),
            activation=r.activation, limit=self.limit,
        )  # fmt: skip

    def body(self, answer: list[float]) -> dict[str, Any]:
        """Best first; documents of equal score keep their order."""
        r, texts = self.request, self.request.texts()
        order = sorted(range(len(answer)), key=lambda i: -answer[i])[: r.top_n]
        results: list[dict[str, Any]] = [{"index": i, "relevance_score": answer[i]} for i in order]
        if r.return_documents is not False:
            for result in results:
                result["document"] = {"text": texts[result["index"]]}
        return {"results": results}


# path -> request, dialect
ROUTES: dict[str, tuple[type[PoolingBase], type[_Dialect[Any, Any]]]] = {
    "/v1/embeddings": (EmbeddingRequest, Embeddings),
    "/pooling": (PoolingRequest, Pooling),
    "/classify": (ClassifyRequest, Classify),
    **dict.fromkeys(("/score", "/v1/score"), (ScoreRequest, Score)),
    **dict.fromkeys(("/rerank", "/v1/rerank", "/v2/rerank"), (RerankRequest, Rerank)),
}


def _shown(output: PoolingOutput, form: str | None) -> str | list[Any]:
    """A list of numbers, or their float32 bytes, little-endian, in base64."""
    return b64encode(output.data.tobytes()).decode() if form == "base64" else output.data.tolist()
