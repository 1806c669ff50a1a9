"""What needs no flashinfer: rows and pages, what is refused, options. Its own code is in test_contract.py."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from lmkit.api import AttentionRequest, AttnNeed, DeviceInfo
from lmkit.plugins.host import PluginHost
from lmkit.plugins.select import consider
from lmkit.plugins.switches import Switches
from lmkit_attention_flashinfer import check
from lmkit_attention_flashinfer.backend import MIB, FlashInferAttention, scratch
from lmkit_attention_flashinfer.hooks import Options
from lmkit_attention_flashinfer.planner import page_arrays, put_pages, split_rows
from lmkit_testing import PluginConformance
from lmkit_testing.host import codes, make_device

H100 = make_device("cuda", cc=(9, 0))


class TestFlashInfer(PluginConformance):
    plugin = "attention:flashinfer"


def test_rows_are_split_by_wrapper() -> None:
    def split(queries: list[int], num_decode: int) -> tuple[list[int], list[int]]:
        rows, n = split_rows(np.array(queries, np.int32), num_decode)
        return rows[:n].tolist(), rows[n:].tolist()

    assert split([1, 1, 5], 2) == ([0, 1], [2])
    assert split([1, 0, 5, 0], 2) == ([0], [2])
    assert split([3, 1, 5], 2) == ([], [0, 1, 2])  # drafts among the decode rows
    assert split([1, 1, 1], 2) == ([0, 1], [2])
    assert split([], 0) == ([], [])


def pages_of(table: np.ndarray, lengths: list[int], rows: list[int], size: int) -> list[tuple[list[int], int]]:
    """The pages of each row, and the tokens in its last."""
    starts, last = page_arrays(np.array(lengths, np.int32)[rows], size)
    out = np.full(starts[-1] + 1, -1, np.int32)
    put_pages(table, np.array(rows, np.int64), starts, out)
    assert out[-1] == -1
    return [(out[a:b].tolist(), tokens) for a, b, tokens in zip(starts, starts[1:], last.tolist(), strict=False)]


def test_pages() -> None:
    table = np.array([[7, 3, 0], [2, 0, 0], [5, 6, 4]], np.int32)
    assert pages_of(table, [17, 16, 33], [0, 2], 16) == [([7, 3], 1), ([5, 6, 4], 1)]
    assert pages_of(table, [17, 16, 33], [1], 16) == [([2], 16)]
    assert pages_of(table, [17, 16, 33], [], 16) == []


@given(st.lists(st.integers(1, 400), min_size=1, max_size=8), st.sampled_from([1, 2, 8, 16]), st.data())
def test_pages_are_those_of_each_row(lengths: list[int], size: int, data: st.DataObject) -> None:
    """Short rows and long ones, which are written in different ways."""
    table = np.arange(len(lengths) * 401, dtype=np.int32).reshape(len(lengths), 401)
    rows = sorted(data.draw(st.sets(st.integers(0, len(lengths) - 1))))
    for row, (pages, tokens) in zip(rows, pages_of(table, lengths, rows, size), strict=True):
        assert pages == table[row, : len(pages)].tolist()
        assert 1 <= tokens <= size
        assert (len(pages) - 1) * size + tokens == lengths[row]


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
