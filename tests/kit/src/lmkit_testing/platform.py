"""Conformance of platforms: the probe, buffers, events, defaults. Device tests are skipped where there is no device."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from lmkit.api import DeviceInfo, PlatformSpec, StepLimits, Unavailable
from lmkit.config import EngineConfig
from lmkit.plugins.refs import load_ref

from lmkit_testing.clock import least
from lmkit_testing.specs import PluginConformance

PROBE_SECONDS = 0.2
_PROBE = """
    import json, sys, time
    from importlib import import_module
    module, _, name = {ref!r}.partition(":")
    probe = getattr(import_module(module), name)
    started = time.perf_counter()
    probe()
    heavy = [m for m in ("torch", "numpy", "transformers") if m in sys.modules]
    print(json.dumps([time.perf_counter() - started, heavy]))
"""


class PlatformConformance(PluginConformance):
    """A platform probes fast and without torch, says why it is unavailable, and keeps the buffer contract."""

    torch_free_target = True  # the parent asks worker_env and defaults

    @pytest.fixture(scope="class")
    @classmethod
    def probed(cls, spec: PlatformSpec) -> list[DeviceInfo] | Unavailable:
        return load_ref(spec.probe)()

    @pytest.fixture
    def bound(self, target: Any, probed: list[DeviceInfo] | Unavailable) -> Iterator[tuple[Any, Any]]:
        """(platform, torch device); skips where there is no device. The number of threads is put back."""
        if isinstance(probed, Unavailable):
            pytest.skip(f"no device: {probed.reason}")
        import torch

        threads = torch.get_num_threads()
        platform = target()
        yield platform, platform.bind(0)
        torch.set_num_threads(threads)

    def test_probe_is_fast_and_light(self, spec: PlatformSpec) -> None:
        """In a fresh process: below 200 ms, without torch."""
        command = [sys.executable, "-c", textwrap.dedent(_PROBE.format(ref=spec.probe))]

        def probe() -> float:
            done = subprocess.run(command, check=True, capture_output=True, text=True)
            seconds, heavy = json.loads(done.stdout)
            assert not heavy, f"the probe imports {heavy}"
            return float(seconds)

        assert least(probe, PROBE_SECONDS) < PROBE_SECONDS

    def test_probe_answers_in_full(self, spec: PlatformSpec, probed: list[DeviceInfo] | Unavailable) -> None:
        if isinstance(probed, Unavailable):
            assert probed.reason.strip(), "Unavailable says why"
            assert not spec.fallback, "a fallback platform is always available"
            return
        assert probed, "no device: answer Unavailable(reason) instead of []"
        assert [device.index for device in probed] == list(range(len(probed)))
        for device in probed:
            assert (device.platform, device.device_type) == (spec.name, spec.device_type)
            assert device.dtypes, "at least one dtype"
            assert 0 <= device.free_memory <= device.total_memory
            assert not device.described
            assert msgspec.json.decode(msgspec.json.encode(device), type=DeviceInfo) == device

    def test_worker_env_is_text(self, target: Any) -> None:
        platform = target()
        env = platform.worker_env(EngineConfig(), 0)
        assert all(isinstance(k, str) and isinstance(v, str) for k, v in env.items())
        assert platform.worker_env(EngineConfig(), 0) == env

    def test_names_agree(self, spec: PlatformSpec, target: Any) -> None:
        platform = target()
        assert (platform.name, platform.device_type) == (spec.name, spec.device_type)

    def test_defaults_are_configuration_keys(self, target: Any, probed: list[DeviceInfo] | Unavailable) -> None:
        if isinstance(probed, Unavailable):
            pytest.skip(f"no device: {probed.reason}")
        from lmkit_testing.toy import toy_info

        for key in target().defaults(toy_info(), probed[0]):
            section, _, name = key.partition(".")
            assert hasattr(getattr(EngineConfig(), section, None), name), f"{key} is no configuration key"

    def test_buffer_contract(self, bound: tuple[Any, Any]) -> None:
        """What is written on the host is on the device after push; the slice has n rows; host and device keep size."""
        import torch

        platform, device = bound
        for shape, dtype in [((5,), torch.int64), ((4, 3), torch.int32)]:
            buffer = platform.buffer(shape, dtype)
            assert buffer.host.device.type == "cpu"
            assert (buffer.device.device.type, buffer.device.shape) == (device.type, buffer.host.shape)
            assert (buffer.host.dtype, buffer.device.dtype) == (dtype, dtype)
            view = buffer.host.numpy()
            for n in (0, 1, shape[0]):
                view[:] = n + 7
                pushed = buffer.push(n)
                event = platform.event()
                event.record()
                event.wait()
                assert event.query()
                assert pushed.shape == (n, *shape[1:])
                assert torch.equal(pushed.cpu(), buffer.host[:n])
                assert pushed.data_ptr() == buffer.device.data_ptr() or n == 0, "a slice of the device twin"

    def test_free_memory_is_plausible(self, bound: tuple[Any, Any], probed: list[DeviceInfo]) -> None:
        assert 0 < bound[0].free_memory() <= max(device.total_memory for device in probed)

    def test_upload(self, bound: tuple[Any, Any]) -> None:
        """Values arrive, and where they are copied the source may be written at once."""
        import torch

        platform, device = bound
        for source in (torch.arange(100_000), torch.tensor(0.5), torch.ones(3, 8, dtype=torch.bfloat16)[:, 2:]):
            expected, there = source.clone(), platform.upload(source)
            if there.data_ptr() != source.data_ptr():
                source.zero_()
            assert (there.device.type, there.dtype) == (device.type, expected.dtype)
            assert torch.equal(there.cpu(), expected)

    def test_what_is_measured_is_run(self, bound: tuple[Any, Any]) -> None:
        import torch

        platform, device = bound
        runs: list[int] = []
        taken = platform.measure(lambda: runs.append(torch.empty(1 << 20, device=device).nbytes))
        assert (taken is None and not runs) or taken >= runs[0] == 1 << 22

    def test_graphs_give_what_the_function_gives(self, bound: tuple[Any, Any]) -> None:
        import torch
        from lmkit.api import StepInputs

        platform, device = bound
        graphs = platform.graphs(StepLimits(max_rows=2, max_tokens=4, max_blocks_per_row=2, max_length=8))
        ids = torch.arange(3, device=device)
        step = StepInputs(ids, ids, [], [], ids)
        assert torch.equal(graphs.run(lambda x: x.token_ids * 2, step), ids * 2)

    def test_one_rank_needs_no_communication(self, bound: tuple[Any, Any]) -> None:
        import torch

        platform, device = bound
        group = platform.collectives(0, 1)
        x = torch.arange(4.0, device=device)
        assert (group.rank, group.size) == (0, 1)
        for result in (group.all_reduce(x.clone()), group.all_gather(x.clone(), 0), group.broadcast(x.clone(), 0)):
            assert torch.equal(result, x)
