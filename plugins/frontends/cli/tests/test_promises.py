"""`inspect`, `plan`, `explain` and the start of an engine say the same of odd checkpoints, for the same reason."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from lmkit import LLM
from lmkit.api import LmkitError
from lmkit.config import from_options
from lmkit.plugins.host import PluginHost
from lmkit.plugins.resolve import Resolver, resolve
from lmkit_cli.inspect import inspect
from lmkit_cli.readiness import unready
from lmkit_cli.story import explain
from lmkit_testing.checkpoints import byte_tokenizer, tiny_checkpoint

Change = Callable[[Path], Any]


def config(**changes: Any) -> Change:
    def change(path: Path) -> None:
        data = json.loads((path / "config.json").read_text()) | changes
        (path / "config.json").write_text(json.dumps(data))

    return change


def text(name: str, content: str) -> Change:
    return lambda path: (path / name).write_text(content)


def cut(path: Path) -> None:
    file = path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-9])


def shards(path: Path) -> None:
    (path / "model.safetensors").rename(path / "2.safetensors")
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "1.safetensors"}}))


def pickled(path: Path) -> None:
    (path / "model.safetensors").rename(path / "pytorch_model.bin")


def nothing(path: Path) -> None: ...


CASES: dict[str, tuple[Change, dict[str, Any], str]] = {
    "sound": (nothing, {}, ""),
    "odd defaults": (text("generation_config.json", '{"top_k": -1, "top_p": 7}'), {}, ""),
    "no architecture": (config(architectures=None), {}, ""),
    "no tokenizer": (lambda path: (path / "tokenizer.json").unlink(), {}, "there is no tokenizer.json"),
    "damaged tokenizer": (text("tokenizer.json", "{"), {}, "is not a tokenizer"),
    "damaged tokenizer settings": (text("tokenizer_config.json", '{"pad_token": 3}'), {}, "pad_token is 3"),
    "broken template": (text("chat_template.jinja", "{% for"), {}, "does not compile"),
    "no configuration": (lambda path: (path / "config.json").unlink(), {}, "no config.json"),
    "missing shard": (shards, {}, "1.safetensors, which is missing"),
    "cut weights": (cut, {}, "its last 9 bytes are missing"),
    "pickles": (pickled, {}, "only pickled weights"),
    "unknown rope": (config(rope_scaling={"rope_type": "linear", "factor": 2.0, "ramp": 3}), {}, "ramp = 3"),
    "unknown model": (config(architectures=["NoSuchForCausalLM"]), {}, "NoSuchForCausalLM"),
    "unknown quantization": (config(quantization_config={"quant_method": "zip"}), {}, "needs"),
    "too long": (nothing, {"max_length": 1 << 20}, "max_length is 1048576"),
    "ranks": (nothing, {"tp": 3}, "cannot be split over 3 ranks"),
    "stored blocks": (nothing, {"tp": 2, "quantization": "int8"}, "would lie on two ranks"),
    "memory": (nothing, {"kv_memory": "900GiB"}, "900.00 GiB of KV cache"),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("promises") / "model"
    tiny_checkpoint("llama", path, vocab_size=259)
    byte_tokenizer(path)
    return path


def steady(message: str) -> str:
    """A message without the memory that is free just now."""
    return re.sub(r"[\d.]+ GiB are available", "", message)


def said(decide: Callable[[], Any]) -> str:
    """The reason of a refusal; "" where there is none."""
    try:
        decide()
    except LmkitError as error:
        return steady(error.message)
    return ""


@pytest.mark.parametrize("name", CASES)
def test_four_commands_agree(name: str, model: Path, tmp_path: Path) -> None:
    change, options, reason = CASES[name]
    path = tmp_path / "model"
    path.mkdir()
    for file in model.iterdir():
        (path / file.name).write_bytes(file.read_bytes())
    change(path)
    options = {"model": str(path), "platform": "cpu", "max_step_tokens": 16, "kv_memory": "4MiB"} | options
    host = PluginHost()

    def plan() -> None:
        _, errors = unready(from_options(options), *resolve(from_options(options), host))
        for error in errors.values():
            raise error

    planned = said(plan)
    assert reason in planned
    assert bool(reason) == bool(planned)

    resolver = Resolver(from_options(options), host, tolerant=True)
    resolver.run()
    if "checkpoint" not in resolver.errors:
        problems = [steady(problem["message"]) for problem in inspect(resolver)["problems"]]
        assert planned in problems or not planned, problems
        assert bool(problems) == bool(planned), problems
    topics = explain(from_options(options), host).topics
    errors = [steady(topic.error.message) for topic in topics if topic.error is not None]
    refused = [t.kind for t in topics if t.candidates and all(c.verdict == "refused" for c in t.candidates)]
    assert planned in errors or (planned and refused) or not (planned or errors), (errors, refused)

    def start() -> None:
        LLM(**options).close()

    started = said(start)
    assert bool(started) == bool(planned), started
    assert started == planned or reason in started
