"""Blocks of the cache on the simulated device: what a plan copies takes as many launches for one block as for all."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from lmkit.api import SchedLimits, StepPlan
from lmkit_gpu import GpuPlatform
from lmkit_testing.checkpoints import tiny_checkpoint
from lmkit_testing.simgpu import Gpu, SimRuntime, raw, simulated
from lmkit_testing.simsteps import MAX_LENGTH, runner

LIMITS = SchedLimits(max_tokens=16, max_rows=4, max_length=MAX_LENGTH, eos_token_ids=(1,), depth=2)


@pytest.fixture
def gpu() -> Iterator[Gpu]:
    with simulated() as device:
        yield device


@pytest.mark.parametrize(
    ("layers", "copies", "zero", "launches"),
    [
        (1, [(0, 3, 4)], [], {"to device": 1, "index_select": 1, "index_copy_": 1}),
        (3, [(0, i, i + 20) for i in range(1, 11)], [(0, 31), (0, 32)],
         {"to device": 2, "index_select": 1, "index_copy_": 1, "index_fill_": 1}),
        (3, [(0, 1, 2), (0, 2, 3)], [], {"to device": 2, "index_select": 2, "index_copy_": 2}),  # of what was copied
    ],
)  # fmt: skip
def test_launches_do_not_depend_on_layers_and_blocks(
    gpu: Gpu, tmp_path: Path, layers: int, copies: list, zero: list, launches: dict[str, int]
) -> None:
    platform = GpuPlatform(SimRuntime())
    folder = tiny_checkpoint("llama", tmp_path / "llama", num_hidden_layers=layers)
    made, _ = runner(folder, platform, platform.bind(0), LIMITS)
    for layer, memory in enumerate(raw(made.blocks.kv)):
        memory.copy_(torch.randn(memory.shape, generator=torch.Generator().manual_seed(layer)))
    wanted = [memory.clone() for memory in raw(made.blocks.kv)]
    axis = next(i for i, size in enumerate(wanted[0].shape) if size in (40, 640))
    span = wanted[0].shape[axis] // 40
    for memory in wanted:
        blocks = memory.unflatten(axis, (40, span)).movedim(axis, 0)
        for _, source, target in copies:
            blocks[target] = blocks[source]
        for _, block in zero:
            blocks[block] = 0
    gpu.clear()
    gpu.strict = True
    made.forward(StepPlan(0, copies=copies, zero=zero))
    assert gpu.launches == launches
    assert all(torch.equal(a, b) for a, b in zip(raw(made.blocks.kv), wanted, strict=True))
