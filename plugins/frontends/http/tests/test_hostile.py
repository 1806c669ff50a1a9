"""Every field of every route with what no client should send: always an answer, never a fault of the server."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from lmkit.api import PoolerInfo
from lmkit_dialect_openai.schema import ChatRequest, CompletionRequest
from lmkit_dialect_pooling import dialect as pooling
from lmkit_http.info_schema import DetokenizeRequest, LoadAdapterRequest, TokenizeRequest, UnloadAdapterRequest
from lmkit_testing.serving import ServedLLM, scripted
from pydantic import BaseModel

CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
TOOL = {"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object"}}}
MESSAGES = [
    {"role": "system", "content": [{"type": "text", "text": "a"}]}, {"role": "user", "content": "b", "name": "c"},
    {"role": "assistant", "content": None, "tool_calls": [CALL], "reasoning_content": "r"},
    {"role": "tool", "content": "x", "tool_call_id": "1"},
]  # fmt: skip
CHAT = {"messages": MESSAGES, "tools": [TOOL], "max_tokens": 2}
ROUTES: dict[str, tuple[type[BaseModel], dict[str, Any]]] = {
    "/v1/chat/completions": (ChatRequest, CHAT),
    "/v1/completions": (CompletionRequest, {"prompt": "a", "max_tokens": 2}),
    "/tokenize": (TokenizeRequest, {"messages": MESSAGES}),
    "/detokenize": (DetokenizeRequest, {"tokens": [1]}),
    "/v1/load_lora_adapter": (LoadAdapterRequest, {"lora_name": "a", "lora_path": "b"}),
    "/v1/unload_lora_adapter": (UnloadAdapterRequest, {"lora_name": "a"}),
    **{path: (kind, {}) for path, (kind, _) in pooling.ANSWERS.items()},
}
VALUES = [
    r'"\ud800"', r'"a\udfffb"', r'"\u0000"', '"\\u0000/../x"', '""', '"~nobody"', "NaN", "-Infinity", "1e400",
    "-1e400",
    "1" * 400, "-" + "9" * 30, "1e-400", "[" * 100 + "]" * 100, "[" * 5000, '{"a":' * 100 + "1" + "}" * 100,
    r'{"\ud800": 1}', r'["\ud800"]', r'{"a": "\udc00"}', '{"": ""}', "[[]]", "[{}]", "null", "true", "-0",
    '"\ufeff"', "[1e400]",
    '{"a": NaN}', '[""]', '["\\u0000"]', "[-1]", "[99999999999]", '{"type": "json_schema"}',
    '{"type": "object", "a": 1e400}',
    r'[{"type":"text","text":"\ud800"}]', r'[{"role":"user","content":"\ud800"}]',
    '[{"role":"user","content":"\\u0000"}]',
]  # fmt: skip
BODIES = [
    b"", b" ", b"\x00", b"null", b"[]", b"{}", b"{", b'"', b"\xef\xbb\xbf{}", b"\xff\xfe{\x00}\x00",
    '{"prompt": "ä"}'.encode("latin-1"),
    '{"prompt": "a"}'.encode("utf-16"), '{"prompt": "a"}'.encode("utf-32"), b'{"prompt": "\xed\xa0\x80"}',
    b'{"prompt": "\xc0\x80"}',
    b'{"prompt": "a", "prompt": "b"}', b'{"prompt": "a"}{"prompt": "a"}', b'{"prompt": "a"}\x00',
    b"{'prompt': 1}", b'{"prompt": "a",}',
    b'{"prompt": "\n"}', b"[" * 100_000, b'{"a":' * 100_000, b'{"prompt": "' + b"\\" * 100_001, b"\x80" * 1000,
    b'{"messages": [' + b'{"role": "user", "content": "x"},' * 5 + b"]}", b"NaN", b"1e400", b'{"model": "\\ud800"}',
]  # fmt: skip


def served(pooled: bool) -> ServedLLM:
    llm = scripted("ab")
    pooler = PoolerInfo("embed", 4) if pooled else None
    llm.client.facts = msgspec.structs.replace(llm.facts, pooler=pooler, loads_adapters=True)  # type: ignore[misc]

    async def set_adapter(name: str, path: str | None) -> None:
        name.encode()
        (path or "").encode()

    llm.client.set_adapter = set_adapter  # type: ignore[method-assign]
    return llm


def spoiled(body: dict[str, Any], kind: type[BaseModel], value: str) -> list[bytes]:
    """The body with the value in place of every field, and of every text inside of those that it has."""
    mark = "@@here@@"
    found = [body | {f.alias or name: mark} for name, f in kind.model_fields.items()]

    def inside(node: Any, put: Any) -> None:
        items = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
        for key, member in items:
            copy = dict(node) if isinstance(node, dict) else list(node)
            copy[key] = mark
            found.append(put(copy))

            def deeper(new: Any, copy: Any = copy, key: Any = key) -> Any:
                changed = dict(copy) if isinstance(copy, dict) else list(copy)
                changed[key] = new
                return put(changed)

            inside(member, deeper)

    inside(body, lambda new: new)
    return list(dict.fromkeys(json.dumps(b).replace(f'"{mark}"', value).encode("utf-8") for b in found))


@pytest.mark.parametrize("path", [p for p in ROUTES if p not in ("/v1/score", "/v1/rerank", "/v2/rerank")])  # the same
async def test_every_field(connect: Any, path: str, caplog: pytest.LogCaptureFixture) -> None:
    kind, body = ROUTES[path]
    client = connect(served(path in pooling.ANSWERS))
    seen = set()
    for i, value in enumerate(VALUES):
        for content in spoiled(body, kind, value)[i % 3 :: 3]:
            response = await client.post(path, content=content)
            assert response.status_code < 500, (content[:500], response.text)
            seen.add(response.status_code)
            if response.status_code != 200:
                assert response.json()["error"]["message"], content[:500]
                assert len(response.content) < 3000, content[:500]
    assert 400 in seen
    assert not [r for r in caplog.records if r.name.startswith("lmkit")]


@pytest.mark.parametrize("path", ROUTES)
async def test_every_body(connect: Any, path: str) -> None:
    client = connect(served(path in pooling.ANSWERS))
    for content in BODIES:
        response = await client.post(path, content=content)
        assert response.status_code < 500, (content[:100], response.text)
        assert response.status_code == 200 or response.json()["error"]["message"]
