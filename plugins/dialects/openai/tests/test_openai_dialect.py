import json
from typing import Any

from lmkit_testing import Asked, DialectConformance

CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "Hello"}]}
PROMPT: dict[str, Any] = {"prompt": "Hello", "max_tokens": 99}


class TestOpenAI(DialectConformance):
    plugin = "dialect:openai"
    asked = (
        Asked("POST /v1/chat/completions", CHAT, CHAT | {"stream": True}),
        Asked("POST /v1/completions", PROMPT, PROMPT | {"stream": True}),
    )

    def text(self, answer: bytes, streamed: bool) -> str:
        lines = answer.decode().splitlines()
        events = [line.removeprefix("data: ") for line in lines if line.startswith("data: {")] if streamed else [answer]
        choices = [choice for event in events for choice in json.loads(event)["choices"]]
        parts = [choice.get("delta") or choice.get("message") or {"content": choice.get("text")} for choice in choices]
        return "".join(part.get("content") or "" for part in parts)
