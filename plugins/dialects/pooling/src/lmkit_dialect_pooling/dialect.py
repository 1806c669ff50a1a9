"""/v1/embeddings, /score, /rerank, /classify and /pooling: calls of a pooling model in the shapes that clients know.

Embeddings as in the OpenAI API; rerank as in those of Jina and Cohere.
"""

from __future__ import annotations

import sys
import time
from abc import abstractmethod
from base64 import b64encode
from collections.abc import Sequence
from typing import Any, ClassVar, Generic, TypeVar

import msgspec
import numpy as np
from lmkit.api import Pooled, PoolingParams
from lmkit_http.dialect import (
    ChatAsk,
    Dialect,
    Exchange,
    Incoming,
    PoolAsk,
    ScoreAsk,
    Served,
    Turn,
    UnsupportedField,
    scores_of,
)
from lmkit_http.messages import conversation
from lmkit_http.strict import parse

from lmkit_dialect_pooling.schema import (
    ClassifyRequest,
    EmbeddingRequest,
    Encoded,
    InputRequest,
    PoolingBase,
    PoolingRequest,
    RerankRequest,
    ScoreRequest,
)

_encode = msgspec.json.Encoder().encode
Request = TypeVar("Request", bound=PoolingBase)
Answer = TypeVar("Answer")


