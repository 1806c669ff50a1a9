"""Models with recurrent state on the simulated device: steps that decode are captured, and none waits."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from unittest import mock

import pytest
import torch
from lmkit.api import EngineRequest, LmkitError, SamplingParams, SchedLimits
from lmkit.engine.core import EngineCore
from lmkit.engine.intake import Intake
from lmkit.scheduling.scheduler import Scheduler
from lmkit_decoders.pieces import Piece
from lmkit_decoders.recurrent import TorchRecurrentOps
from lmkit_gpu import GpuPlatform
from lmkit_testing.checkpoints import tiny_checkpoint
from lmkit_testing.one_runner import OneRunner
from lmkit_testing.simgpu import Gpu, SimRuntime, simulated
from lmkit_testing.simsteps import runner
from lmkit_testing.stepper import ArrivalOrder
from lmkit_testing.toy import ToyPlatform
from lmkit_worker.inputs import InputBuilder

pytest.importorskip("triton", reason="triton is not installed")

LIMITS = SchedLimits(max_tokens=24, max_rows=6, max_length=64, eos_token_ids=(1,), depth=2)
ARRIVALS = [(0, 5), (0, 9), (0, 1), (6, 17), (6, 3)]  # at which step, tokens of the prompt
Patches = list[tuple[object, str, object]]
FAMILIES = {
    "Lfm2ForCausalLM": {"num_hidden_layers": 2, "layer_types": ["conv", "full_attention"], "hidden_size": 64},
    "BambaForCausalLM": {
        "num_hidden_layers": 2, "attn_layer_indices": [1], "mamba_n_heads": 8, "mamba_n_groups": 2, "mamba_d_state": 8,
        "mamba_chunk_size": 16, "hidden_size": 64,
    },
    "MambaForCausalLM": {"num_hidden_layers": 1, "state_size": 8, "tie_word_embeddings": True},
}  # fmt: skip


@pytest.fixture
def gpu() -> Iterator[Gpu]:
    with simulated() as device:
        yield device


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("recurrent")


def checkpoint(folder: Path, family: str) -> Path:
    path = folder / family
    return path if path.exists() else tiny_checkpoint(family, path, **FAMILIES[family])


def serve(
    path: Path, platform, device: torch.device, after: Callable[[int], None], op: str = "auto"
) -> dict[str, list[int]]:
    """Rows begin one after another, and several at once, while others decode. `after` is told the number of a step."""
    made, kv = runner(path, platform, device, LIMITS, "auto", op)
    core = EngineCore(Scheduler(LIMITS, kv, ArrivalOrder()), OneRunner(made, LIMITS.depth), Intake(512, 64))
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    found: dict[str, list[int]] = {}
    left = [(at, EngineRequest(f"r{i}", [5 + i] * n, params)) for i, (at, n) in enumerate(ARRIVALS)]
    number = 0
    while left or core.has_work():
        while left and left[0][0] <= number:
            core.add(left.pop(0)[1])
        for event in core.step():
            assert event.error is None, event.error
            found.setdefault(event.id, []).extend(event.tokens)
        after(number)
        number += 1
    made.check()
    return found


def expected(path: Path) -> dict[str, list[int]]:
    return serve(path, ToyPlatform(), torch.device("cpu"), lambda number: None)


def checked(gpu: Gpu, path: Path, op: str = "auto") -> dict[str, list[int]]:
    graphs = 0

    def after(number: int) -> None:
        nonlocal graphs
        graphs += gpu.launches["graph"]
        if number > 1:
            assert set(gpu.waits) <= {"event"}
            assert not gpu.pageable
        gc.collect()
        gpu.clear()

    platform = GpuPlatform(SimRuntime())
    found = serve(path, platform, platform.bind(0), after, op)
    assert graphs > 3
    return found


@pytest.mark.full
@pytest.mark.parametrize("op", ["auto", pytest.param("recurrent_torch", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "family",
    ["MambaForCausalLM", *(pytest.param(name, marks=pytest.mark.slow) for name in FAMILIES if name[:6] != "MambaF")],
)
def test_no_step_waits(gpu: Gpu, folder: Path, family: str, op: str) -> None:
    path = checkpoint(folder, family)
    assert checked(gpu, path, op) == expected(path)


@pytest.mark.parametrize("family", ["MambaForCausalLM", pytest.param("BambaForCausalLM", marks=pytest.mark.slow)])
def test_launches_of_a_prompt(gpu: Gpu, folder: Path, family: str) -> None:
    """The scan is one, and the convolution two, however many tokens and rows there are."""
    path, most = checkpoint(folder, family), {}
    for op in ("auto", "recurrent_torch"):
        counts: list[int] = []

        def after(number: int, counts: list[int] = counts) -> None:
            counts.append(gpu.launches.total())
            gpu.clear()

        platform = GpuPlatform(SimRuntime())
        serve(path, platform, platform.bind(0), after, op)
        most[op] = max(counts[1:])  # the first counts the loading too
    assert most["auto"] <= {"MambaForCausalLM": 60, "BambaForCausalLM": 90}[family], most
    assert most["recurrent_torch"] > most["auto"]


# ------------------------------------------------------------------------------------------ faults put in on purpose


def tokens_behind_the_end_count() -> Patches:
    return [(Piece, "ending", Piece.take)]


def state_of_the_neighbour() -> Patches:
    """The rows of a piece get one another's state."""

    def renew(self: Piece, state: torch.Tensor, new: torch.Tensor) -> None:
        state[self.slots] = new.roll(1, 0) if isinstance(self.slots, torch.Tensor) else new[0]

    return [(Piece, "renew", renew)]


