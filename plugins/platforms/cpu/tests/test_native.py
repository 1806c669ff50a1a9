"""The native library: the pool, tapes, instruction sets, captured decode steps."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from collections.abc import Iterator
from ctypes import c_int32, c_int64, c_void_p
from threading import Thread
from types import SimpleNamespace

import pytest
import torch
from lmkit.api import ConfigError, PluginError, StepInputs, StepLimits
from lmkit_platform_cpu import native as module
from lmkit_platform_cpu.graphs import CpuGraphs
from lmkit_platform_cpu.native import DTYPES, Args, Native
from lmkit_platform_cpu.platform import CpuPlatform
from torch import Tensor

LIBRARY = module.load()
pytestmark = pytest.mark.skipif(LIBRARY is None, reason="the native library is not built here")
ISAS = LIBRARY.isas if LIBRARY is not None else ()
FLOATS = (torch.float32, torch.bfloat16, torch.float16)


class ConvertArgs(Args):
    _fields_ = [
        ("source", c_void_p), ("target", c_void_p), ("count", c_int64), ("step", c_int64), ("from_", c_int32),
        ("to", c_int32),
    ]  # fmt: skip


@pytest.fixture
def native() -> Iterator[Native]:
    assert LIBRARY is not None
    before = LIBRARY.threads
    yield LIBRARY
    LIBRARY.set_isa("auto")
    LIBRARY.start(before)


def convert(native: Native, source: Tensor, target: Tensor, step: int = 64) -> None:
    count = source.numel()
    args = ConvertArgs(
        source=source.data_ptr(), target=target.data_ptr(), count=count, step=step, from_=DTYPES[str(source.dtype)],
        to=DTYPES[str(target.dtype)],
    )  # fmt: skip
    args.chunks[0] = -(-count // step)
    native.run("convert", args)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("source", FLOATS, ids=str)
@pytest.mark.parametrize("target", FLOATS, ids=str)
def test_conversion_rounds_as_torch_does(native: Native, isa: str, source: torch.dtype, target: torch.dtype) -> None:
    """Every bit pattern of the narrow types, and floats around every boundary; nothing beyond the end is written."""
    native.set_isa(isa)
    if source == torch.float32:
        bits = torch.randint(-(1 << 31), 1 << 31, (50_001,), generator=torch.Generator().manual_seed(0))
        special = [0.0, -0.0, torch.inf, -torch.inf, torch.nan, 65504, 65519.9, 65520, 6e-8, 2.9e-8, 6.1e-5, 3e38]
        values = torch.cat((bits.to(torch.int32).view(torch.float32), torch.tensor(special), torch.randn(5000)))
    else:
        values = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int16).view(source)
    out = torch.full((len(values) + 3,), torch.nan).to(target)
    convert(native, values, out)
    expected = values.to(target)
    same = (out[:-3] == expected) | (out[:-3].isnan() & expected.isnan())
    if isa in ("avx512_bf16", "amx") and target == torch.bfloat16:  # its instruction takes subnormal numbers for zero
        same |= (expected.float().abs() <= 1.2e-38) & (out[:-3] == 0)
    assert same.all(), (values[~same][:5], out[:-3][~same][:5], expected[~same][:5])
    assert out[-3:].isnan().all()


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_phases_run_one_after_another(native: Native, threads: int) -> None:
    """A chain in which each phase reads what the one before wrote, in chunks that do not match."""
    native.start(threads)
    values = torch.randn(10_007)
    with native.capture() as tape:
        chain = [values]
        for i in range(60):
            chain.append(torch.zeros(values.shape, dtype=(torch.float32, torch.float16)[i % 2]))
            convert(native, chain[-2], chain[-1], step=32 + 17 * i)
    assert len(tape) == 60
    assert not chain[1].any(), "nothing runs while it is recorded"
    expected = values.half().float()
    for _ in range(40):
        for tensor in chain[1:]:
            tensor.zero_()
        tape.run()
        assert torch.equal(chain[-2].float() if chain[-1].dtype != torch.float32 else chain[-1], expected)


def test_chunks_are_counted_when_a_phase_begins(native: Native) -> None:
    """A phase may write the number of chunks of a later one; none is legal."""
    source, target, count = torch.arange(8, dtype=torch.float32), torch.zeros(8), torch.zeros(1, dtype=torch.int64)
    args = ConvertArgs(source=source.data_ptr(), target=target.data_ptr(), count=8, step=2, from_=0, to=0)
    with native.capture() as tape:
        native.run("convert", args, chunks=count.data_ptr())
    for chunks in (0, 1, 3, 4):
        target.zero_()
        count[0] = chunks
        tape.run()
        assert torch.equal(target[: 2 * chunks], source[: 2 * chunks])
        assert not target[2 * chunks :].any()


def test_callers_take_turns(native: Native) -> None:
    native.start(3)
    wrong: list[int] = []

    def work(number: int) -> None:
        values = torch.full((5000,), float(number))
        for _ in range(200):
            out = torch.zeros(5000)
            convert(native, values, out)
            if not torch.equal(out, values):
                wrong.append(number)

    threads = [Thread(target=work, args=(i,)) for i in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_a_forked_child_has_a_pool_of_its_own() -> None:
    code = (
        "import ctypes, os\n"
        "from lmkit_platform_cpu.native import Args, load\n"
        "n = load(); n.start(2)\n"
        "class A(Args): _fields_ = [('s', ctypes.c_void_p), ('t', ctypes.c_void_p), ('c', ctypes.c_int64),"
        " ('k', ctypes.c_int64), ('f', ctypes.c_int32), ('g', ctypes.c_int32)]\n"
        "def run():\n"
        "    s, t = (ctypes.c_float * 4)(1, 2, 3, 4), (ctypes.c_float * 4)()\n"
        "    a = A(s=ctypes.addressof(s), t=ctypes.addressof(t), c=4, k=1); a.chunks[0] = 4\n"
        "    n.run('convert', a); assert list(t) == [1, 2, 3, 4]\n"
        "run(); pid = os.fork(); run()\n"
        "if pid == 0: os._exit(7)\n"
        "assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7\n"
    )  # fmt: skip
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_both_sides_name_instruction_sets_alike(native: Native) -> None:
    names = [native._library.lk_isa_name(i) for i in range(len(module.ISAS) + 1)]
    assert names == [*(name.encode() for name in module.ISAS), None]


def test_what_does_not_fit_is_an_error(native: Native) -> None:
    with pytest.raises(PluginError, match="no operator 'convolve'"):
        native.run("convolve", Args())
    with pytest.raises(PluginError, match="another version"):
        native.run("read", Args())
    with pytest.raises(ConfigError, match="'mmx'"):
        native.set_isa("mmx")
    with pytest.raises(ConfigError, match="0 threads"):
        native.start(0)


def test_the_option_forces_an_instruction_set(native: Native) -> None:
    threads = torch.get_num_threads()
    CpuPlatform(isa="portable").bind(0, 1)
    assert (native.isa, native.threads) == ("portable", 1)
    CpuPlatform().bind(0, 2)
    assert (native.isa, native.threads) == (ISAS[-1], 2)
    torch.set_num_threads(threads)


def test_machine_without_the_library(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """It works, and says at once what it costs."""
    monkeypatch.setattr("lmkit_platform_cpu.platform.load", lambda: None)
    monkeypatch.setattr(module, "load", lambda: None)
    platform = CpuPlatform()
    threads = torch.get_num_threads()
    platform.bind(0)
    torch.set_num_threads(threads)
    assert platform.native is None
    (record,) = caplog.records
    assert "half the speed" in record.getMessage()
    assert "half the speed" in (module.doctor() or "")
    assert module.own_processor_flags() == ()
    with pytest.raises(ConfigError, match="avx2"):
        CpuPlatform(isa="avx2").bind(0)


# ------------------------------------------------------------------------------------------------------- graphs

LIMITS = StepLimits(max_rows=4, max_tokens=8, max_blocks_per_row=1, max_length=8)


def inputs(buffer: Tensor, rows: int, capture: bool = True) -> StepInputs:
    return StepInputs(buffer[:rows], buffer[:rows], [SimpleNamespace(slots=buffer[:rows])], [], buffer, capture=capture)


def test_decode_steps_are_captured_once_per_number_of_rows(native: Native) -> None:
    """Replays read the new content of the same buffers, run no Python, and views and temporaries work."""
    calls = []

    def forward(x: StepInputs) -> Tensor:
        calls.append(len(x.token_ids))
        h = x.token_ids.view(torch.float32)
        for _ in range(3):
            wide = h.new_empty(h.shape, dtype=torch.float16)
            convert(native, h, wide)
            h = torch.empty_like(wide, dtype=torch.float32)
            convert(native, wide, h)
        return h.unsqueeze(1)

    graphs = CpuPlatform().graphs(LIMITS)
    assert isinstance(graphs, CpuGraphs)
    buffer = torch.zeros(8, dtype=torch.int64)
    floats = buffer.view(torch.float32)
    with torch.inference_mode():
        for rows in (1, 3, 1, 3, 4, 1):
            floats.copy_(torch.randn(16))
            out = graphs.run(forward, inputs(buffer, rows))
            assert torch.equal(out.flatten(), floats[: 2 * rows].half().float())
        assert calls == [1, 3, 4]
        graphs.run(forward, inputs(buffer, 5))
        graphs.run(forward, inputs(buffer, 2, capture=False))
    assert calls == [1, 3, 4, 5, 2], "too many rows, or a step that must not be captured: run directly"


def test_what_moves_rows_is_recorded_and_does_what_torch_does(native: Native) -> None:
    def forward(x: StepInputs) -> Tensor:
        h = x.token_ids.view(torch.float32).view(-1, 2)
        wide = torch.cat((h, h + h.clone()), -1)
        picked = wide[x.logits_rows]
        kept[: len(picked)].copy_(picked[:, 1])
        at = wide.argmax(-1, keepdim=True)
        return torch.cat((picked, table[at[:, 0]].unsqueeze(1)), 1)

    graphs, buffer, rows = CpuGraphs(native, 4), torch.zeros(4, dtype=torch.int64), torch.tensor([3, 0, 2, 1])
    table, kept = torch.randn(4), torch.zeros(4)
    x = StepInputs(buffer, buffer, [SimpleNamespace(slots=buffer)], [], rows, capture=True)
    with torch.inference_mode():
        for _ in range(3):
            buffer.view(torch.float32).copy_(torch.randn(8))
            rows.copy_(torch.randperm(4))
            found, left = graphs.run(forward, x).clone(), kept.clone()
            assert torch.equal(found, forward(x))
            assert torch.equal(left, kept)
    assert graphs.refused is None
    assert len(graphs.graphs) == 1


def test_temporaries_share_memory_as_they_did_when_recorded(native: Native) -> None:
    graphs = CpuGraphs(native, 4)

    def forward(x: StepInputs) -> Tensor:
        h = x.token_ids.view(torch.float32)
        for _ in range(50):
            fresh = torch.empty(h.shape)
            convert(native, h, fresh)
            h = fresh
        return h

    buffer = torch.arange(4)
    with torch.inference_mode():
        out = graphs.run(forward, inputs(buffer, 4))
    assert torch.equal(out, buffer.view(torch.float32))
    (graph,) = graphs.graphs.values()
    assert sum(map(len, graph.memory._free.values())) == 1, "two blocks for fifty tensors, one of them the result's"


def test_what_cannot_be_captured_runs_directly(native: Native) -> None:
    graphs = CpuGraphs(native, 4)
    calls = []

    def forward(x: StepInputs) -> Tensor:
        calls.append(1)
        return x.token_ids * 2

    buffer = torch.arange(4)
    for _ in range(3):
        assert torch.equal(graphs.run(forward, inputs(buffer, 4)), buffer * 2)
    assert graphs.refused is not None
    assert "mul" in graphs.refused
    assert len(calls) == 4, "one attempt, three steps"
    assert not native.capturing


def test_what_follows_a_captured_step_is_captured_too(native: Native) -> None:
    """Only of what a graph returned, and of few rows, whose results are kept for each number of rows."""
    calls = []

    def forward(x: StepInputs) -> Tensor:
        out = torch.empty(x.token_ids.shape)
        convert(native, x.token_ids.view(torch.float32)[: len(out)], out)
        return out

    def halves(hidden: Tensor) -> tuple[Tensor, Tensor]:
        calls.append(len(hidden))
        out = torch.empty(hidden.shape, dtype=torch.float16)
        convert(native, hidden, out)
        return out, hidden[:1]

    graphs, buffer = CpuGraphs(native, 8), torch.zeros(8, dtype=torch.int64)
    floats = buffer.view(torch.float32)
    with torch.inference_mode():
        for rows in (1, 3, 1, 3, 3):
            floats.copy_(torch.randn(16))
            half, first = graphs.then(halves, graphs.run(forward, inputs(buffer, rows)))
            assert torch.equal(half, floats[:rows].half())
            assert torch.equal(first, floats[:1])
        assert calls == [1, 3]
        hidden = graphs.run(forward, inputs(buffer, 3))
        assert torch.equal(graphs.then(halves, hidden[:2])[0], floats[:2].half())
        assert calls == [1, 3, 2], "other rows of the same are something else"
        for own in (hidden.clone(), graphs.run(forward, inputs(buffer, 8))):
            for _ in range(2):
                assert torch.equal(graphs.then(halves, own)[0], own.half())
        assert calls == [1, 3, 2, 3, 3, 8, 8], "neither is captured"
        for _ in range(3):
            assert torch.equal(graphs.then(torch.sinh, hidden), hidden.sinh())
    assert graphs.refused is None, "the step itself goes on as a graph"
    assert not native.capturing


def test_arguments_begin_with_the_header() -> None:
    assert ConvertArgs.source.offset == ctypes.sizeof(Args) == 8 * module.MAX_PHASES