class _Answer(Exchange, Generic[Request, Answer]):
    """One request: `make_ask` says what is asked, `read` what its turns say, `body` shapes that."""

    id_kind = "pool"

    def __init__(self, request: Request, served: Served) -> None:
        self.request, self.served = request, served
        limit = request.truncate_prompt_tokens  # None: longer texts are refused
        if limit is None and getattr(request, "truncate", None):
            limit = -1
        self.shared: dict[str, Any] = {
            "limit": served.max_length if limit == -1 else limit, "adapter": served.adapter(request.model),
            "priority": request.priority or 0, "dropped": request.dropped,
        }  # fmt: skip
        super().__init__(self.make_ask())
        self._created = int(time.time())

    def whole(self, turns: Sequence[Turn]) -> bytes:
        num_tokens = sum(turn.stream.usage.prompt_tokens for turn in turns)
        usage = {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
        head = {"id": self.id, "created": self._created, "model": self.request.model or self.served.names[0]}
        return _encode({**head, **self.body(self.read(turns)), "usage": usage})

    @abstractmethod
    def make_ask(self) -> PoolAsk | ScoreAsk: ...

    @abstractmethod
    def read(self, turns: Sequence[Turn]) -> Answer: ...

    @abstractmethod
    def body(self, answer: Answer) -> dict[str, Any]: ...


class _Inputs(_Answer[Request, list[Pooled]]):
    """What answers each input by itself."""

    def read(self, turns: Sequence[Turn]) -> list[Pooled]:
        return [pooled for turn in turns if (pooled := turn.message.pooled) is not None]

    @abstractmethod
    def params(self) -> PoolingParams | None: ...

    def make_ask(self) -> PoolAsk:
        request = self.request
        assert isinstance(request, InputRequest)
        if request.messages is None:
            return PoolAsk(
                prompts=request.prompts(), params=self.params(), add_special=request.add_special_tokens is not False,
                prompt_field="input", **self.shared,
            )  # fmt: skip
        chat = ChatAsk(
            messages=conversation(request.messages, self.served.words, request.dropped),
            add_generation_prompt=bool(request.add_generation_prompt) and not request.continue_final_message,
            continue_final=bool(request.continue_final_message), dropped=request.dropped,
        )  # fmt: skip
        return PoolAsk(
            chat=chat, params=self.params(), add_special=bool(request.add_special_tokens), prompt_field="messages",
            **self.shared,
        )  # fmt: skip


class Embeddings(_Inputs[EmbeddingRequest]):
    id_kind = "embd"

    def params(self) -> PoolingParams:
        wanted, pooler = self.request.normalize, self.served.pooler
        if wanted is not None and pooler is not None and wanted != pooler.normalize:
            does = "normalizes" if pooler.normalize else "does not normalize"
            raise UnsupportedField("normalize", f"the checkpoint {does} its vectors", fix="leave it out")
        return PoolingParams("embed", self.request.dimensions)

    def body(self, answer: list[Pooled]) -> dict[str, Any]:
        data = [{"index": i, "object": "embedding", "embedding": _shown(a, self.request)} for i, a in enumerate(answer)]
        return {"object": "list", "data": data}


class Pooling(_Inputs[PoolingRequest]):
    def params(self) -> PoolingParams:
        pooler, r = self.served.pooler, self.request
        task = r.task or (pooler.task if pooler is not None else "embed")
        return PoolingParams(task, r.dimensions, r.activated)

    def body(self, answer: list[Pooled]) -> dict[str, Any]:
        data = [{"index": i, "object": "pooling", "data": _shown(a, self.request)} for i, a in enumerate(answer)]
        return {"object": "list", "data": data}


class Classify(_Inputs[ClassifyRequest]):
    id_kind = "classify"

    def params(self) -> PoolingParams:
        return PoolingParams("classify", activation=self.request.activated)

    def body(self, answer: list[Pooled]) -> dict[str, Any]:
        pooler = self.served.pooler
        labels = pooler.labels if pooler is not None else ()
        data = []
        for i, a in enumerate(answer):
            probs = _numbers(a)
            best = probs.index(max(probs))
            label = labels[best] if best < len(labels) else None
            data.append({"index": i, "label": label, "probs": probs, "num_classes": len(probs)})
        return {"object": "list", "data": data}


class _Scores(_Answer[Request, list[float]]):
    """What compares texts."""

    def read(self, turns: Sequence[Turn]) -> list[float]:
        assert isinstance(self.ask, ScoreAsk)
        return scores_of(self.ask, turns)


class Score(_Scores[ScoreRequest]):
    id_kind = "score"

    def make_ask(self) -> ScoreAsk:
        queries, documents = self.request.sides()
        return ScoreAsk(
            queries=queries, documents=documents, activation=self.request.activated, prompt_field="documents",
            **self.shared,
        )  # fmt: skip

    def body(self, answer: list[float]) -> dict[str, Any]:
        data = [{"index": i, "object": "score", "score": score} for i, score in enumerate(answer)]
        return {"object": "list", "data": data}


class Rerank(_Scores[RerankRequest]):
    id_kind = "rerank"

    def make_ask(self) -> ScoreAsk:
        r = self.request
        return ScoreAsk(
            queries=[r.query],
            documents=r.read(),
            activation=False if r.raw_scores else r.activated,
            prompt_field="documents",
            **self.shared,
        )

    def whole(self, turns: Sequence[Turn]) -> bytes:
        r = self.request
        if r.texts is None:
            return super().whole(turns)
        scores = self.read(turns)
        ranks: list[dict[str, Any]] = [{"index": i, "score": scores[i]} for i in _order(scores)]
        if r.return_text:
            for rank in ranks:
                rank["text"] = r.texts[rank["index"]]
        return _encode(ranks)

    def body(self, answer: list[float]) -> dict[str, Any]:
        """Best first; documents of equal score keep their order."""
        r = self.request
        order = _order(answer)[: r.top_n or r.top_k]
        results: list[dict[str, Any]] = [{"index": i, "relevance_score": answer[i]} for i in order]
        if r.return_documents is not False:
            for result in results:
                result["document"] = r.shown(result["index"])
        return {"object": "list", "results": results}


# path -> request, how it is answered
ANSWERS: dict[str, tuple[type[PoolingBase], type[_Answer[Any, Any]]]] = {
    "/v1/embeddings": (EmbeddingRequest, Embeddings),
    "/pooling": (PoolingRequest, Pooling),
    "/classify": (ClassifyRequest, Classify),
    **dict.fromkeys(("/score", "/v1/score"), (ScoreRequest, Score)),
    **dict.fromkeys(("/rerank", "/v1/rerank", "/v2/rerank"), (RerankRequest, Rerank)),
}
REQUESTS = {f"POST {path}": kind for path, (kind, _) in ANSWERS.items()}


class PoolingDialect(Dialect):
    keeps = False
    routes: ClassVar[tuple[str, ...]] = tuple(REQUESTS)

    def parse(self, incoming: Incoming, served: Served) -> Exchange:
        kind, answer = ANSWERS[incoming.route.removeprefix("POST ")]
        request = parse(kind, incoming.body, served.max_values, served.lenient)
        served.check_model(request.model)
        request.check()
        return answer(request, served)


def _order(scores: Sequence[float]) -> list[int]:
    """The places of the documents, best first; documents of equal score keep their order."""
    return sorted(range(len(scores)), key=lambda i: -scores[i])


def _shown(pooled: Pooled, form: Encoded) -> str | list[Any]:
    """A list of numbers, or their bytes in base64, float32 and little-endian unless the request says otherwise."""
    if form.encoding_format != "base64":
        return _numbers(pooled)
    numbers: np.ndarray[Any, Any] = np.frombuffer(pooled.data, "<f4")
    if form.embed_dtype == "float16":
        numbers = numbers.astype(np.float16)
    elif form.embed_dtype == "bfloat16":
        bits = numbers.view(np.uint32)
        numbers = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)  # to the nearest, ties to even
    wanted = sys.byteorder if form.endianness == "native" else form.endianness or "little"
    if wanted != sys.byteorder:
        numbers = numbers.byteswap()
    return b64encode(numbers.tobytes()).decode()


def _numbers(pooled: Pooled) -> list[Any]:
    """As lists: of numbers, or of one list per token."""
    return memoryview(pooled.data).cast("f", pooled.shape).tolist()
