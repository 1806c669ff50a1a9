"""Conformance in the laboratory: values, bounds, races, and the bytes that decoding reads."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import ClassVar

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

from lmkit.api import AttnNeed, DeviceInfo, kv_scale_bytes
from lmkit_attention_torch.backend import quantize
from lmkit_attention_triton import backend
from lmkit_attention_triton.backend import TritonAttention
from lmkit_testing import AttentionConformance
from lmkit_testing.attention import Rows
from lmkit_testing.triton_lab import lab, mutant
from torch import Tensor


@pytest.mark.slow
class TestTriton(AttentionConformance):
    plugin = "attention:triton"
    device_info: ClassVar[DeviceInfo] = DeviceInfo(
        "cuda", "cuda", capability=(9, 0), dtypes=("float32", "bfloat16", "float16")
    )

    @pytest.fixture(autouse=True)
    def watched(self) -> Iterator[None]:
        with lab():
            yield


def rows(need: AttnNeed, count: int) -> Rows:
    return Rows(TritonAttention(), need, num_rows=count, length=300)


def test_tiles_of_hopper() -> None:
    """Its registers are limited so that two blocks fit; float8 caches with fewer values than keys keep away from
    blocks of 4 warps, whose results are wrong there."""
    hopper, other = backend.Room(backend.LARGE, hopper=True), backend.Room(backend.LARGE)
    for dim, keys in ((64, 128), (128, 64)):
        for kv_dtype in ("auto", "float8_e4m3fn"):
            shape = backend.programs_of(AttnNeed(dim, 8, 2, kv_dtype=kv_dtype), 64, 2, hopper)[1]
            assert shape == (128, keys, 8, 2, 128)
            assert shape.options["maxnreg"] == 128
    for room in (hopper, other, backend.NONE):
        for dim in (64, 128):
            uneven = AttnNeed(dim, 8, 2, kv_dtype="float8_e5m2", v_head_dim=16)
            shape = backend.programs_of(uneven, 64, 2, room)[1]
            assert (shape.warps, shape.registers) == (8, 0)
            assert "maxnreg" not in shape.options
    assert backend.programs_of(AttnNeed(128, 8, 2), 64, 4, hopper)[1].registers == 0, "float32 takes more"


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    "need",
    [
        AttnNeed(64, 4, 2, "bfloat16", "bfloat16", 16, window=9, softcap=8.0),
        AttnNeed(80, 3, 1, "float16", "float8_e4m3fn", 32, sinks=True),
        AttnNeed(24, 64, 1, "bfloat16", "bfloat16", 16, v_head_dim=16, mla=True),
        AttnNeed(80, 4, 2, "bfloat16", "int8", 32),
        AttnNeed(24, 8, 1, "float16", "int8", 16, v_head_dim=16, mla=True),
    ],
    ids=["window and softcap", "sinks and float8", "latents", "int8", "latents of int8"],
)
def test_prompts_and_decode_rows(need: AttnNeed) -> None:
    made = rows(need, 3)
    for work in ([(0, 20), (1, 2)], [(0, 1), (1, 1), (2, 5)], [(0, 1), (2, 1), (1, 1)]):
        with lab():
            for got, expected in zip(*made.step(work), strict=True):
                limit = 0.2 if need.kv_dtype != need.dtype else 3e-2
                assert (got.double() - expected).abs().max() <= limit * expected.abs().max()


@pytest.mark.slow
@pytest.mark.parametrize("kv_dtype", ["bfloat16", "float8_e4m3fn", "int8"])
@pytest.mark.parametrize("ratio", [1, 4])
def test_decoding_reads_the_cache_once(ratio: int, kv_dtype: str) -> None:
    """Not a head of queries at a time, and no page that the row does not have."""
    need = AttnNeed(128, 2 * ratio, 2, "bfloat16", kv_dtype, 16)
    made = rows(need, 3)
    with lab():
        made.step([(0, 130), (1, 17), (2, 255)])
    with lab() as seen:
        made.step([(0, 1), (1, 1), (2, 1)])
    cache = (131 + 18 + 256) * 2 * (256 * getattr(torch, kv_dtype).itemsize + kv_scale_bytes(kv_dtype))
    rest = 3 * 2 * ratio * 128 * 2 * 2 + 3 * 2 * 256 * 4  # queries, results, new keys and values
    splits = made.planner.splits(3)
    rest += 2 * 3 * 2 * ratio * splits * (128 + 8) * 4  # parts, written and read
    assert seen.moved <= 1.05 * (cache + rest)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("heads", [5, 16, 128])
def test_latents(heads: int, dtype: str) -> None:
    """DeepSeek's sizes, in one program and in several."""
    made = rows(AttnNeed(576, heads, 1, dtype, dtype, 16, v_head_dim=512, mla=True), 2)
    for work in ([(0, 18), (1, 2)], [(0, 1), (1, 1)]):
        with lab():
            for got, expected in zip(*made.step(work), strict=True):
                limit = {"float32": 1e-5, "float16": 4e-3}.get(dtype, 3e-2)
                assert (got.double() - expected).abs().max() <= limit * expected.abs().max()


