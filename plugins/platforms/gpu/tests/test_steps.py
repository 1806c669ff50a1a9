"""Steps of real models on the simulated device: the CPU's tokens, with waits, launches and memory counted."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from unittest import mock

import pytest
import torch
from lmkit.api import (
    LmkitError,
    NullGraphs,
    SamplingParams,
    SchedLimits,
)
from lmkit_gpu import GpuPlatform
from lmkit_gpu import platform as module
from lmkit_layers.build import Builder
from lmkit_testing.checkpoints import tiny_checkpoint
from lmkit_testing.simgpu import Gpu, SimRuntime, simulated
from lmkit_testing.simsteps import MAX_LENGTH, play, played, requests, runner, tokens
from lmkit_testing.toy import ToyPlatform
from lmkit_worker import rows as rows_module
from lmkit_worker.inputs import DrawnTokens

pytest.importorskip("triton", reason="triton is not installed")
# Of rows that stand for nothing, which hold what lay there before; the interpreter takes maxima by numpy.
pytestmark = pytest.mark.filterwarnings("ignore:All-NaN slice:RuntimeWarning")


@pytest.fixture
def gpu() -> Iterator[Gpu]:
    with simulated() as device:
        yield device


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint("llama", tmp_path_factory.mktemp("sim") / "llama")


GREEDY = [SamplingParams(temperature=0, max_tokens=5 + 3 * i, ignore_eos=True) for i in range(4)]
RANDOM = [
    SamplingParams(temperature=0.8, top_p=0.9, top_k=20, seed=3, max_tokens=9),
    SamplingParams(temperature=0, max_tokens=7, frequency_penalty=0.5),
    SamplingParams(temperature=0, max_tokens=8),
    SamplingParams(temperature=1.2, min_p=0.05, seed=4, max_tokens=12, logprobs=2),
]


@pytest.mark.parametrize(
    ("params", "depth"),
    [
        pytest.param(GREEDY, 1, id="greedy-1", marks=pytest.mark.slow),
        pytest.param(GREEDY, 2, id="greedy-2", marks=pytest.mark.slow),
        pytest.param(RANDOM, 1, id="random-1", marks=pytest.mark.slow),
        pytest.param(RANDOM, 2, id="random-2"),
    ],
)
def test_tokens_are_the_cpus(gpu: Gpu, checkpoint: Path, depth: int, params: list[SamplingParams]) -> None:
    limits = SchedLimits(max_tokens=16, max_rows=4, max_length=MAX_LENGTH, eos_token_ids=(1,), depth=depth)
    expected = tokens(*runner(checkpoint, ToyPlatform(), torch.device("cpu"), limits), limits, requests(params))
    platform = GpuPlatform(SimRuntime())
    made, kv = runner(checkpoint, platform, platform.bind(0), limits)
    assert {p.device.type for p in made.model.parameters()} == {"sim"}
    assert tokens(made, kv, limits, requests(params)) == expected


# -------------------------------------------------------------------------------------- the steady state

PARAMS = {
    "greedy": SamplingParams(temperature=0, max_tokens=14, ignore_eos=True),
    "random": SamplingParams(temperature=0.8, top_p=0.9, top_k=20, seed=3, max_tokens=14, ignore_eos=True),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("steady")


def model(folder: Path, layers: int) -> Path:
    path = folder / str(layers)
    return path if path.exists() else tiny_checkpoint("llama", path, num_hidden_layers=layers, head_dim=16)


@pytest.mark.parametrize("name", ["greedy", pytest.param("random", marks=pytest.mark.slow)])
def test_a_step_waits_for_one_event_and_nothing_else(gpu: Gpu, folder: Path, name: str) -> None:
    """No other wait, no copy from pageable memory, no memory that the pool does not have; one launch is the graph."""
    platform = GpuPlatform(SimRuntime())
    steps = play(model(folder, 1), platform, platform.bind(0), PARAMS[name])
    for _ in range(6):
        next(steps)
    for _ in range(3):
        gc.collect()  # Triton's interpreter leaves cycles behind, with the memory of its arguments in them
        gpu.clear()
        gpu.strict = True
        next(steps)
        assert gpu.waits == {"event": 1}
        assert not gpu.pageable
        assert not gpu.pool.misses
        assert gpu.launches["graph"] == 1
        assert gpu.launches.total() <= 15
        assert not any(kernel.startswith("triton rotate") for kernel in gpu.launches)


def launches(gpu: Gpu, monkeypatch: pytest.MonkeyPatch, *checkpoints: Path) -> Counter[str]:
    """Of a decode step of the second checkpoint, without graphs, those of a step of the first less."""
    monkeypatch.setattr(module, "GpuGraphs", lambda runtime, rows: NullGraphs())
    counted: list[Counter[str]] = []
    for path in checkpoints:
        platform = GpuPlatform(SimRuntime())
        steps = play(path, platform, platform.bind(0), PARAMS["greedy"])
        for _ in range(6):
            next(steps)
        gpu.clear()
        next(steps)
        assert gpu.waits == {"event": 1}
        counted.append(Counter({name: n for name, n in gpu.launches.items() if name != "fill_"}))
    return counted[1] - counted[0]


@pytest.mark.slow
def test_launches_of_a_layer(gpu: Gpu, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without graphs: norm and addition, QKV, turning and writing, attention, O, norm and addition, up, gate, down."""
    layer = launches(gpu, monkeypatch, model(folder, 1), model(folder, 2))
    assert layer == {"linear": 4, "triton norm": 2, "triton rotate_write": 1, "triton attend": 1, "triton gate": 1}


