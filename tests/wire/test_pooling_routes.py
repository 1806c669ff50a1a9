"""Embeddings, scores and labels over a real socket, with the official client where there is one."""

from __future__ import annotations

import base64
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
from lmkit import LLM, AsyncLLM
from lmkit.api import RequestError, UnsupportedTask
from lmkit.config import from_options
from lmkit_testing.pooling import pooling_checkpoint
from lmkit_testing.published import minilm
from lmkit_testing.serving import ServedLLM, listening, real, scripted

TEXTS = ["A cat on a mat", "A feline on a rug", "Interest rates rose"]


@asynccontextmanager
async def serving(path: Path, **options: object) -> AsyncIterator[tuple[str, ServedLLM]]:
    """A real engine in a thread behind a real socket."""
    async with (
        real(str(path), served_name="m", dtype="float32", kv_memory="8MiB", **options) as llm,
        listening(llm) as url,
    ):
        yield url, llm


async def post(url: str, path: str, **body: Any) -> tuple[int, dict[str, Any]]:
    async with httpx.AsyncClient(timeout=60) as client:
        response = await client.post(url + path, json=body)
    return response.status_code, response.json()


async def test_embeddings_with_the_official_client() -> None:
    async with serving(minilm()) as (url, llm), openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none") as client:
        whole = await client.embeddings.create(model="m", input=TEXTS)  # asks for base64 itself
        vectors = np.array([d.embedding for d in whole.data], np.float32)
        assert vectors.shape == (3, 384)
        assert whole.usage.prompt_tokens == sum(len(llm.text.encode_prompt(t)) for t in TEXTS)
        assert vectors[0] @ vectors[1] > vectors[0] @ vectors[2]

        floats = await client.embeddings.create(model="m", input=TEXTS[0], encoding_format="float")
        assert np.allclose(floats.data[0].embedding, vectors[0], atol=1e-6)
        ids = [llm.text.encode_prompt(t) for t in TEXTS]
        for given in (ids, ids[0]):
            found = await client.embeddings.create(model="m", input=given)
            assert np.allclose(found.data[0].embedding, vectors[0], atol=1e-6)
        cut = await client.embeddings.create(model="m", input=TEXTS[0], dimensions=32)
        assert np.allclose(cut.data[0].embedding, vectors[0][:32] / np.linalg.norm(vectors[0][:32]), atol=1e-6)

        models = await client.models.list()
        assert models.data[0].capabilities["tasks"] == ["embed", "token_embed"]

        with pytest.raises(openai.BadRequestError, match="302 tokens"):
            await client.embeddings.create(model="m", input="x " * 300)
        with pytest.raises(openai.BadRequestError, match="cannot generate"):
            await client.chat.completions.create(model="m", messages=[{"role": "user", "content": "Hello"}])
        with pytest.raises(openai.NotFoundError):
            await client.embeddings.create(model="other", input="x")


async def test_shapes_and_refusals_of_the_other_routes() -> None:
    async with serving(minilm()) as (url, _):
        _, plain = await post(url, "/v1/embeddings", input=TEXTS[0], encoding_format="base64")
        raw = np.frombuffer(base64.b64decode(plain["data"][0]["embedding"]), "<f4")
        status, pooled = await post(url, "/pooling", input=TEXTS[0], task="token_embed")
        assert status == 200
        assert np.array(pooled["data"][0]["data"]).shape == (7, 384)
        assert (pooled["object"], pooled["data"][0]["object"]) == ("list", "pooling")

        status, ranked = await post(
            url, "/v1/rerank", query=TEXTS[0], documents=[TEXTS[2], {"text": TEXTS[1]}], top_n=1
        )
        assert status == 200
        (best,) = ranked["results"]
        assert (best["index"], best["document"]) == (1, {"text": TEXTS[1]})
        more = {"text": TEXTS[1], "id": 7, "title": "t"}  # what is kept beside a text comes back with it
        cohere = {"documents": [TEXTS[2], more], "rank_fields": ["text"], "max_chunks_per_doc": None}
        _, kept = await post(url, "/v2/rerank", query=TEXTS[0], return_documents=True, **cohere)
        assert [result["document"] for result in kept["results"]] == [more, {"text": TEXTS[2]}]
        assert (kept["object"], kept["results"][0]["relevance_score"]) == ("list", best["relevance_score"])
        _, bare = await post(url, "/v1/rerank", query=TEXTS[0], return_documents=False, **cohere)
        assert not [result for result in bare["results"] if "document" in result]
        _, scored = await post(url, "/score", queries=TEXTS[0], documents=TEXTS[1:])
        assert scored["data"][0]["score"] == pytest.approx(best["relevance_score"], abs=1e-6)
        _, same = await post(url, "/score", text_1=[TEXTS[0]] * 2, text_2=TEXTS[1:])
        assert [d["score"] for d in same["data"]] == pytest.approx([d["score"] for d in scored["data"]], abs=1e-6)
        _, cut = await post(url, "/v1/embeddings", input=f"{TEXTS[0]} {'x ' * 500}", truncate_prompt_tokens=-1)
        assert cut["usage"]["prompt_tokens"] == 256
        assert raw.shape == (384,)

        for path, body, words in (
            ("/classify", {"input": "x"}, "cannot classify"),
            ("/v1/embeddings", {"input": []}, "input"),
            ("/v1/embeddings", {"input": "x", "dimensions": 999}, "384"),
            ("/v1/embeddings", {"input": [[1, 99999999]]}, "30522"),
            ("/v1/embeddings", {"input": "x", "truncate_prompt_tokens": 0}, "truncate"),
            ("/score", {"queries": "a"}, "documents"),
            ("/score", {"queries": ["a", "b"], "documents": ["a", "b", "c"]}, "as many"),
            ("/rerank", {"query": "a", "documents": []}, "documents"),
            ("/rerank", {"query": "a", "documents": ["b"], "rank_fields": ["title"]}, "into text"),
            ("/rerank", {"query": "a", "documents": ["b"], "max_tokens_per_doc": 5}, "truncate_prompt_tokens"),
            ("/v1/completions", {"prompt": "x"}, "cannot generate"),
        ):
            status, answer = await post(url, path, **body)
            assert status == 400, (path, answer)
            assert words in answer["error"]["message"], (path, answer)


