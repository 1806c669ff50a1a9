"""Requests of the pooling routes: strict, closed, bounded, like those of the OpenAI dialects."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from lmkit.api import MAX_DIMENSIONS, MAX_TOKENS, PoolingTask
from lmkit_http.dialect import UnsupportedField
from lmkit_http.strict import (
    MAX_IDS,
    MAX_MESSAGES,
    Content,
    Echoed,
    Ids,
    InvalidBody,
    Message,
    Open,
    Refused,
    Strict,
)
from pydantic import Field

from lmkit_dialect_pooling.fields import DROPPABLE, REFUSED

MAX_INPUTS = 2048  # as in the OpenAI API
Texts = Annotated[list[Content], Field(fail_fast=True, min_length=1, max_length=MAX_INPUTS)]
Input = Annotated[
    Content | Ids | Texts | Annotated[list[Ids], Field(fail_fast=True, min_length=1, max_length=MAX_INPUTS)],
    Field(union_mode="left_to_right"),
]


class PoolingBase(Open):
    """Fields of every pooling route. `truncate_prompt_tokens`: -1 cuts to what the model reads."""

    refused: ClassVar[Mapping[str, Refused]] = REFUSED
    droppable: ClassVar[Mapping[str, tuple[Any, ...]]] = DROPPABLE
    model: Annotated[str, Field(max_length=512)] | None = None
    truncate_prompt_tokens: Annotated[int, Field(ge=-1, le=MAX_TOKENS)] | None = None
    priority: Annotated[int, Field(ge=-(1 << 31), le=1 << 31)] | None = None

    def check(self) -> None:
        """What the types cannot say. Raises RequestError."""
        if self.truncate_prompt_tokens == 0:
            raise UnsupportedField("truncate_prompt_tokens", "truncate_prompt_tokens is a number of tokens, or -1")


class Activated(Strict):
    """Whether scores and classes go through the activation of the checkpoint, under either name."""

    activation: bool | None = None
    use_activation: bool | None = None

    @property
    def activated(self) -> bool | None:
        return self.activation if self.activation is not None else self.use_activation


class InputRequest(PoolingBase):
    """Texts, token ids, or one conversation that the chat template renders."""

    max_values: ClassVar[int] = MAX_IDS
    input: Input | None = None
    messages: Annotated[list[Message], Field(fail_fast=True, min_length=1, max_length=MAX_MESSAGES)] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None

    def check(self) -> None:
        super().check()
        if self.input is None and self.messages is None:
            raise InvalidBody("input is required", "input")
        if self.input is not None and self.messages is not None:
            raise UnsupportedField("messages", "input and messages exclude each other", fix="send one of them")
        for name in ("add_generation_prompt", "continue_final_message"):
            if self.messages is None and getattr(self, name):
                self.dropped.add(name)
        if getattr(self, "encoding_format", None) != "base64":
            self.dropped.update(n for n in ("embed_dtype", "endianness") if getattr(self, n, None) is not None)

    def prompts(self) -> list[str] | list[list[int]]:
        if self.input is None:
            return []
        if isinstance(self.input, str):
            return [self.input]
        return [self.input] if isinstance(self.input[0], int) else self.input


class Encoded(Strict):
    """How the numbers of an answer are written."""

    encoding_format: Literal["float", "base64"] | None = None
    embed_dtype: Literal["float32", "float16", "bfloat16"] | None = None  # in base64
    endianness: Literal["native", "little", "big"] | None = None  # in base64


class EmbeddingRequest(InputRequest, Encoded):
    normalize: bool | None = None  # the checkpoint decides, so only what it does is taken
    dimensions: Annotated[int, Field(ge=1, le=MAX_DIMENSIONS)] | None = None


class ClassifyRequest(InputRequest, Activated):
    pass


class PoolingRequest(InputRequest, Encoded, Activated):
    task: PoolingTask | None = None
    dimensions: Annotated[int, Field(ge=1, le=MAX_DIMENSIONS)] | None = None


class ScoreRequest(PoolingBase, Activated):
    """Texts under any of the names in use."""

    text_1: Content | Texts | None = None
    text_2: Content | Texts | None = None
    queries: Content | Texts | None = None
    documents: Content | Texts | None = None

    def sides(self) -> tuple[list[str], list[str]]:
        """Queries and documents."""
        first = self.text_1 if self.text_1 is not None else self.queries
        second = self.text_2 if self.text_2 is not None else self.documents
        assert first is not None
        assert second is not None
        return _listed(first), _listed(second)

    def check(self) -> None:
        super().check()
        for old, new in (("text_1", "queries"), ("text_2", "documents")):
            if (getattr(self, old) is None) == (getattr(self, new) is None):
                raise UnsupportedField(new, f"give either {new} or {old}")


class Document(Echoed):
    """A text with whatever a client keeps beside it, which comes back where documents do."""

    text: Content


class RerankRequest(PoolingBase, Activated):
    """Documents, or `texts` with the fields of text-embeddings-inference, which has an answer of its own."""

    refused: ClassVar[Mapping[str, Refused]] = {
        **REFUSED,
        "rank_fields": Refused("write all that is to be read into text", (["text"],)),
        "max_tokens_per_doc": Refused("send truncate_prompt_tokens"),
        "max_chunks_per_doc": Refused("send truncate_prompt_tokens", (1,)),
    }
    query: Content
    documents: (
        Annotated[list[Content | Document], Field(fail_fast=True, min_length=1, max_length=MAX_INPUTS)] | None
    ) = None
    texts: Texts | None = None
    raw_scores: bool | None = None
    return_text: bool | None = None
    truncate: bool | None = None
    top_n: Annotated[int, Field(ge=1, le=MAX_INPUTS)] | None = None
    top_k: Annotated[int, Field(ge=1, le=MAX_INPUTS)] | None = None  # another name of top_n
    return_documents: bool | None = None

    def check(self) -> None:
        super().check()
        if (self.documents is None) == (self.texts is None):
            raise InvalidBody("documents are required, or texts", "documents")
        if self.texts is None:
            self.dropped.update(name for name in ("raw_scores", "return_text", "truncate") if getattr(self, name))

    def shown(self, index: int) -> dict[str, Any]:
        """A document as it is given back."""
        document = (self.documents or [])[index]
        return {"text": document} if isinstance(document, str) else document.model_dump()

    def read(self) -> list[str]:
        """The texts that are compared with the query."""
        return self.texts or [d if isinstance(d, str) else d.text for d in self.documents or ()]


def _listed(texts: str | list[str]) -> list[str]:
    return [texts] if isinstance(texts, str) else texts