@pytest.mark.slow
@pytest.mark.parametrize("name", PARAMS)
@pytest.mark.parametrize("depth", [1, 2])
def test_tokens_with_the_kernels_of_a_gpu(gpu: Gpu, folder: Path, name: str, depth: int) -> None:
    """Captured and replayed, with rows that stand for nothing, tokens fed on the device, and stops a step late."""
    path, platform = model(folder, 2), GpuPlatform(SimRuntime())
    expected = played(play(path, ToyPlatform(), torch.device("cpu"), PARAMS[name], 1))
    assert played(play(path, platform, platform.bind(0), PARAMS[name], depth)) == expected
    assert gpu.launches["graph"] > 8


# ----------------------------------------------------------------------------------------------------------- mixtures

MIXTURES = {
    "Qwen3MoeForCausalLM": {
        "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "head_dim": 16,
        "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [],
    },
    "GptOssForCausalLM": {
        "num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16, "hidden_act": "silu",
        "layer_types": ["full_attention"], "sliding_window": None,
    },
}  # fmt: skip


def mixture(folder: Path, family: str, layers: int = 1) -> Path:
    path = folder / f"{family}{layers}"
    return path if path.exists() else tiny_checkpoint(family, path, num_hidden_layers=layers, **MIXTURES[family])


@pytest.mark.full("lmkit-gpu", "lmkit-op-triton", "lmkit-worker")
@pytest.mark.parametrize("family", ["Qwen3MoeForCausalLM", pytest.param("GptOssForCausalLM", marks=pytest.mark.slow)])
def test_a_mixture_waits_for_nothing(gpu: Gpu, folder: Path, family: str) -> None:
    """One graph serves every choice of experts; tokens are the CPU's, expert by expert."""
    path, platform = mixture(folder, family), GpuPlatform(SimRuntime())
    with mock.patch.object(Builder, "_expert_kernel", return_value=None):
        expected = played(play(path, ToyPlatform(), torch.device("cpu"), PARAMS["greedy"], 1))
    steps = play(path, platform, platform.bind(0), PARAMS["greedy"])
    found: dict[str, list[int]] = {}
    for number, events in enumerate(steps):
        for event in events:
            assert event.error is None, event.error
            found.setdefault(event.id, []).extend(event.tokens)
        if 6 <= number < 9:
            assert gpu.waits == {"event": 1}
            assert not gpu.pageable
            assert not gpu.pool.misses
            assert gpu.launches["graph"] == 1
        gc.collect()
        gpu.clear()
    assert found == expected


