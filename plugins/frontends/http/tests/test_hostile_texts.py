"""A checkpoint whose template or tokenizer takes too much for some messages: those get 400, others answers."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
from lmkit_http.settings import ServerSettings
from lmkit_killable import Limits
from lmkit_testing.serving import byte_tokenizer, listening, scripted
from lmkit_tokenizer_json import apart
from lmkit_tokenizer_json.apart import ApartRenderer, open_tokenizer

LISTS = "{% set ns = namespace(x=[1]) %}{% for i in range(50) %}{% set ns.x = [ns.x, ns.x] %}{% endfor %}"
TEMPLATE = "{% if messages[0].content == 'bomb' %}" + LISTS + "{{ ns.x|tojson }}{% endif %}{{ messages[0].content }}"


async def test_who_sends_a_bomb_gets_400_and_nobody_else_notices(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # One small limit each: on a busy machine, growing to the memory's limit can take longer than 0.3 s of CPU time.
    monkeypatch.setattr(apart, "_render_limits", lambda nbytes: Limits(0.3, 1 << 30, 60.0))
    monkeypatch.setattr(apart, "_encode_limits", lambda nbytes: Limits(30.0, 128 << 20, 60.0))
    byte_tokenizer(TEMPLATE)._raw.save(str(tmp_path / "tokenizer.json"))
    written = json.loads((tmp_path / "tokenizer.json").read_text())
    written["normalizer"] = {
        "type": "Sequence",
        "normalizers": [{"type": "Replace", "pattern": {"String": "~"}, "content": "~" * 10}] * 9,
    }
    (tmp_path / "tokenizer.json").write_text(json.dumps(written))
    tokenizer = open_tokenizer(tmp_path, chat_template=TEMPLATE)
    llm = scripted("ok")
    renderer = ApartRenderer(tokenizer.apart, TEMPLATE, {})
    llm.text = replace(llm.text, tokenizer=tokenizer, renderer=renderer)
    async with listening(llm, ServerSettings(port=0)) as url, httpx.AsyncClient(base_url=url, timeout=60) as client:

        async def ask(content: str) -> httpx.Response:
            return await client.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": content}]})

        assert (await ask("hello")).status_code == 200
        bombs = [asyncio.ensure_future(ask(content)) for content in ("bomb", "~~")]
        lags = []
        while not all(bomb.done() for bomb in bombs):
            begin = time.monotonic()
            assert (await client.get("/live")).status_code == 200
            lags.append(time.monotonic() - begin)
            await asyncio.sleep(0.02)
        template, text = await asyncio.gather(*bombs)
        assert (template.status_code, template.json()["error"]["code"]) == (400, "chat-template")
        assert "CPU time" in template.json()["error"]["message"]
        assert (text.status_code, text.json()["error"]["code"]) == (400, "invalid-request")
        assert "MiB of memory" in text.json()["error"]["message"]
        assert sorted(lags)[len(lags) // 2] < 0.25
        assert (await ask("hello")).status_code == 200
