"""The backend without a GPU: stand-ins for flashinfer's wrappers that follow their documented contract, and the kit."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from lmkit.api import AttentionRequest, AttnNeed, DeviceInfo
from lmkit.plugins.host import PluginHost
from lmkit.plugins.select import consider
from lmkit.plugins.switches import Switches
from lmkit_attention_flashinfer.backend import FlashInferAttention, page_arrays, split_rows
from lmkit_attention_flashinfer.hooks import Options
from lmkit_testing import AttentionConformance
from lmkit_testing.host import codes, make_device
from torch import Tensor


class Wrapper:
    """What both wrappers have in common: pages per row, dense attention over them."""

    def __init__(self, workspace: Tensor, layout: str, **options: Any) -> None:
        assert layout == "NHD"
        assert workspace.dtype == torch.uint8
        self.options = options

    def keep(
        self, query_start: Tensor, indptr: Tensor, indices: Tensor, last_page: Tensor, page: int, how: Any
    ) -> None:
        assert all(t.dtype == torch.int32 for t in (query_start, indptr, indices, last_page))
        assert len(query_start) == len(indptr) == len(last_page) + 1
        assert indptr[-1] == len(indices)
        assert bool(((last_page >= 1) & (last_page <= page)).all())
        assert how["sm_scale"] == 1.0
        self.rows, self.how = [], how
        for i in range(len(last_page)):
            pages = indices[indptr[i] : indptr[i + 1]].long()
            length = (len(pages) - 1) * page + int(last_page[i])
            self.rows.append((int(query_start[i]), int(query_start[i + 1]), pages, length))

    def attend(self, q: Tensor, kv: Tensor, scale: float, out: Tensor, causal: bool) -> None:
        assert q.dtype == self.how["q_data_type"]
        assert kv.dtype == self.how["kv_data_type"]
        assert self.rows[-1][1] == len(q)
        for first, last, pages, length in self.rows:
            keys, values = (kv[pages, part].flatten(0, 1)[:length].float() for part in (0, 1))
            queries = q[first:last].float().view(last - first, keys.shape[1], -1, q.shape[-1])
            scores = torch.einsum("qhgd,lhd->hgql", queries, keys) * scale
            if cap := self.how["logits_soft_cap"]:
                scores = torch.tanh(scores / cap) * cap
            distance = torch.arange(length - (last - first), length)[:, None] - torch.arange(length)
            hidden = (distance < 0) if causal else torch.zeros_like(distance, dtype=torch.bool)
            if self.how["window_left"] >= 0:
                hidden |= distance > self.how["window_left"]
            probs = scores.masked_fill(hidden, -torch.inf).softmax(-1)
            out[first:last] = torch.einsum("hgql,lhd->qhgd", probs, values).reshape(out[first:last].shape).to(out.dtype)


class Decode(Wrapper):
    def plan(
        self, indptr: Tensor, indices: Tensor, last_page_len: Tensor,
        num_qo_heads: int, num_kv_heads: int, head_dim: int, page_size: int, **how: Any,
    ) -> None:  # fmt: skip
        self.keep(torch.arange(len(indptr), dtype=torch.int32), indptr, indices, last_page_len, page_size, how)

    def run(self, q: Tensor, kv: Tensor, *, q_scale: float, out: Tensor) -> None:
        self.attend(q, kv, q_scale, out, causal=False)


class Prefill(Wrapper):
    def plan(
        self, qo_indptr: Tensor, indptr: Tensor, indices: Tensor, last_page_len: Tensor,
        num_qo_heads: int, num_kv_heads: int, head_dim_qk: int, page_size: int, *, causal: bool, **how: Any,
    ) -> None:  # fmt: skip
        self.causal = causal
        self.keep(qo_indptr, indptr, indices, last_page_len, page_size, how)

    def run(self, q: Tensor, kv: Tensor, *, q_scale: float, out: Tensor) -> None:
        self.attend(q, kv, q_scale, out, self.causal)


class TestFlashInfer(AttentionConformance):
    plugin = "attention:flashinfer"

    @pytest.fixture
    def target(self, monkeypatch: pytest.MonkeyPatch) -> type[FlashInferAttention]:
        module = ModuleType("flashinfer")
        module.BatchDecodeWithPagedKVCacheWrapper = Decode  # type: ignore[attr-defined]
        module.BatchPrefillWithPagedKVCacheWrapper = Prefill  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "flashinfer", module)
        return FlashInferAttention

    @pytest.fixture
    def backend(self, target: type[FlashInferAttention]) -> FlashInferAttention:
        return target(workspace_mb=16)


def test_rows_are_split_by_wrapper() -> None:
    def split(queries: list[int], lengths: list[int], num_decode: int) -> tuple[list[int], list[int]]:
        decode, prefill = split_rows(torch.tensor(queries), torch.tensor(lengths), num_decode)
        return decode.tolist(), prefill.tolist()

    assert split([1, 1, 5], [9, 3, 5], 2) == ([0, 1], [2])
    assert split([1, 0, 5, 0], [9, 3, 5, 0], 2) == ([0], [2])
    assert split([3, 1, 5], [9, 3, 5], 2) == ([], [0, 1, 2])  # drafts among the decode rows
    assert split([], [], 0) == ([], [])


def test_page_arrays() -> None:
    table = torch.tensor([[7, 3, 0], [2, 0, 0], [5, 6, 4]], dtype=torch.int32)
    indptr, indices, last = page_arrays(table, torch.tensor([17, 16, 33]), torch.tensor([0, 2]), 16)
    assert indptr.tolist() == [0, 2, 5]
    assert indices.tolist() == [7, 3, 5, 6, 4]
    assert last.tolist() == [1, 1]
    _, _, last = page_arrays(table, torch.tensor([17, 16, 33]), torch.tensor([1]), 16)
    assert last.tolist() == [16]


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


def test_options() -> None:
    assert Options().workspace_mb == 128
    with pytest.raises(ValueError, match="at least 16"):
        Options(workspace_mb=1)
    with pytest.raises(ValueError, match="auto, fa2 or fa3"):
        Options(kernels="fa9")