def test_sizes_of_latents() -> None:
    backend, device = TritonAttention(), DeviceInfo("cuda", "cuda", capability=(9, 0))
    need = AttnNeed(576, 128, 1, "bfloat16", "bfloat16", 16, v_head_dim=512, mla=True)
    assert backend.can_run(need, device) is None
    assert "mla" in (backend.can_run(replace(need, v_head_dim=None), device) or "")
    assert "mla" in (backend.can_run(replace(need, v_head_dim=256), device) or "")
    assert "at most 256" in (backend.can_run(replace(need, mla=False), device) or "")


@pytest.mark.slow
def test_decoding_reads_latents_once_for_its_heads() -> None:
    """As keys and as values; heads that one program has no room for read them again."""
    for heads, times in ((16, 1), (64, 2)):
        need = AttnNeed(80, heads, 1, "bfloat16", "bfloat16", 16, v_head_dim=64, mla=True)
        made = rows(need, 1)
        with lab():
            made.step([(0, 60)])
        with lab() as seen:
            made.step([(0, 1)])
        parts = 2 * heads * made.planner.splits(1) * (64 + 8) * 4  # written and read
        queries = made.planner.splits(1) * heads * 80 * 2
        assert seen.moved <= 1.05 * (times * 61 * 80 * 2 + queries + heads * 64 * 2 + 2 * 80 * 2 + parts)


def test_a_plan_of_a_decode_step_stays_where_it_is() -> None:
    """So a captured graph reads the next step's."""
    need = AttnNeed(64, 4, 2, "bfloat16", "bfloat16", 16)
    made = rows(need, 3)
    with lab():
        made.step([(0, 5), (1, 30), (2, 64)])
    found = set()
    for _ in range(3):
        batch = made.paged.grow([(0, 1), (1, 1), (2, 1)], "cpu")
        plan = made.planner.plan(batch)
        numbers = (plan.num_decode, plan.num_rows, plan.splits, plan.max_query)
        found.add((plan.page_start.data_ptr(), *numbers))
        assert plan.pages.data_ptr() == batch.table.device.data_ptr(), "the table itself, which workers never move"
    assert len(found) == 1


def test_splits_depend_on_the_rows_alone_and_fill_a_device() -> None:
    need = AttnNeed(64, 32, 8, "bfloat16", "bfloat16", 16)
    planner = rows(need, 1).planner
    planner.most_splits = 32
    assert [planner.splits(n) for n in (1, 2, 8, 64, 256)] == [32, 32, 8, 1, 1]


FAULTS = {
    "mask too long": ("inside = key < high", "inside = key <= high"),
    "sees what follows": ("visible &= key <= position", "visible &= key <= position + 1"),
    "slot off by one": ("slot = tl.load(slots + token)", "slot = tl.load(slots + token) + 1"),
    "wrong page": ("key // PAGE, inside", "key // PAGE // 2, inside"),
    "no scale": ("factor = scores * scale, 1.0", "factor = scores, 1.0"),
    "parts of equal weight": ("share = tl.exp2(log - tl.max(log, 0))", "share = tl.exp(log - log)"),
    "window off by one": ("visible &= key > position - WINDOW", "visible &= key >= position - WINDOW"),
    "no fading": ("total * fade[:, None] +", "total +"),
    "wrong head": ("query_head = head * group + member", "query_head = head + member"),
    "half a softcap": (
        "softcap * (2 * tl.sigmoid(2 * scores / softcap) - 1)",
        "softcap * tl.sigmoid(scores / softcap)",
    ),
    "values of the keys": ("at[:, None] + k_size + j[None, :]", "at[:, None] + j[None, :]"),
}
FAULTS_OF_LATENTS = {
    "no rest": ("(r < k_size - v_size)[None, :]", "(r < 0)[None, :]"),
    "a rest of the first entries": ("(v_size + r[None, :]) * q_entry", "r[None, :] * q_entry"),
    "heads of the first program": ("tl.program_id(2) // SPLITS % GROUPS * GROUP + m % GROUP", "m % GROUP"),
}
FAULTS_OF_INT8 = {
    "scale of values for keys": ("scores *= of_first[None, :]", "scores *= of_second[None, :]"),
    "scale of another head": ("of_key = scales + block * s_block + head * PAGE", "of_key = scales + block * s_block"),
    "values without a scale": ("shares *= scales[None, :]", "shares *= 1.0"),
    "scale of another place": ("head * page + place\n    first", "head * page + place * 0\n    first"),
    "a scale of half a head": ("return tl.max(tl.abs(x), 1)", "return tl.abs(tl.max(x, 1))"),
    "cut, not rounded": ("(x + 12582912.0) - 12582912.0", "x * 1.0"),
}
PLAIN = AttnNeed(16, 4, 2, "float32", "float32", 16, window=130, softcap=8.0), 140
LATENTS = AttnNeed(24, 24, 1, "float32", "float32", 16, v_head_dim=16, mla=True), 20
INT8 = AttnNeed(16, 4, 2, "float32", "int8", 16), 40


