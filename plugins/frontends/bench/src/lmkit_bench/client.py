"""A client that only measures: one streamed answer over the OpenAI API, and when each event came."""

from __future__ import annotations

import asyncio
from time import perf_counter
from typing import Any

import msgspec
from lmkit.api import ConfigError, EngineError
from lmkit.plugins.catalog import install

from lmkit_bench.stats import Timing
from lmkit_bench.workload import Prompt

try:
    import httpx
except ImportError as e:
    raise ConfigError("measuring a server needs httpx", fix=install("lmkit-bench", "serve")) from e

DATA, DONE = "data:", "[DONE]"
CONNECT_SECONDS = 10.0


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None


class _Choice(msgspec.Struct):
    text: str = ""
    delta: _Delta | None = None

    @property
    def has_text(self) -> bool:
        return bool(self.text or (self.delta is not None and (self.delta.content or self.delta.reasoning_content)))


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


_decode = msgspec.json.Decoder(_Chunk).decode


class Client:
    """Streams from one server. Use it in an `async with`.

    `timeout` bounds the silence between two events, in seconds: a request that waits longer counts as failed.
    """

    def __init__(
        self, url: str, *, model: str = "", api_key: str = "", timeout: float = 600.0, chat: bool = False,
        ignore_eos: bool = False,
    ) -> None:  # fmt: skip
        """`chat`: texts go to /v1/chat/completions. `ignore_eos`: ask for answers of full length, with a field that the
        OpenAI API has not. Raises ConfigError when `url` is none."""
        if not url.startswith(("http://", "https://")):
            raise ConfigError(f"{url!r} is no address of a server", fix="write http://HOST:PORT")
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        self._http = httpx.AsyncClient(
            base_url=url.rstrip("/").removesuffix("/v1"), headers=headers, limits=limits,
            timeout=httpx.Timeout(timeout, connect=CONNECT_SECONDS),
        )  # fmt: skip
        self.model = model
        self._path = "/v1/chat/completions" if chat else "/v1/completions"
        self._chat, self._more = chat, {"ignore_eos": True} if ignore_eos else {}

    async def open(self) -> None:
        """Finds the model's name. Raises EngineError when the server does not answer as one should."""
        if self.model:
            return
        try:
            answer = await self._http.get("/v1/models")
            answer.raise_for_status()
            self.model = answer.json()["data"][0]["id"]
        except (httpx.HTTPError, LookupError, ValueError, TypeError) as e:
            raise EngineError(
                f"{self._http.base_url} does not say what it serves: {type(e).__name__}: {e}",
                fix="check --url, --api-key, and that the server is ready",
            ) from e

    async def complete(self, prompt: Prompt) -> Timing:
        """One request of greedy tokens. What goes wrong is in the timing, not raised."""
        asked = {"messages": [{"role": "user", "content": prompt.prompt}]} if self._chat else {"prompt": prompt.prompt}
        body = {
            "model": self.model, **asked, "max_tokens": prompt.num_output, "temperature": 0, **self._more,
            "stream": True, "stream_options": {"include_usage": True},
        }  # fmt: skip
        data = msgspec.json.encode(body)
        headers = {"Content-Type": "application/json"}
        timing = Timing(perf_counter())
        try:
            async with self._http.stream("POST", self._path, content=data, headers=headers) as response:
                if response.status_code != 200:
                    text = (await response.aread()).decode(errors="replace")
                    timing.error = f"HTTP {response.status_code}: {text[:300]}"
                    return timing
                await self._read(response, timing)
        except (httpx.HTTPError, msgspec.DecodeError) as e:
            timing.error = f"{type(e).__name__}: {e}"
        if not timing.events and not timing.error:
            timing.error = "the stream ended without a token that has a text"
        timing.num_tokens = timing.num_tokens or len(timing.events)
        return timing

    async def _read(self, response: httpx.Response, timing: Timing) -> None:
        async for line in response.aiter_lines():
            if not line.startswith(DATA):
                continue
            payload = line[len(DATA) :].strip()
            if payload == DONE:
                return
            now = perf_counter()
            chunk = _decode(payload)
            if chunk.error is not None:
                timing.error = str(chunk.error)[:300]
                return
            if any(choice.has_text for choice in chunk.choices):
                timing.events.append(now)
            if chunk.usage is not None:
                timing.num_prompt_tokens = chunk.usage.prompt_tokens
                timing.num_tokens = chunk.usage.completion_tokens

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.aclose()


def first_token(url: str, prompt: Prompt) -> Timing:
    """One request of a fresh client. Raises EngineError when it fails."""

    async def ask() -> Timing:
        async with Client(url) as client:
            await client.open()
            return await client.complete(prompt)

    timing = asyncio.run(ask())
    if not timing.ok:
        raise EngineError(f"the first request failed: {timing.error}", fix="see the log of the server")
    return timing