@pytest.mark.slow
def test_launches_of_a_mixture(gpu: Gpu, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Norms of heads included."""
    family = "Qwen3MoeForCausalLM"
    layer = launches(gpu, monkeypatch, mixture(folder, family, 1), mixture(folder, family, 2))
    assert layer == {
        "linear": 3, "triton norm": 4, "triton rotate_write": 1, "triton attend": 1,
        "triton choose": 1, "triton sort": 1, "triton multiply": 2, "triton combine": 1,
    }  # fmt: skip


# ------------------------------------------------------------------------------------------------- weights of few bits


@pytest.mark.full
@pytest.mark.parametrize(
    ("quantization", "kv_dtype", "kernels"),
    [
        ("w8a8", "int8", {"multiply_bytes", "round_integers"}),
        pytest.param("int4", "float32", {"multiply_codes"}, marks=pytest.mark.slow),
        pytest.param("fp8", "float32", {"multiply_wide"}, marks=pytest.mark.slow),
    ],
)
def test_weights_of_few_bits_wait_for_nothing(
    gpu: Gpu, folder: Path, monkeypatch: pytest.MonkeyPatch, quantization: str, kv_dtype: str, kernels: set[str]
) -> None:
    """They are packed on the device; tokens are the CPU's, a step waits for one event, without graphs as well."""
    path, more = model(folder, 1), {"quantization": quantization, "kv_dtype": kv_dtype}
    expected = played(play(path, ToyPlatform(), torch.device("cpu"), PARAMS["greedy"], 1, **more))
    monkeypatch.setattr(module, "GpuGraphs", lambda runtime, rows: NullGraphs())
    platform = GpuPlatform(SimRuntime())
    found: dict[str, list[int]] = {}
    for number, events in enumerate(play(path, platform, platform.bind(0), PARAMS["greedy"], **more)):
        for event in events:
            assert event.error is None, event.error
            found.setdefault(event.id, []).extend(event.tokens)
        if 6 <= number < 9:
            assert gpu.waits == {"event": 1}
            assert not gpu.pageable
            assert all(gpu.launches[f"triton {kernel}"] >= 4 for kernel in kernels)
        gc.collect()
        gpu.clear()
    assert found == expected


# ------------------------------------------------------------------------------------------ faults put in on purpose


def no_waiting() -> list[tuple[object, str, object]]:
    """Tokens are read before they have come."""
    return [(module.QueueEvent, "wait", lambda self: None)]


def not_fed() -> list[tuple[object, str, object]]:
    """The next step does not learn what was drawn."""
    return [(DrawnTokens, "put", lambda self, tokens: None)]


def fed_to_the_neighbour() -> list[tuple[object, str, object]]:
    real = DrawnTokens.expect
    return [(DrawnTokens, "expect", lambda self, slots: real(self, (slots + 1) % len(self.targets.array)))]


def unread_tokens_are_zeros() -> list[tuple[object, str, object]]:
    """A row does not say that its last token is still on the device."""
    return [(rows_module, "UNREAD", 0)]


def pageable_tables() -> list[tuple[object, str, object]]:
    """A planner's copy is not from pinned memory."""
    return [(module.TwinBuffer, "push", lambda self, n: self.device[:n].copy_(self.host[:n]))]


@pytest.mark.slow
@pytest.mark.parametrize("fault", [no_waiting, not_fed, fed_to_the_neighbour, unread_tokens_are_zeros, pageable_tables])
def test_faults_are_found(gpu: Gpu, checkpoint: Path, fault) -> None:
    limits = SchedLimits(max_tokens=16, max_rows=4, max_length=MAX_LENGTH, eos_token_ids=(1,), depth=2)
    expected = tokens(*runner(checkpoint, ToyPlatform(), torch.device("cpu"), limits), limits, requests(GREEDY))

    def check() -> None:
        gpu.clear()
        platform = GpuPlatform(SimRuntime())
        made, kv = runner(checkpoint, platform, platform.bind(0), limits)
        gpu.clear()
        assert tokens(made, kv, limits, requests(GREEDY)) == expected
        assert not any("lmkit_worker/buffers" in where for where in gpu.pageable)

    check()
    with ExitStack() as patched:
        for patch in fault():
            patched.enter_context(mock.patch.object(*patch))
        with pytest.raises((AssertionError, LmkitError, AttributeError)):
            check()


@pytest.mark.slow
def test_a_single_pinned_copy_is_found(gpu: Gpu, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A buffer is written while its copy is on its way. The torch reference would wait for it before."""

    def push(self, n: int) -> torch.Tensor:
        staged, _ = self._copies[0]
        staged[:n].copy_(self.host[:n])
        self.device[:n].copy_(staged[:n], non_blocking=True)
        return self.device[:n]

    platform = GpuPlatform(SimRuntime())
    steps = play(model(folder, 1), platform, platform.bind(0), PARAMS["greedy"])
    for _ in range(4):
        next(steps)
    monkeypatch.setattr(module.TwinBuffer, "push", push)
    with pytest.raises(LmkitError, match="SimError"):
        for _ in steps:
            pass
