"""Sampling on the simulated device: the CPU's tokens, nothing pageable, no wait, and nothing sent twice."""

from __future__ import annotations

from collections.abc import Iterator
from unittest import mock

import numpy as np
import pytest
import torch
from lmkit.api import GrammarMasks, SamplingParams
from lmkit_layers.rowwise import TorchRowOps
from lmkit_testing.simgpu import Gpu, SimError, simulated
from lmkit_worker.sampling import SampleBatch, Sampler
from lmkit_worker.sampling import sampler as module

pytest.importorskip("triton", reason="triton is not installed")

from lmkit_op_triton import rowops

V = 100
PARAMS = [
    SamplingParams(temperature=0, logit_bias=((3, 5.0), (7, -2.0))),
    SamplingParams(temperature=0, frequency_penalty=0.5, repetition_penalty=1.3),
    SamplingParams(temperature=0, min_tokens=9, stop_token_ids=(4, 5)),
    SamplingParams(temperature=0, logprobs=2),
]


@pytest.fixture
def gpu() -> Iterator[Gpu]:
    with simulated() as device:
        yield device


def words(*allowed: int) -> bytes:
    return sum(1 << token for token in allowed).to_bytes(4 * -(-V // 32), "little")


EVERY = GrammarMasks([0, 1, 2, 3], words(*range(50)) + words(*range(20, 90)) + words(*range(0, V, 3)) + words(8, 99))
SOME = GrammarMasks([2, 0], words(8, 9, 10) + words(*range(40, 60)))


def steps(device: str, ops: TorchRowOps, masks: GrammarMasks | None, num: int = 3) -> Iterator[list[int]]:
    """The tokens of each step of rows in slots that are not theirs, told to the sampler as they come."""
    sampler = Sampler(8, V, eos_token_ids=(1,), rows=ops)
    slots = np.array([5, 0, 3, 6])
    for slot, params in zip(slots.tolist(), PARAMS, strict=True):
        sampler.add(slot, params, np.array([1, 2, 3, slot]), 4, 0)
    for step in range(num):
        logits = torch.randn(4, V, generator=torch.Generator().manual_seed(step)).to(device)
        batch = SampleBatch(slots, np.full(4, 4 + step), np.arange(4), lambda slot: [1])
        found = sampler.sample(logits, batch, masks).tokens.cpu().tolist()
        for slot, token in zip(slots.tolist(), found, strict=True):
            sampler.observe(slot, [token], step + 1)
        yield found


def copies(gpu: Gpu, ops: TorchRowOps, masks: GrammarMasks | None) -> list[int]:
    """How many copies to the device there are in the sampling of each step."""
    real, counted = Sampler.sample, []

    def strictly(*args):
        before, gpu.strict = gpu.launches["to device"], True
        try:
            return real(*args)
        finally:
            gpu.strict = False
            counted.append(gpu.launches["to device"] - before)

    wanted = list(steps("cpu", TorchRowOps(), masks))
    with mock.patch.object(Sampler, "sample", strictly):
        assert list(steps("sim", ops, masks)) == wanted
    return counted


@pytest.mark.parametrize("ops", [TorchRowOps(), rowops.TritonRowOps()], ids=["torch", "triton"])
@pytest.mark.parametrize("masks", [None, EVERY, SOME], ids=["free", "every row", "some rows"])
def test_nothing_waits_and_bits_travel_as_bits(gpu: Gpu, ops: TorchRowOps, masks: GrammarMasks | None) -> None:
    """After the first step only the counts of penalties are sent, the ids when there are new ones, and the masks."""
    first, *later = copies(gpu, ops, masks)
    assert first == 5 + (masks is not None)
    assert all(n <= 2 + (masks is not None) for n in later)


def pageable(arrays, device):
    return [torch.from_numpy(np.array(a)).to(device) for a in arrays]


def forgets(self, name, key, device, arrays):
    return module.uploaded(arrays(), device)


def stale(self, name, key, device, arrays):
    self._sent.setdefault(name, (None, module.uploaded(arrays(), device)))
    return self._sent[name][1]


@pytest.mark.parametrize(
    "fault",
    [(module, "uploaded", pageable), (Sampler, "_on_device", forgets), (Sampler, "_on_device", stale)],
    ids=["pageable", "sent again", "never sent again"],
)
def test_faults_are_found(gpu: Gpu, fault: tuple[object, str, object]) -> None:
    with mock.patch.object(*fault), pytest.raises((AssertionError, SimError, RuntimeError)):
        test_nothing_waits_and_bits_travel_as_bits(gpu, TorchRowOps(), EVERY)