def asked_how_many_tokens() -> Patches:
    """The host waits to know the size of a result."""
    real = torch.Tensor.repeat_interleave

    def repeat(self: torch.Tensor, *args: object, output_size: int | None = None, **kwargs: object) -> torch.Tensor:
        return real(self, *args, **kwargs)

    return [(torch.Tensor, "repeat_interleave", repeat)]


def rows_that_stand_for_nothing_have_a_state() -> Patches:
    """That of the first row, which each of them renews as well."""
    real = InputBuilder._state_batch

    def state_batch(self, slots, layout, padding):
        batch = real(self, slots, layout, padding)
        if padding:
            self.state_slots.array[len(slots) : len(slots) + padding] = self.state_slots.array[0]
            self.state_slots.push(len(slots) + padding)
        return batch

    return [(InputBuilder, "_state_batch", state_batch)]


def slots_asked_of_the_device() -> Patches:
    real = TorchRecurrentOps.selective_scan

    def scan(*args):
        args[-1].slots.tolist()
        return real(*args)

    return [(TorchRecurrentOps, "selective_scan", scan)]


def slots_elsewhere() -> Patches:
    """The states' slots are in new memory at every step."""
    real = InputBuilder._state_batch

    def state_batch(self, slots, layout, padding):
        batch = real(self, slots, layout, padding)
        batch.slots = batch.slots.clone()
        return batch

    return [(InputBuilder, "_state_batch", state_batch)]


@pytest.mark.slow
@pytest.mark.parametrize(
    "fault",
    [
        tokens_behind_the_end_count, state_of_the_neighbour, asked_how_many_tokens, slots_asked_of_the_device,
        rows_that_stand_for_nothing_have_a_state, slots_elsewhere,
    ],
)  # fmt: skip
def test_faults_are_found(gpu: Gpu, folder: Path, fault: Callable[[], Patches]) -> None:
    path = checkpoint(folder, "MambaForCausalLM")
    tokens = expected(path)
    with ExitStack() as patched:
        for patch in fault():
            patched.enter_context(mock.patch.object(*patch))
        with pytest.raises((AssertionError, LmkitError)):
            assert checked(gpu, path, "recurrent_torch") == tokens