class Whole(Rows):
    """Keys and values that int8 holds exactly, under scales that all differ."""

    def tokens(self, row: int, count: int) -> tuple[Tensor, Tensor, Tensor]:
        q, *both = super().tokens(row, count)
        rounded = []
        for x in both:
            codes, scales = quantize(x * torch.rand(x.shape[:-1], generator=self.noise(row, count))[..., None])
            rounded.append(codes * scales.view(torch.float32))
        return q, *rounded


def attended(need: AttnNeed, length: int) -> None:
    made = (Whole if need.kv_dtype == "int8" else Rows)(TritonAttention(), need, num_rows=3, length=300)
    for work in ([(0, length), (1, 2)], [(0, 1), (1, 1), (2, 5)], [(0, 1), (2, 1), (1, 1)]):
        for got, expected in zip(*made.step(work), strict=True):
            assert (got.double() - expected).abs().max() <= 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("name", [*FAULTS, *FAULTS_OF_LATENTS, *FAULTS_OF_INT8])
def test_faults_are_found(name: str, tmp_path: Path) -> None:
    step = partial(attended, *(LATENTS if name in FAULTS_OF_LATENTS else INT8 if name in FAULTS_OF_INT8 else PLAIN))
    fault = {**FAULTS, **FAULTS_OF_LATENTS, **FAULTS_OF_INT8}[name]
    with lab():
        step()
        with mutant(backend, *fault, tmp_path), pytest.raises(AssertionError):
            step()


def test_small_values_of_int8_are_not_lost() -> None:
    """In float16, where a share times a scale may be too small for it."""

    class Small(Rows):
        def tokens(self, row: int, count: int) -> tuple[Tensor, Tensor, Tensor]:
            q, k, v = super().tokens(row, count)
            return q, k, v * 1e-3

    made = Small(TritonAttention(), AttnNeed(16, 2, 1, "float16", "int8", 16), num_rows=1, length=60)
    with lab():
        (got,), (expected,) = made.step([(0, 50)])
    assert (got.double() - expected).abs().max() <= 2e-2 * expected.abs().max()


@pytest.mark.parametrize("mla", [False, True])
@pytest.mark.parametrize("turned", [False, True])
def test_codes_of_int8_are_the_references(mla: bool, turned: bool) -> None:
    """Code by code, and scale by scale; a head of zeros among them, and a token that is not written."""
    noise = torch.Generator().manual_seed(1)
    k = torch.randn(5, 1 if mla else 3, 24, generator=noise).bfloat16()
    k[2] = 0
    v = k[..., :16] if mla else torch.randn(5, 3, 16, generator=noise).bfloat16()
    heads, width = k.shape[1], 24 if mla else 40
    kv, slots = torch.full((3, 16, heads, width + 8), -1, dtype=torch.int8), torch.tensor([17, 40, 0, -1, 18])
    with lab():
        if turned:
            q, angles = k.repeat(1, 2, 1), torch.randn(2, 5, 8, generator=noise)
            TritonAttention().rotate_write(q, k, v, kv, slots, *angles, False)
        else:
            TritonAttention().write_kv(k, v, kv, slots)
    parts = k.split((16, 8), -1) if mla else (k, v)
    codes = kv.view(3, -1)[:, : 16 * heads * width].reshape(48, heads, width)
    scales = kv.view(3, -1)[:, 16 * heads * width :].view(torch.float32).unflatten(1, (2, heads, 16))
    for token, slot in enumerate(slots.tolist()):
        if slot >= 0:
            (first, of_first), (second, of_second) = (quantize(part[token]) for part in parts)
            assert (codes[slot] - torch.cat((first, second), -1)).abs().max() <= 1, "where a code is just half"
            assert (codes[slot] != torch.cat((first, second), -1)).float().mean() < 0.02
            for found, wanted in (
                (scales[slot // 16, 0, :, slot % 16], of_first),
                (scales[slot // 16, 1, :, slot % 16], of_second),
            ):
                torch.testing.assert_close(found, wanted.contiguous().view(torch.float32)[:, 0], rtol=1e-6, atol=0)
    assert (codes == -1).all(-1).sum() >= (48 - 4) * heads, "what belongs to no token stays"


@pytest.mark.slow
def test_a_write_to_slot_minus_one_is_found(tmp_path: Path) -> None:
    k, kv = torch.ones(2, 2, 16), torch.zeros(2, 16, 2, 32)
    fault = ("writes = head < tl.where(slot >= 0, heads, 0)\n    block", "writes = head < heads\n    block")
    with lab():
        TritonAttention().write_kv(k, k, kv, torch.tensor([-1, 3]))
        assert kv.sum() == 64
        with mutant(backend, *fault, tmp_path), pytest.raises(AssertionError, match="out of bounds"):
            TritonAttention().write_kv(k, k, kv, torch.tensor([-1, 3]))
