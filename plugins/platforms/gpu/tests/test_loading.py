"""Loading on the simulated device: through pinned memory, and without a wait for each tensor."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from unittest import mock

import pytest
import torch
from lmkit.api import NullCollectives, describe_model
from lmkit.config import from_options
from lmkit.plugins.resolve import resolve
from lmkit_gpu import GpuPlatform, ring
from lmkit_testing.checkpoints import tiny_checkpoint
from lmkit_testing.simgpu import Gpu, SimError, SimRuntime, simulated
from lmkit_testing.toy import ToyPlatform
from lmkit_worker.loading import load
from lmkit_worker.loading.load import load_model
from safetensors.torch import load_file, save_file

PIECE = 64 << 10
Patches = list[tuple[object, str, object]]


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gpu]:
    """Pieces are as small beside the checkpoint as real ones."""
    monkeypatch.setattr(ring, "PIECE", PIECE)
    monkeypatch.setattr(ring, "SMALL", 1 << 10)
    with simulated() as device:
        yield device


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint("llama", tmp_path_factory.mktemp("loading") / "llama")


def loaded(path: Path, platform, device: torch.device):
    options = {"model": str(path), "max_length": 64, "device": "cuda:9.0:141GB", "attention": "torch"}
    plan, found, _ = resolve(from_options({**options, "dtype": "float32"}))
    return load_model(plan, found, describe_model(plan, found), platform, device, NullCollectives())


def weights(made) -> dict[str, torch.Tensor]:
    """All of a loaded model, on the host."""
    named = dict(made.model.named_parameters())
    named |= {name: m.packed.weight for name, m in made.model.named_modules() if getattr(m, "packed", None) is not None}
    return {name: getattr(tensor, "raw", tensor).clone() for name, tensor in named.items()}


def checked(gpu: Gpu, path: Path) -> None:
    expected = weights(loaded(path, ToyPlatform(), torch.device("cpu")))
    platform = GpuPlatform(SimRuntime())
    made = loaded(path, platform, platform.bind(0))
    gpu.synchronize()  # copies that were still on their way left what they should have
    assert not gpu.pageable
    waits = {kind: n for kind, n in gpu.waits.items() if kind != "event" and "tolist" not in kind}
    assert not waits
    assert sum(n for kind, n in gpu.waits.items() if "tolist" in kind) == 1, "whether any weight is no number"
    tensors = load_file(path / "model.safetensors").values()
    assert gpu.waits["event"] <= 2 * sum(t.nbytes for t in tensors) // PIECE < len(tensors)
    got = weights(made)
    assert got.keys() == expected.keys()
    assert all(torch.equal(got[name], expected[name]) for name in expected)


def test_no_tensor_is_waited_for(gpu: Gpu, checkpoint: Path) -> None:
    checked(gpu, checkpoint)


def test_what_is_no_number_is_found_on_the_device(gpu: Gpu, checkpoint: Path, tmp_path: Path) -> None:
    for file in checkpoint.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    tensors = load_file(tmp_path / "model.safetensors")
    name = "model.layers.1.mlp.down_proj.weight"
    tensors[name][3, 5] = torch.nan
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    platform = GpuPlatform(SimRuntime())
    assert any(name in warning for warning in loaded(tmp_path, platform, platform.bind(0)).warnings)


@pytest.mark.parametrize("size", [0, 1, 511, 513, PIECE - 1, PIECE, PIECE + 1, 9 * PIECE + 7])
def test_every_size_arrives(gpu: Gpu, size: int) -> None:
    platform = GpuPlatform(SimRuntime())
    platform.bind(0)
    values = [torch.arange(size, dtype=torch.int16), torch.tensor(7.5), torch.ones(3, size + 2)[:, 2:] * size]
    sent = [platform.upload(value) for value in values]
    for value, there in zip(values, sent, strict=True):
        assert (there.device.type, there.dtype) == ("sim", value.dtype)
        assert torch.equal(there.cpu(), value)
    assert platform.free_memory() > 0


# ------------------------------------------------------------------------------------------ faults put in on purpose


def from_pageable_memory() -> Patches:
    return [(GpuPlatform, "upload", lambda self, source: source.to(self._device))]


def written_too_early() -> Patches:
    """A piece is filled again while it is on its way."""

    def room(self: ring.PinnedRing, size: int) -> torch.Tensor:
        return self._pieces[0][0][:size]

    return [(ring.PinnedRing, "_room", room)]


def looked_at_one_by_one() -> Patches:
    """The host asks for each tensor whether it holds numbers."""
    real = load.can_be_nan
    return [(load, "can_be_nan", lambda value: real(value) and bool(value.isnan().any()) | True)]


def half_is_read() -> Patches:
    return [(ring.PinnedRing, "_read", lambda self, source, target: target[::2].copy_(source[::2]))]


@pytest.mark.parametrize("fault", [from_pageable_memory, written_too_early, looked_at_one_by_one, half_is_read])
def test_faults_are_found(gpu: Gpu, checkpoint: Path, fault: Callable[[], Patches]) -> None:
    with ExitStack() as patched:
        for patch in fault():
            patched.enter_context(mock.patch.object(*patch))
        with pytest.raises((AssertionError, SimError)):
            checked(gpu, checkpoint)
