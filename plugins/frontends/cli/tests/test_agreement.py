"""`explain`, `plan` and loading decide by one function: random installations, devices and options, told and planned,
and attention made as a worker makes it."""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any

import pytest
from lmkit.api import LmkitError, SelectionError, describe_model
from lmkit.config import from_options
from lmkit.plugins.host import PluginHost
from lmkit.plugins.resolve import resolve
from lmkit.plugins.switches import Switches
from lmkit_cli.readiness import unready
from lmkit_cli.story import Explanation, explain
from lmkit_testing.checkpoints import byte_tokenizer, tiny_checkpoint
from lmkit_worker.loading.load import make_builder

DRAWS = int(os.environ.get("AGREEMENT_DRAWS", "200"))
GROUP = 25  # draws of one test
DISABLED = (
    "attention:cpu", "attention:torch", "attention:triton", "attention:*", "op:linear_*", "op:rowwise_native", "op:*",
    "platform:cpu", "platform:cuda", "scheduler:*", "loader:*", "tokenizer:*", "grammar:*", "proposer:ngram",
    "quantization:int*", "model:Llama*", "executor:*",
)  # fmt: skip
OPTIONS: dict[str, tuple[Any, ...]] = {
    "device": (None, None, "cpu", "cuda:9.0:80GB", "cuda:8.0:24GB", "cuda:12.0:96GB", "cuda:7.0:16GB", "cuda:8.6:24GB",
               "cuda:9.0:1GB", "rocm:gfx942:192GB", "rocm:gfx1100:24GB", "cuda:9.0"),
    "platform": ("auto", "auto", "cpu", "cuda", "nosuch"),
    "attention": ("auto", "auto", "auto", "cpu", "torch", "triton", "flashinfer", "flex", "triton,torch", "nosuch"),
    "op": ("auto", "auto", "auto", "linear_native", "linear_triton", "linear_reference", "rowwise_torch", "nosuch",
           "linear_reference,rowwise_torch"),
    "dtype": ("auto", "auto", "bfloat16", "float16", "float32", "int8"),
    "kv_dtype": ("auto", "auto", "int8", "fp8_e4m3", "fp8_e5m2", "float64"),
    "quantization": ("auto", "auto", "int8", "int4", "w8a8", "fp8", "nf4", "awq"),
    "proposer": ("none", "none", "ngram", "eagle", "draft_model", "nosuch"),
    "scheduler": ("auto", "fcfs", "fair", "nosuch"),
    "tool_parser": ("auto", "auto", "hermes", "nosuch"),
    "tp": (1, 1, 1, 2),
    "block_size": (None, None, 7, 16, 64),
    "max_length": (None, 128, 1 << 20),
}  # fmt: skip


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The demo; one with windows, one with latents, one with recurrent state."""
    found = ["demo", "nowhere/at-all"]
    for architecture in ("Gemma2ForCausalLM", "DeepseekV3ForCausalLM", "MambaForCausalLM"):
        path: Path = tmp_path_factory.mktemp(architecture) / "model"
        tiny_checkpoint(architecture, path, vocab_size=259)
        byte_tokenizer(path)
        found.append(str(path))
    return found


def draw(rng: random.Random, models: list[str]) -> tuple[dict[str, Any], tuple[str, ...]]:
    """A few options that are not the default, and what is not there."""
    options = {"model": rng.choice(models[:1] * 3 + models), "offline": True}
    for name in rng.sample(sorted(OPTIONS), rng.randint(0, 4)):
        if (value := rng.choice(OPTIONS[name])) is not None:
            options[name] = value
    return options, tuple(rng.sample(DISABLED, rng.choice((0, 0, 0, 1, 2))))


def told(explanation: Explanation) -> dict[tuple[str, str], str]:
    """What is said to be selected; of kinds of which all run, the first."""
    found: dict[tuple[str, str], str] = {}
    for topic in explanation.topics:
        for candidate in topic.candidates:
            if candidate.verdict == "selected":
                found.setdefault((topic.kind, topic.component), candidate.name)
    return found


@pytest.mark.parametrize("first", range(0, DRAWS, GROUP))
@pytest.mark.one_in(16)
def test_what_is_told_is_what_is_planned(first: int, models: list[str]) -> None:
    for seed in range(first, first + GROUP):
        rng = random.Random(seed)
        options, disabled = draw(rng, models)
        host = PluginHost(switches=Switches.build({}, disable=disabled))
        what = f"draw {seed}: {options}, without {disabled}"
        try:
            config = from_options(options)
        except LmkitError:
            continue  # it ends before anybody chooses
        explanation = explain(config, host)
        selected = told(explanation)
        errors = [topic.error.message for topic in explanation.topics if topic.error is not None]
        refused = None
        try:
            plan, checkpoint, info = resolve(config, host)
            _, unfit = unready(config, plan, checkpoint, info)
            for error in unfit.values():
                raise error
        except LmkitError as error:
            refused = error.message
        if refused is not None:
            open_topics = [topic for topic in explanation.topics if topic.error is None and not topic.instead]
            silent = [topic for topic in open_topics if (topic.kind, topic.component) not in selected]
            assert refused in errors or silent, f"{what}: {refused} is not told, only {errors}"
            continue
        assert not errors, what
        make_builder(plan, checkpoint, describe_model(plan, checkpoint), None)  # the backend is asked for all layers
        chosen: dict[tuple[str, str], str] = {}
        for choice in plan.choices:  # the first is what runs; kernels have others behind it, in case a layer needs one
            chosen.setdefault((choice.kind, choice.component), choice.name)
        assert {key: name for key, name in chosen.items() if key in selected} == selected, what
        assert set(chosen) == set(selected), what


CAPABILITY = "compute capability 8.9"


@pytest.mark.parametrize(
    ("device", "kv_dtype", "chosen", "reason"),
    [
        ("cuda:8.0:40GB", "fp8_e4m3", "torch", CAPABILITY),
        ("cuda:8.6:24GB", "fp8_e4m3", "torch", CAPABILITY),
        ("cuda:8.9:24GB", "fp8_e4m3", "triton", ""),
        ("cuda:8.0:40GB", "fp8_e5m2", "triton", ""),
        ("cuda:8.0:40GB", "int8", "triton", ""),
        ("rocm:gfx942:192GB", "fp8_e4m3", "triton", ""),
    ],
)
@pytest.mark.one_in(2)  # one that is refused is among them
def test_auto_takes_the_next_and_says_why(device: str, kv_dtype: str, chosen: str, reason: str) -> None:
    """What one backend cannot do on the device goes to the next; named, it is refused for the same reason."""
    pytest.importorskip("triton")
    options = {"model": "demo", "offline": True, "device": device, "kv_dtype": kv_dtype}
    host = PluginHost(switches=Switches())
    topics = explain(from_options(options), host).topics
    candidates = {c.name: c for topic in topics if topic.kind == "attention" for c in topic.candidates}
    assert candidates[chosen].verdict == "selected"
    assert bool(reason) == (candidates["triton"].verdict == "refused")
    assert any(reason in r.needed for r in candidates["triton"].reasons) or not reason
    plan, _, _ = resolve(from_options(options), host)
    choice = plan.choice("attention")
    assert choice is not None
    assert choice.name == chosen
    if reason:
        with pytest.raises(SelectionError, match=reason):
            resolve(from_options(options | {"attention": "triton"}), host)
