"""What needs no flashinfer: rows and pages, what is refused, options. Its own code is in test_contract.py."""

from __future__ import annotations

import itertools
import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lmkit.api import (
    AttentionRequest,
    AttentionSpec,
    AttnBatch,
    AttnNeed,
    DeviceInfo,
    NewRow,
    SamplingParams,
    StepLimits,
    StepPlan,
)
from lmkit.plugins.host import PluginHost
from lmkit.plugins.select import consider
from lmkit.plugins.switches import Switches
from lmkit_attention_flashinfer import check
from lmkit_attention_flashinfer.backend import MIB, FlashInferAttention, scratch
from lmkit_attention_flashinfer.hooks import Options
from lmkit_attention_flashinfer.pages import StepIntegers, page_arrays, working_rows
from lmkit_attention_flashinfer.planner import decode_rows
from lmkit_testing import PluginConformance
from lmkit_testing.attention import unforeseen
from lmkit_testing.host import codes, make_device
from lmkit_testing.toy import ToyPlatform
from lmkit_worker.rows import RowTable
from lmkit_worker.tables import StepTable
from torch.utils._python_dispatch import TorchDispatchMode

H100 = make_device("cuda", cc=(9, 0))


class TestFlashInfer(PluginConformance):
    plugin = "attention:flashinfer"

    def test_selection_knows_what_cannot_run(self, spec: AttentionSpec) -> None:
        assert not unforeseen(spec, FlashInferAttention())


def test_rows_are_split_by_wrapper() -> None:
    def split(queries: list[int], num_decode: int) -> tuple[list[int], list[int]]:
        rows = np.flatnonzero(queries)
        n = decode_rows(rows, np.array(queries, np.int32)[rows], num_decode)
        return rows[:n].tolist(), rows[n:].tolist()

    assert split([1, 1, 5], 2) == ([0, 1], [2])
    assert split([1, 0, 5, 0], 2) == ([0], [2])
    assert split([3, 1, 5], 2) == ([], [0, 1, 2])  # drafts among the decode rows
    assert split([1, 1, 1], 2) == ([0, 1], [2])
    assert split([], 0) == ([], [])


def test_pages() -> None:
    starts, last = page_arrays(np.array([17, 33, 16], np.int32), 16)
    assert (starts.tolist(), last.tolist()) == ([0, 2, 5, 6], [1, 1, 16])


