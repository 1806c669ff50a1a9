"""Fields of the pooling routes: conversations, number formats, and bodies in the form of other servers."""

from __future__ import annotations

import struct
from base64 import b64decode
from dataclasses import replace
from typing import Any

import httpx
import msgspec
import numpy as np
import pytest
from lmkit.api import Pooled, PoolerInfo
from lmkit_dialect_pooling.dialect import _shown
from lmkit_dialect_pooling.schema import Encoded
from lmkit_http.app import build_app
from lmkit_testing.serving import ServedLLM, scripted
from lmkit_tokenizer_json.render import Renderer

VECTOR = [1.0, -2.5, 3.140625, 1e-3]
POOLED = Pooled(struct.pack("<4f", *VECTOR), (4,))


def embedder(**pooler: Any) -> ServedLLM:
    llm = scripted("ok", max_length=100)
    llm.client.facts = msgspec.structs.replace(llm.facts, pooler=PoolerInfo("embed", 4, **pooler))  # type: ignore[misc]
    llm.text = replace(llm.text, renderer=Renderer("{% for m in messages %}<{{ m.content }}>{% endfor %}", {}))
    return llm


async def post(llm: ServedLLM, path: str, body: dict[str, Any]) -> httpx.Response:
    transport = httpx.ASGITransport(build_app(llm))
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        return await client.post(path, json=body)


@pytest.mark.parametrize("path", ["/v1/embeddings", "/pooling"])
async def test_a_conversation_is_rendered_and_pooled(path: str) -> None:
    llm = embedder()
    answer = await post(llm, path, {"messages": [{"role": "user", "content": "ab"}]})
    assert answer.status_code == 200, answer.text
    (request,) = llm.client.requests  # type: ignore[attr-defined]
    assert llm.text.tokenizer.decode(request.token_ids) == "<ab>"
    both = await post(embedder(), path, {"input": "x", "messages": [{"role": "user", "content": "ab"}]})
    assert (both.status_code, both.json()["error"]["param"]) == (400, "messages")
    neither = await post(embedder(), path, {})
    assert (neither.status_code, neither.json()["error"]["param"]) == (400, "input")


@pytest.mark.parametrize("endianness", [None, "little", "big"])
@pytest.mark.parametrize(("dtype", "code"), [(None, "f4"), ("float32", "f4"), ("float16", "f2")])
def test_numbers_in_base64(dtype: Any, code: str, endianness: Any) -> None:
    text = _shown(POOLED, Encoded(encoding_format="base64", embed_dtype=dtype, endianness=endianness))
    order = ">" if endianness == "big" else "<"
    numbers = np.frombuffer(b64decode(text), f"{order}{code}")  # type: ignore[arg-type]
    np.testing.assert_allclose(numbers, VECTOR, rtol=1e-3)


def test_bfloat16_is_rounded_to_the_nearest() -> None:
    text = _shown(POOLED, Encoded(encoding_format="base64", embed_dtype="bfloat16"))
    bits = np.frombuffer(b64decode(text), "<u2").astype(np.uint32) << 16  # type: ignore[arg-type]
    np.testing.assert_allclose(bits.view(np.float32), VECTOR, rtol=2**-8)
    assert bits[2] == 0x40490000  # 3.140625


async def test_formats_without_base64_change_nothing_and_are_named() -> None:
    answer = await post(embedder(), "/v1/embeddings", {"input": "x", "embed_dtype": "float16", "endianness": "big"})
    assert answer.headers["x-lmkit-warnings"] == "dropped: embed_dtype, endianness"


async def test_rerank_in_the_form_of_text_embeddings_inference() -> None:
    body = {"query": "a", "texts": ["x", "y"], "raw_scores": True, "return_text": True, "truncate": True}
    answer = await post(embedder(), "/rerank", body)
    assert answer.json() == [{"index": 0, "score": 0.0, "text": "x"}, {"index": 1, "score": 0.0, "text": "y"}]
    assert (await post(embedder(), "/invocations", body)).json() == answer.json()
    cut = await post(embedder(), "/rerank", {"query": "a", "texts": ["x" * 300], "truncate": True})
    assert cut.status_code == 200, cut.text
    for wrong in ({"query": "a"}, {"query": "a", "texts": ["x"], "documents": ["y"]}):
        assert (await post(embedder(), "/rerank", wrong)).status_code == 400


async def test_only_the_normalization_of_the_checkpoint_is_taken() -> None:
    for normalizes in (True, False):
        for wanted in (True, False):
            answer = await post(embedder(normalize=normalizes), "/v1/embeddings", {"input": "x", "normalize": wanted})
            assert answer.status_code == (200 if wanted == normalizes else 400)


async def test_words_that_the_model_expects_before_a_text_are_refused() -> None:
    for name in ("input_type", "prompt_name", "instruction"):
        answer = await post(embedder(), "/v1/embeddings", {"input": "x", name: "query"})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, name)


async def test_use_activation_is_another_name_of_activation() -> None:
    for name in ("activation", "use_activation"):
        llm = embedder()
        answer = await post(llm, "/pooling", {"input": "x", name: False})
        assert answer.status_code == 200, answer.text
        (request,) = llm.client.requests  # type: ignore[attr-defined]
        assert request.pooling.activation is False


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("/v1/embeddings", {"input": [[1, 99_999_999]]}, "input"), ("/pooling", {"input": ""}, "input"),
        ("/v1/embeddings", {"input": ["x", ""]}, "input"), ("/rerank", {"query": "x", "documents": [""]}, "documents"),
        ("/score", {"queries": "x", "documents": "y" * 500}, "documents"),
    ],
)  # fmt: skip
async def test_errors_name_the_field_of_the_request(path: str, body: dict[str, Any], field: str) -> None:
    answer = await post(embedder(), path, body)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["param"] == field
    assert "prompt:" not in error["message"]
