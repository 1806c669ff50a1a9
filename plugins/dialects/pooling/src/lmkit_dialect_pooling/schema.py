"""Requests of the pooling routes: strict, closed, bounded, like those of the OpenAI dialects."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from lmkit.api import MAX_DIMENSIONS, MAX_TOKENS, PoolingTask
from lmkit_http.dialect import UnsupportedField
from lmkit_http.strict import MAX_IDS, Content, Echoed, Ids, Open, Refused
from pydantic import Field

MAX_INPUTS = 2048  # as in the OpenAI API
Texts = Annotated[list[Content], Field(fail_fast=True, min_length=1, max_length=MAX_INPUTS)]
Input = Annotated[
    Content | Ids | Texts | Annotated[list[Ids], Field(fail_fast=True, min_length=1, max_length=MAX_INPUTS)],
    Field(union_mode="left_to_right"),
]


class PoolingBase(Open):
    """Fields of every pooling route. `truncate_prompt_tokens`: -1 cuts to what the model reads."""

    droppable: ClassVar[Mapping[str, tuple[Any, ...]]] = {"user": ()}
    model: Annotated[str, Field(max_length=512)] | None = None
    truncate_prompt_tokens: Annotated[int, Field(ge=-1, le=MAX_TOKENS)] | None = None
    priority: Annotated[int, Field(ge=-(1 << 31), le=1 << 31)] | None = None

    def check(self) -> None:
        """What the types cannot say. Raises RequestError."""
        if self.truncate_prompt_tokens == 0:
            raise UnsupportedField("truncate_prompt_tokens", "truncate_prompt_tokens is a number of tokens, or -1")


class InputRequest(PoolingBase):
    max_values: ClassVar[int] = MAX_IDS
    input: Input
    add_special_tokens: bool | None = None

    def prompts(self) -> list[str] | list[list[int]]:
        if isinstance(self.input, str):
            return [self.input]
        return [self.input] if isinstance(self.input[0], int) else self.input


class EmbeddingRequest(InputRequest):
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, Field(ge=1, le=MAX_DIMENSIONS)] | None = None


class ClassifyRequest(InputRequest):
    activation: bool | None = None


class PoolingRequest(InputRequest):
    task: PoolingTask | None = None
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, Field(ge=1, le=MAX_DIMENSIONS)] | None = None
    activation: bool | None = None


class ScoreRequest(PoolingBase):
    """Texts under any of the names in use."""

    text_1: Content | Texts | None = None
    text_2: Content | Texts | None = None
    queries: Content | Texts | None = None
    documents: Content | Texts | None = None
    activation: bool | None = None

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


class RerankRequest(PoolingBase):
    refused: ClassVar[Mapping[str, Refused]] = {
        "rank_fields": Refused("write all that is to be read into text", (["text"],)),
        "max_tokens_per_doc": Refused("send truncate_prompt_tokens"),
        "max_chunks_per_doc": Refused("send truncate_prompt_tokens", (1,)),
    }
    query: Content
    documents: Annotated[list[Content | Document], Field(fail_fast=True, min_length=1, max_length=MAX_INPUTS)]
    top_n: Annotated[int, Field(ge=1, le=MAX_INPUTS)] | None = None
    return_documents: bool | None = None
    activation: bool | None = None

    def shown(self, index: int) -> dict[str, Any]:
        """A document as it is given back."""
        document = self.documents[index]
        return {"text": document} if isinstance(document, str) else document.model_dump()

    def texts(self) -> list[str]:
        return [d if isinstance(d, str) else d.text for d in self.documents]


def _listed(texts: str | list[str]) -> list[str]:
    return [texts] if isinstance(texts, str) else texts