async def test_classes_with_labels(tmp_path: Path) -> None:
    labels = {0: "good", 1: "bad", 2: "so so"}
    path = pooling_checkpoint("BertConfig", "BertForSequenceClassification", tmp_path, id2label=labels, num_labels=3)
    async with serving(path) as (url, _):
        status, answer = await post(url, "/classify", input=["one text", "another one"])
        assert status == 200
        for item in answer["data"]:
            assert sum(item["probs"]) == pytest.approx(1.0)
            assert item["label"] == labels[int(np.argmax(item["probs"]))]
            assert item["num_classes"] == 3
        _, raw = await post(url, "/classify", input="one text", activation=False)
        softmax = np.exp(raw["data"][0]["probs"]) / np.exp(raw["data"][0]["probs"]).sum()
        assert softmax.tolist() == pytest.approx(answer["data"][0]["probs"], abs=1e-6)
        status, refused = await post(url, "/rerank", query="a", documents=["b"])  # three classes give no one score
        assert (status, refused["error"]["code"]) == (400, "unsupported-task")


async def test_many_inputs_are_not_refused_for_their_number(tmp_path: Path) -> None:
    """More than may wait in the engine's queue."""
    path = pooling_checkpoint("BertConfig", "BertModel", tmp_path)
    async with serving(path, max_waiting=64, max_rows=4) as (url, _):
        status, answer = await post(url, "/v1/embeddings", input=[f"text {i}" for i in range(300)])
        assert status == 200
        assert [d["index"] for d in answer["data"]] == list(range(300))


async def test_every_door_gives_the_same_vectors(tmp_path: Path) -> None:
    """LLM, AsyncLLM and HTTP; and all refuse the same."""
    path = str(pooling_checkpoint("BertConfig", "BertModel", tmp_path))
    options = {"model": path, "dtype": "float32", "kv_memory": "8MiB"}
    llm_async = await AsyncLLM.start(from_options(options))
    with LLM(**options) as llm:
        async with llm_async, listening(llm_async) as url:
            whole, asynchronous = llm.embed(TEXTS, dimensions=8), await llm_async.embed(TEXTS, dimensions=8)
            _, answer = await post(url, "/v1/embeddings", input=TEXTS, dimensions=8)
            served = [d["embedding"] for d in answer["data"]]
            for one, other, third in zip(whole, asynchronous, served, strict=True):
                assert one.data.tolist() == pytest.approx(other.data.tolist(), abs=1e-6)
                assert one.data.tolist() == pytest.approx(third, abs=1e-6)
                assert one.prompt_token_ids == other.prompt_token_ids
            scores = llm.score(TEXTS[0], TEXTS[1:])
            assert await llm_async.score(TEXTS[0], TEXTS[1:]) == pytest.approx(scores, abs=1e-6)
            _, answer = await post(url, "/score", queries=TEXTS[0], documents=TEXTS[1:])
            assert [d["score"] for d in answer["data"]] == pytest.approx(scores, abs=1e-6)
            for wrong in ([[1, 10**9]], ["x " * 3000], [[]]):
                with pytest.raises(RequestError) as sync:
                    llm.embed(["fine", *wrong])
                with pytest.raises(RequestError) as later:
                    await llm_async.embed(["fine", *wrong])
                assert str(sync.value) == str(later.value)
                assert str(sync.value).startswith("prompt 1: ")
            with pytest.raises(UnsupportedTask):
                await llm_async.classify("x")


async def test_a_generating_model_refuses() -> None:
    async with listening(scripted("Hello")) as url:
        for path, body in (
            ("/v1/embeddings", {"input": "x"}),
            ("/classify", {"input": "x"}),
            ("/pooling", {"input": "x"}),
            ("/score", {"queries": "x", "documents": "y"}),
            ("/v2/rerank", {"query": "x", "documents": ["y"]}),
        ):
            status, answer = await post(url, path, **body)
            assert (status, answer["error"]["code"]) == (400, "unsupported-task")
            assert "generate" in answer["error"]["message"]