class Twin:
    """A buffer of two tensors."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        self.host, self.device = (torch.full(shape, 77, dtype=dtype) for _ in range(2))

    def push(self, n: int) -> torch.Tensor:
        self.device[:n].copy_(self.host[:n])
        return self.device[:n]


class Twins(ToyPlatform):
    def buffer(self, shape: tuple[int, ...], dtype: torch.dtype) -> Twin:
        return Twin(shape, dtype)


ROWS, BLOCKS, SIZE = 5, 9, 4


def step_of(table: StepTable, held: list[np.ndarray], queries: list[int], lengths: list[int]) -> AttnBatch:
    """Rows whose tokens fill the blocks that they hold, so many of them computed in this step."""
    n, platform = len(held), Twins()
    query_start, seq_len = platform.buffer((n + 1,), torch.int32), platform.buffer((n,), torch.int32)
    query_start.host.copy_(torch.tensor(np.cumsum([0, *queries])))
    seq_len.host.copy_(torch.tensor(lengths))
    slots = platform.buffer((sum(queries),), torch.int64)
    return AttnBatch(query_start, seq_len, table, slots, n, sum(queries), max(queries), max(lengths), n)


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_pages_are_those_of_a_list_made_from_scratch(data: st.DataObject) -> None:
    """Rows come, grow, rest, leave and change places; of the table on the device only changes are sent."""
    rows = RowTable(ROWS, SIZE * BLOCKS, [BLOCKS])
    table, fresh = StepTable(rows, 0, Twins()), iter(range(1, 10_000))
    integers = StepIntegers(StepLimits(ROWS, 64, BLOCKS, SIZE * BLOCKS), torch.device("cpu"))
    for step in range(data.draw(st.integers(1, 10))):
        living = sorted(rows.slot_of)
        gone = data.draw(st.lists(st.sampled_from(living), unique=True)) if living else []
        left = [id for id in living if id not in gone]
        room = {id: BLOCKS - int(rows.num_blocks[0, rows.slot_of[id]]) for id in left}
        grown = [(id, [[next(fresh) for _ in range(data.draw(st.integers(0, min(3, room[id]))))]]) for id in left]
        new = [
            NewRow(f"{step}.{i}", 0, [0], 1, [[next(fresh) for _ in range(n)]], 0, SamplingParams())
            for i, n in enumerate(data.draw(st.lists(st.integers(1, BLOCKS), max_size=ROWS - len(left))))
        ]
        rows.apply(StepPlan(step, gone=gone, new=new, grown=grown))
        if not rows.slot_of:
            continue
        order = data.draw(st.permutations(sorted(rows.slot_of)))
        slots = np.array([rows.slot_of[id] for id in order[: data.draw(st.integers(1, len(order)))]])
        table.fill(slots)
        held = [rows.row_blocks(0, slot) for slot in slots.tolist()]
        queries = [data.draw(st.integers(0, 2)) for _ in held]
        lengths = [len(blocks) * SIZE - data.draw(st.integers(0, SIZE - 1)) for blocks in held]
        batch = step_of(table, held, queries, lengths)
        working, _, long = working_rows(batch)
        split = data.draw(st.integers(0, len(working)))
        starts = integers.put(batch, working, long, split, SIZE)
        pages = integers.push(batch, len(working), int(starts[-1]))
        listed = [held[row].tolist() for row in working]
        assert pages.tolist() == list(itertools.chain(*listed))
        ends = np.cumsum([0, *map(len, listed)])
        assert integers.indptr.device[: split + 1].tolist() == ends[: split + 1].tolist()
        assert integers.indptr.device[split + 1 : len(working) + 2].tolist() == (ends[split:] - ends[split]).tolist()
        last = integers.last_page.device[: len(working)].tolist()
        assert [lengths[row] for row in working] == [
            (len(blocks) - 1) * SIZE + rest for blocks, rest in zip(listed, last, strict=True)
        ]
        assert integers.lengths.device[: len(working)].tolist() == [lengths[row] for row in working]


def test_what_a_step_costs_does_not_depend_on_the_length_of_rows() -> None:
    """256 rows of up to 128k tokens: bytes that are sent, in one copy, and the operations of the host."""

    class Counted(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.copied: list[int] = []
            self.names: list[str] = []

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.names.append(func.overloadpacket.__name__)
            if "copy" in self.names[-1]:
                self.copied.append(args[1].nbytes)
            return func(*args, **kwargs or {})

    counts = []
    for tokens in (100, 131_072):
        num_rows, width = 256, 8192
        rows = RowTable(num_rows, 1, [width])
        blocks = -(-tokens // 16)
        rows.num_blocks[0] = blocks
        table = StepTable(rows, 0, Twins())
        integers = StepIntegers(StepLimits(num_rows, 256, width, 131_072), torch.device("cpu"))
        slots = np.arange(num_rows)
        table.fill(slots)
        table.push(num_rows)
        batch = step_of(table, [np.zeros(blocks)] * num_rows, [1] * num_rows, [tokens] * num_rows)
        table.fill(slots)
        with Counted() as counted:
            working, _, long = working_rows(batch)
            starts = integers.put(batch, working, long, num_rows, 16)
            integers.push(batch, num_rows, int(starts[-1]))
        assert len(counted.copied) == 1
        counts.append((counted.copied, sorted(counted.names)))
    assert counts[0] == counts[1]
    assert counts[0][0][0] < 8192


def test_scratch_memory_is_enough() -> None:
    """What flashinfer asked for in the decode steps of an 8B model on 132 multiprocessors, by its own formula."""
    need = AttnNeed(128, 32, 8, "bfloat16", "bfloat16", 16)
    assert scratch(need, 64) < 128 * MIB < scratch(need, 512)
    for rows in (1, 64, 512):
        tiles = max(132 * 2 // 8, -(-rows * 4 // 16) + rows - 1)
        assert scratch(need, rows) >= 32 * tiles * 16 * (128 + 1) * 4


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
def test_slots_of_nobody_are_written_to_the_null_block(dtype: torch.dtype) -> None:
    kv = torch.zeros(2, 3, 4, 2, 8).to(dtype)
    k = torch.arange(1.0, 4).to(torch.bfloat16)[:, None, None].expand(3, 2, 8)
    FlashInferAttention().write_kv(k, -k, kv, torch.tensor([5, -1, 11]))
    slots = kv.float().view(2, 12, 16)
    assert slots[0, :, 0].tolist() == [2, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 3]
    assert torch.equal(slots[1], -slots[0])


def test_values_too_large_for_eight_bits() -> None:
    kv = torch.zeros(2, 1, 1, 1, 2, dtype=torch.float8_e4m3fn)
    large = torch.tensor([[[1e6, -1e6]]])
    FlashInferAttention().write_kv(large, large, kv, torch.tensor([0]))
    assert kv.float().flatten().tolist() == [448, -448, 448, -448]


def request(device: DeviceInfo, **fields: Any) -> AttentionRequest:
    need = AttnNeed(**{"head_dim": 128, "num_q_heads": 32, "num_kv_heads": 8, **fields})
    return AttentionRequest(need=need, device=device, dtype="bfloat16")


@pytest.mark.parametrize(
    ("device", "fields", "expected"),
    [
        (make_device("cpu"), {}, {"requirement-missing", "platform"}),
        (make_device("cuda", cc=(7, 5)), {}, {"requirement-missing", "capability"}),
        (make_device("cuda", cc=(9, 0)), {}, {"requirement-missing"}),
        (
            make_device("cuda", cc=(9, 0)),
            {"sinks": True, "head_dim": 96},
            {"requirement-missing", "feature", "head-dim"},
        ),
    ],
)
def test_refusals(
    device: DeviceInfo, fields: dict[str, Any], expected: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    host = PluginHost(switches=Switches())
    versions = SimpleNamespace(installed_version=lambda name: None)
    monkeypatch.setattr(host, "installed_version", versions.installed_version)
    assert codes(consider(host, request(device, **fields), "flashinfer")) == {"flashinfer": expected}


def test_auto_leaves_it_out() -> None:
    host = PluginHost(switches=Switches())
    assert "experimental" in codes(consider(host, request(make_device("cuda", cc=(9, 0)))))["flashinfer"]


@pytest.mark.parametrize(
    ("kernels", "capability", "kv_dtype", "reason"),
    [
        ("auto", (8, 0), "float8_e4m3fn", ""),
        ("fa2", (12, 0), "bfloat16", ""),
        ("fa3", (9, 0), "bfloat16", ""),
        ("fa3", (8, 9), "bfloat16", "capability 9.0"),
        ("fa3", (10, 0), "bfloat16", "capability 9.0"),
        ("fa3", (9, 0), "float8_e4m3fn", "bfloat16 alone"),
    ],
)
def test_kernels_that_cannot_run(kernels: str, capability: tuple[int, int], kv_dtype: str, reason: str) -> None:
    backend = FlashInferAttention(kernels=kernels)
    found = backend.can_run(AttnNeed(128, 32, 8, "bfloat16", kv_dtype, 16), make_device("cuda", cc=capability))
    assert reason in found if reason and found else found is None and not reason


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({}, ""),
        ({"num_q_heads": 128}, ""),
        ({"num_q_heads": 96}, "a divisor of 128"),
        ({"head_dim": 320, "v_head_dim": 256}, "576 with 512"),
        ({"kv_dtype": "float8_e4m3fn"}, "kept in bfloat16"),
        ({"window": 5}, "without window"),
        ({"mla": False}, "differs"),
        ({"mla": False, "v_head_dim": None}, "latents (mla) alone"),
    ],
)
def test_latents_that_cannot_be_read(change: dict[str, Any], reason: str) -> None:
    need = replace(AttnNeed(576, 16, 1, "bfloat16", "bfloat16", 16, v_head_dim=512, mla=True), **change)
    for capability in ((8, 0), (9, 0)):
        found = FlashInferAttention().can_run(need, make_device("cuda", cc=capability))
        assert reason in found if reason and found else found is None and not reason


def test_latents_of_nobody_are_written_to_the_null_block() -> None:
    kv = torch.zeros(3, 4, 8)
    k = torch.arange(1.0, 4)[:, None, None].expand(3, 1, 8)
    FlashInferAttention().write_kv(k, k[..., :6], kv, torch.tensor([5, -1, 11]))
    assert kv.view(12, 8)[:, 7].tolist() == [2, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 3]


def test_compilers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Kernels are compiled when they are first used, so a machine that cannot compile is refused before."""
    found = {"nvcc": None, "ninja": None}
    here = DeviceInfo("cuda", "cuda", capability=(9, 0))
    monkeypatch.setattr(check, "_installed", lambda dist: False)
    monkeypatch.setattr(check.shutil, "which", lambda name: found[name])
    for name in ("CUDA_HOME", "CUDA_PATH", "FLASHINFER_NVCC"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))

    def missing() -> list[str]:
        return [f"{r.offered} -> {r.fix}" for r in check.compilers(request(here))]

    (both,) = missing()
    assert both.startswith("no nvcc and no ninja -> install the CUDA toolkit")
    found["ninja"] = "/bin/ninja"
    assert "ninja" not in missing()[0].partition(";")[0]
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/nvcc").touch()
    assert missing() == []
    monkeypatch.setenv("CUDA_HOME", os.devnull)
    assert "no nvcc" in missing()[0]
    assert list(check.compilers(request(H100))) == []  # a described device
    monkeypatch.setattr(check, "_installed", lambda dist: True)
    assert missing() == []


def test_options() -> None:
    assert Options().workspace_mb == 128
    with pytest.raises(ValueError, match="at least 16"):
        Options(workspace_mb=1)
    with pytest.raises(ValueError, match="auto, fa2 or fa3"):
        Options(kernels="fa9")
