"""langchain-openai by chat and by Responses: the standard tests of langchain-tests, and completions and embeddings."""

from __future__ import annotations

import os
from typing import Any

import pytest
from langchain_core.language_models import BaseChatModel
from langchain_openai import ChatOpenAI, OpenAI, OpenAIEmbeddings
from langchain_tests.integration_tests import ChatModelIntegrationTests, EmbeddingsIntegrationTests

TOO_SMALL = pytest.mark.xfail(
    raises=AssertionError, reason="the call is well formed, and the demo model does not understand what for"
)


class _Chat(ChatModelIntegrationTests):
    responses = False

    @property
    def chat_model_class(self) -> type[BaseChatModel]:
        return ChatOpenAI

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {
            "model": "demo",
            "base_url": os.environ["LMKIT_URL"] + "/v1",
            "api_key": "none",
            "temperature": 0,
            "max_tokens": 200,
            "max_retries": 0,
            "use_responses_api": self.responses,
            "stream_usage": True,
        }

    @property
    def model_override_value(self) -> str:
        return "demo"

    @TOO_SMALL
    def test_tool_calling(self, model: BaseChatModel) -> None:
        super().test_tool_calling(model)

    @TOO_SMALL
    async def test_tool_calling_async(self, model: BaseChatModel) -> None:
        await super().test_tool_calling_async(model)

    @TOO_SMALL
    def test_unicode_tool_call_integration(self, model: BaseChatModel) -> None:
        super().test_unicode_tool_call_integration(model)


class TestStandardOfChat(_Chat):
    pass


class TestStandardOfResponses(_Chat):
    responses = True


class TestStandardOfEmbeddings(EmbeddingsIntegrationTests):
    @property
    def embeddings_class(self) -> type[OpenAIEmbeddings]:
        return OpenAIEmbeddings

    @property
    def embedding_model_params(self) -> dict[str, Any]:
        return {"model": "demo", "base_url": os.environ["LMKIT_EMBED_URL"] + "/v1", "api_key": "none",
                "check_embedding_ctx_length": False}  # fmt: skip


@pytest.mark.parametrize("stream", [False, True])
def test_completions(url: str, stream: bool) -> None:
    llm = OpenAI(model="demo", base_url=f"{url}/v1", api_key="none", temperature=0, max_tokens=8)
    assert "".join(llm.stream("Hello")) if stream else llm.invoke("Hello")
