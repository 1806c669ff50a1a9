import asyncio
import json

import httpx
from lmkit_http.app import build_app
from lmkit_testing import Asked, DialectConformance
from lmkit_testing.serving import scripted


class TestAsk(DialectConformance):
    plugin = "dialect:ask"
    asked = (Asked("POST /ask", {"question": "Hi"}, {"question": "Hi", "stream": True}),)

    def text(self, answer, streamed):
        return "".join(json.loads(line).get("piece" if streamed else "answer", "") for line in answer.splitlines())


async def talk():
    transport = httpx.ASGITransport(build_app(scripted("hello there")))
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        answer = await client.post("/ask", json={"question": "Hi"})
        assert (answer.status_code, answer.json()) == (200, {"answer": "hello there", "finish": "stop"})
        answer = await client.post("/ask", json={"question": "Hi", "stream": True})
        *pieces, end = map(json.loads, answer.text.splitlines())
        assert ("".join(piece["piece"] for piece in pieces), end) == ("hello there", {"end": True})
        cut = await client.post("/ask", json={"question": "Hi", "tokens": 5})
        assert cut.json() == {"answer": "hello", "finish": "length"}
        for wrong, field in (
            ({"question": 1}, "question"),
            ({"question": "Hi", "loud": True}, "loud"),
            ({}, "question"),
        ):
            refused = await client.post("/ask", json=wrong)
            assert (refused.status_code, refused.json()["field"]) == (400, field)
        assert (await client.get("/ask")).json() == {"model": "scripted", "tokens": 256}


def test_questions_and_answers():
    asyncio.run(talk())
