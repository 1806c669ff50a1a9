"""A model that a server has: any that speaks the OpenAI API of chats."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import httpx
from httpx_sse import SSEError, connect_sse
from lmkit.api import ConfigError, EngineError, RequestError
from lmkit.text.stream import Finish, Usage
from lmkit_python.front.message import Change

CONNECT_SECONDS, SILENCE_SECONDS = 10.0, 600.0  # between two events of a stream


class RemoteError(RequestError):
    """What a server said instead of an answer, or that it said nothing."""

    code = "remote"


class Remote:
    """Use it in a `with`: that connects, and asks for the model's name unless one was given."""

    def __init__(self, url: str, api_key: str = "", sampling: Mapping[str, Any] | None = None, model: str = "") -> None:
        """`sampling`: fields of a request, sent as they are. Raises ConfigError when `url` is none."""
        if not url.startswith(("http://", "https://")):
            raise ConfigError(f"{url!r} is no address of a server", fix="write http://HOST:PORT")
        self.url = url.rstrip("/").removesuffix("/v1")
        self.model, self._sampling = model, dict(sampling or {})
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        timeout = httpx.Timeout(SILENCE_SECONDS, connect=CONNECT_SECONDS)
        self._http = httpx.Client(headers=headers, timeout=timeout)

    def __enter__(self) -> Remote:
        """Raises EngineError when nobody answers there as a server does."""
        if not self.model:
            try:
                answer = self._http.get(f"{self.url}/v1/models")
                if answer.status_code == 401:
                    raise EngineError(f"{self.url} wants a key", fix="give --api-key KEY, or set LMKIT_API_KEY")
                self.model = str(answer.raise_for_status().json()["data"][0]["id"])
            except (httpx.HTTPError, httpx.InvalidURL, LookupError, TypeError, ValueError) as e:
                raise EngineError(
                    f"{self.url} does not say what it serves: {str(e) or type(e).__name__}",
                    fix="check the address, and that the server is running: lmkit serve MODEL",
                ) from e
        return self

    def __exit__(self, *_: object) -> None:
        self._http.close()

    def answers(self, messages: Sequence[Mapping[str, Any]], think: bool | None) -> Iterator[Change]:
        """The answer to a conversation as it comes. Raises RemoteError."""
        body = {
            "model": self.model, "messages": list(messages), "stream": True, "stream_options": {"include_usage": True},
            **self._sampling,
        }  # fmt: skip
        if think is not None:
            body["chat_template_kwargs"] = {"enable_thinking": think}
        try:
            with connect_sse(self._http, "POST", f"{self.url}/v1/chat/completions", json=body) as source:
                if source.response.status_code != 200:
                    source.response.read()
                    raise _error(source.response.status_code, source.response.text)
                for event in source.iter_sse():
                    if event.data == "[DONE]":
                        return
                    yield _change(event.json())
        except (httpx.HTTPError, SSEError, ValueError, LookupError, TypeError, AttributeError) as e:
            raise RemoteError(f"the answer of {self.url} broke off: {str(e) or type(e).__name__}") from e


def _change(chunk: dict[str, Any]) -> Change:
    """One chunk of a stream. Raises RemoteError for one that says what went wrong."""
    if error := chunk.get("error"):
        raise RemoteError(str(error.get("message", error) if isinstance(error, dict) else error)[:1000])
    choice = (chunk.get("choices") or [{}])[0]
    delta = choice.get("delta") or {}
    change = Change(delta.get("content") or "", delta.get("reasoning_content") or delta.get("reasoning") or "")
    if usage := chunk.get("usage"):
        cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        change.finish = Finish("stop", None, Usage(usage["prompt_tokens"], usage["completion_tokens"], cached))
    return change


def _error(status: int, text: str) -> RemoteError:
    try:
        said = httpx.Response(status, text=text).json()["error"]
        return RemoteError(str(said["message"])[:1000])
    except (ValueError, LookupError, TypeError):
        return RemoteError(f"HTTP {status}: {text[:300]}")
