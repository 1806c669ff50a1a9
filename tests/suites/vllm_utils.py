"""`tests/utils.py` for vLLM's entry-point tests: a server is `lmkit serve demo` under the name that a test expects.

The options of `vllm serve` become those of lmkit; an option that has no meaning here is dropped, and a test that needs
it fails and stands in left_out.toml with its reason.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

import httpx
import openai

VALUES = {  # options of vllm serve with a value -> those of lmkit serve
    "--host": "--host",
    "--port": "--port",
    "--max-num-seqs": "--max-rows",
    "--served-model-name": "--served-name",
    "--api-key": "--api-key",
    "--root-path": "--root-path",
    "--seed": "--seed",
    "--uds": "--uds",
}
SWITCHES = {
    "--enforce-eager", "--enable-lora", "--trust-remote-code", "--enable-auto-tool-choice", "--enable-sleep-mode",
    "--enable-chunked-prefill", "--no-enable-chunked-prefill", "--enable-prompt-embeds", "--no-enable-prefix-caching",
    "--enable-force-include-usage", "--enable-prefix-caching", "--enable-server-load-tracking", "--disable-log-stats",
    "--skip-tokenizer-init", "--enable-prompt-tokens-details", "--disable-frontend-multiprocessing",
    "--return-tokens-as-token-ids", "--allow-credentials",
}  # fmt: skip
KEY = "token-abc123"
SECONDS = 120.0  # for a server to start, or to end


def arguments(model: str, options: Sequence[str]) -> list[str]:
    """The arguments of `lmkit` for those of `vllm serve`."""
    words = ["serve", "demo", "--threads", "1", "--num-blocks", "600"]
    if "--served-model-name" not in options:
        words += ["--served-name", model]
    rest = iter(options)
    for option in rest:
        name, equals, value = option.partition("=")
        if name in SWITCHES or not name.startswith("-"):
            continue
        value = value if equals else next(rest, "")
        if name in VALUES:
            words += [VALUES[name], value]
    return words


def get_open_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


class RemoteOpenAIServer:
    """A server for the tests of one module."""

    DUMMY_API_KEY = KEY

    def __init__(
        self, model: str, vllm_serve_args: Sequence[str], *, env_dict: Mapping[str, str] | None = None,
        seed: int | None = 0, auto_port: bool = True, max_wait_seconds: float | None = None, **rest: Any,
    ) -> None:  # fmt: skip
        options = list(vllm_serve_args)
        if auto_port:
            options += ["--port", str(get_open_port())]
        if seed is not None:
            options += ["--seed", str(seed)]
        self.host, self.port = "127.0.0.1", int(options[options.index("--port") + 1])
        environment = {**os.environ, **(env_dict or {})}
        self.proc = subprocess.Popen([sys.executable, "-m", "lmkit", *arguments(model, options)], env=environment)
        until = time.monotonic() + SECONDS
        while True:
            try:
                if httpx.get(self.url_for("live")).is_success:
                    break
            except httpx.TransportError:
                pass
            if self.proc.poll() is not None or time.monotonic() > until:
                self.proc.kill()
                raise RuntimeError("the server did not start")
            time.sleep(0.1)

    def __enter__(self) -> RemoteOpenAIServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.proc.terminate()
        try:
            self.proc.wait(SECONDS)
        except subprocess.TimeoutExpired:
            self.proc.kill()

    @property
    def url_root(self) -> str:
        return f"http://{self.host}:{self.port}"

    def url_for(self, *parts: str) -> str:
        return "/".join((self.url_root, *parts))

    def get_client(self, **options: Any) -> openai.OpenAI:
        return openai.OpenAI(base_url=self.url_for("v1"), api_key=KEY, max_retries=0, **options)

    def get_async_client(self, **options: Any) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(base_url=self.url_for("v1"), api_key=KEY, max_retries=0, **options)
