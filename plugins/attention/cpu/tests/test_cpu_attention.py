"""The native backend against dense attention in float64, on every instruction set of the machine."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from lmkit.api import AttnNeed, DeviceInfo, PluginError, StepLimits
from lmkit_attention_cpu.backend import DTYPES, SEGMENT, CpuAttention, CpuPlanner
from lmkit_attention_cpu.hooks import lmkit_attention_backends
from lmkit_bench.pages import PlainPlatform, plain_platform
from lmkit_platform_cpu.native import load
from lmkit_platform_cpu.rowops import NativeRowOps
from lmkit_testing import AttentionConformance
from lmkit_testing.attention import TOLERANCE, Rows
from lmkit_testing.dense import attend

native = load()
if native is None:
    pytest.skip("the native kernels were not built", allow_module_level=True)


class NativePlatform(PlainPlatform):
    native = native


ISAS = [name for name in native.isas if name != "avx512_vnni"]  # here that is avx512
OTHERS = [pytest.param(isa, marks=pytest.mark.full("lmkit-attention-cpu", "lmkit-platform-cpu")) for isa in ISAS[:-1]]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """What is asked of every plugin, in processes of its own, does not depend on the instruction set."""
    of_every_plugin = metafunc.function.__module__ == "lmkit_testing.specs"
    metafunc.parametrize("isa", ISAS[-1:] if of_every_plugin else [*OTHERS, *ISAS[-1:]], indirect=True)


@pytest.fixture(autouse=True)
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    native.set_isa(request.param)
    yield request.param
    native.set_isa("auto")


@pytest.fixture
def threads() -> Iterator[Any]:
    before = native.threads
    yield native.start
    native.start(before)


class TestCpu(AttentionConformance):
    plugin = "attention:cpu"

    def platform(self) -> Any:
        return NativePlatform()


(SPEC,) = lmkit_attention_backends()
NEED = AttnNeed(32, 4, 2, "float32", "float32", 16)
LATENTS = AttnNeed(48, 70, 1, "float32", "float32", 16, v_head_dim=32, mla=True)  # a token is more than an item's rows


def make(need: AttnNeed, num_rows: int = 3, **options: Any) -> Rows:
    return Rows(CpuAttention(), need, num_rows=num_rows, platform=NativePlatform(), **options)


def compute(rows: Rows, work: list[tuple[int, int]], q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """One step, without the dense attention beside it."""
    plan = rows.planner.plan(rows.paged.grow(work))
    out = torch.full_like(q, torch.nan)
    rows.backend.write_kv(k, v, rows.kv, plan.slots)
    rows.backend.forward(q, rows.kv, plan, 0.2, out)
    return out


def check(rows: Rows, work: list[tuple[int, int]]) -> list[torch.Tensor]:
    got, expected = rows.step(work)
    allowed = max(TOLERANCE[rows.need.dtype], TOLERANCE[rows.need.kv_dtype])
    for g, e in zip(got, expected, strict=True):
        torch.testing.assert_close(g.double(), e, atol=allowed, rtol=allowed)
    return got


@pytest.mark.parametrize("length", [SEGMENT, SEGMENT + 17])
@pytest.mark.parametrize(
    "need",
    [
        NEED,
        replace(NEED, dtype="bfloat16", kv_dtype="bfloat16", head_dim=80, v_head_dim=48, num_q_heads=14),
        replace(NEED, dtype="float16", kv_dtype="float16", num_q_heads=2, block_size=48),
        replace(NEED, dtype="bfloat16", kv_dtype="bfloat16", num_q_heads=10, block_size=64, window=SEGMENT + 40),
        replace(NEED, dtype="bfloat16", kv_dtype="float8_e4m3fn"),
        replace(NEED, dtype="bfloat16", kv_dtype="float8_e5m2", num_q_heads=14, softcap=3.0),
        replace(NEED, dtype="bfloat16", kv_dtype="int8", head_dim=80, v_head_dim=48, num_q_heads=14),
        replace(NEED, kv_dtype="int8", window=SEGMENT + 40, softcap=3.0, sinks=True, alibi=True),
        replace(NEED, window=SEGMENT),
        replace(NEED, window=200, chunked=True),
        replace(NEED, window=SEGMENT + 40, softcap=3.0, sinks=True, alibi=True),
        replace(NEED, causal=False, softcap=3.0, sinks=True),
        replace(NEED, causal=False, window=40),
        LATENTS,
        replace(LATENTS, dtype="bfloat16", kv_dtype="bfloat16", head_dim=176, v_head_dim=144, num_q_heads=5),
        replace(LATENTS, dtype="bfloat16", kv_dtype="int8", head_dim=96, v_head_dim=80),
        replace(LATENTS, dtype="float16", kv_dtype="float16", window=SEGMENT + 40, softcap=3.0, sinks=True, alibi=True),
    ],
    ids=[
        "plain",
        "bf16",
        "bf16, large blocks",
        "fp16",
        "fp8",
        "e5m2",
        "int8",
        "int8 and everything",
        "window of a segment",
        "chunks",
        "everything",
        "bidirectional",
        "both ways, window",
        "latents",
        "latents, bf16",
        "latents, int8",
        "latents, fp16 and everything",
    ],
)
@pytest.mark.one_in(4)
def test_long_rows(need: AttnNeed, length: int) -> None:
    rows = make(need, length=length + 40)
    check(rows, [(0, length), (1, 3)])
    if need.causal:
        check(rows, [(0, 1), (1, 1)])
        check(rows, [(1, 5), (0, 30)])


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"window": 40},
        {"window": SEGMENT},
        {"mla": True, "num_kv_heads": 1},
        {"block_size": 32},
        {"block_size": 48, "window": 40, "head_dim": 48},
        {"kv_dtype": "int8"},
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_chunks_neighbours_and_threads_change_no_bit(dtype: str, change: dict[str, Any], threads: Any) -> None:
    """A row computed whole; in odd chunks with other rows beside it; and token by token at its end."""
    need = replace(NEED, **{"dtype": dtype, "kv_dtype": dtype, **change})
    total = 2 * SEGMENT + 29
    q, k, v = (torch.randn(total, h, need.head_dim).to(getattr(torch, dtype)) for h in (4, *2 * (need.num_kv_heads,)))

    def run(chunks: list[int], neighbours: int, num_threads: int) -> torch.Tensor:
        threads(num_threads)
        rows = make(need, num_rows=1 + neighbours, length=total + 40)
        out, at = [], 0
        for count in chunks:
            work = [*((1 + i, 1) for i in range(neighbours)), (0, count)]
            parts = [
                torch.cat([torch.randn(neighbours, *x.shape[1:]).to(x.dtype), x[at : at + count]]) for x in (q, k, v)
            ]
            out.append(compute(rows, work, *parts)[neighbours:])
            at += count
        return torch.cat(out)

    whole = run([total], 0, 1)
    chunked = run([100, 1, 411, 517, *[1] * (total - 1029)], 2, 2)
    assert torch.equal(whole, chunked)


def test_rows_that_are_not_split_get_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory for results of segments is bounded; a row for which there is none left is read by one thread."""
    results = []
    q, k, v = (torch.randn(3 * SEGMENT + 1, h, 32) for h in (4, 2, 2))
    for size in (1 << 20, 4):
        monkeypatch.setattr("lmkit_attention_cpu.backend.PARTIAL_BYTES", size)
        rows = make(NEED, length=3 * SEGMENT + 9)
        compute(rows, [(0, 3 * SEGMENT)], q[:-1], k[:-1], v[:-1])
        results.append(compute(rows, [(0, 1)], q[-1:], k[-1:], v[-1:]))
        merges = rows.planner.args.work[1]
        assert merges == (NEED.num_kv_heads if size > 4 else 0)
    assert torch.equal(*results)


def test_strided_queries_and_keys() -> None:
    """q, k and v as parts of one projection, without copies."""
    parts = torch.randn(20, 8, 32).split((4, 2, 2), dim=1)
    apart = [part.contiguous() for part in parts]
    assert torch.equal(compute(make(NEED), [(0, 20)], *parts), compute(make(NEED), [(0, 20)], *apart))


@pytest.mark.parametrize("kv_dtype", sorted(SPEC.kv_dtypes))
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize(("pairs", "interleaved"), [(16, False), (16, True), (5, False), (7, True)])
def test_turned_while_written(dtype: str, kv_dtype: str, pairs: int, interleaved: bool, isa: str) -> None:
    """The same bits in queries, keys and KV memory as from the operators one by one, whatever is not written."""
    need = AttnNeed(32, 6, 3, dtype, dtype if kv_dtype == "auto" else kv_dtype, 16, v_head_dim=48)
    rows, ops = make(need, length=60), NativeRowOps()
    rows.planner.plan(rows.paged.grow([(0, 37)]))
    whole = torch.randn(37, 9, 32).to(getattr(torch, dtype))
    v = torch.randn(37, 3, 48).to(whole.dtype)
    slots = torch.randperm(48)[:37] + 16
    slots[5] = slots[36] = -1
    cos, sin = torch.randn(2, 37, pairs)
    expected, kv = whole.clone(), rows.kv.clone()
    for part in expected.split((6, 3), dim=1):
        ops.rotate(part, cos, sin, interleaved)
    rows.backend.write_kv(expected[:, 6:], v, kv, slots)
    rows.backend.rotate_write(whole[:, :6], whole[:, 6:], v, rows.kv, slots, cos, sin, interleaved)
    assert torch.equal(whole, expected)
    assert torch.equal(rows.kv.view(torch.uint8), kv.view(torch.uint8))


@pytest.mark.parametrize("kv_dtype", ["float8_e4m3fn", "float8_e5m2"])
def test_eight_bit_keys_are_rounded_like_torch(kv_dtype: str) -> None:
    """Every finite float8 value survives; numbers between two are rounded to even; too large ones are cut."""
    dtype = getattr(torch, kv_dtype)
    largest = torch.finfo(dtype).max
    need = replace(NEED, kv_dtype=kv_dtype, num_q_heads=2, num_kv_heads=1, head_dim=256, dtype="float32")
    every = torch.arange(256, dtype=torch.uint8).view(dtype)
    finite = every[every.float().isfinite()].float()
    values = torch.cat([finite, finite * 1.03, finite * 1.125, finite * 0.0625, finite * 2**-20, torch.randn(8)])
    values = torch.cat([values[values.abs() <= largest], torch.zeros(1024)])[: 256 * 5].view(5, 1, 256)
    values[4, 0, -3:] = torch.tensor([1e9, -1e9, torch.inf])
    rows = make(need)
    plan = rows.planner.plan(rows.paged.grow([(0, 5)]))
    rows.backend.write_kv(values, values, rows.kv, plan.slots)
    block, size = divmod(int(plan.slots[0]), 16)
    keys = rows.kv[block, 0, : 16 * 256].view(128, 16, 2)[:, size : size + 5].transpose(0, 1).reshape(5, 256)
    assert torch.equal(keys.float(), values[:, 0].clamp(-largest, largest).to(dtype).float())


@pytest.mark.parametrize("kv_dtype", ["float8_e4m3fn", "float8_e5m2"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_eight_bit_value_is_read_as_it_is(dtype: str, kv_dtype: str) -> None:
    """Attention to a single position gives its value; what is not a number stays none."""
    need = AttnNeed(16, 1, 1, dtype, kv_dtype, 16, v_head_dim=256)
    rows = make(need, num_rows=1)
    plan = rows.planner.plan(rows.paged.grow([(0, 1)]))
    every = torch.arange(256, dtype=torch.uint8).view(getattr(torch, kv_dtype)).float()
    every[every.isinf()] = torch.nan  # is never written
    q = k = torch.zeros(1, 1, 16, dtype=getattr(torch, dtype))
    v = every.to(q.dtype).view(1, 1, 256)
    out = torch.empty(1, 1, 256, dtype=q.dtype)
    rows.backend.write_kv(k, v, rows.kv, plan.slots)
    rows.backend.forward(q, rows.kv, plan, 1.0, out)
    assert torch.equal(out.flatten().float().nan_to_num(7), every.nan_to_num(7))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_integers_have_a_scale_per_token_and_head(dtype: str) -> None:
    """The formula of the reference, bit for bit; what was written is then what is attended to."""
    need = AttnNeed(48, 4, 2, dtype, "int8", 32, v_head_dim=16)
    rows = make(need)
    plan = rows.planner.plan(rows.paged.grow([(0, 21)]))
    q, k, v = (torch.randn(21, h, d).to(getattr(torch, dtype)) for h, d in ((4, 48), (2, 48), (2, 16)))
    k[3], v[4, 1], k[5] = 0, 0, k[5] * 1e-30
    rows.backend.write_kv(k, v, rows.kv, plan.slots)
    read: list[torch.Tensor] = []
    for x, first, tiles in ((k, 0, (24, 16, 2)), (v, 32 * 48, (8, 16, 2))):
        largest = x.float().abs().amax(-1, keepdim=True)
        codes = (x.float() * (largest.reciprocal() * 127).clamp(max=torch.finfo(torch.float32).max)).round()
        pages = rows.kv[plan.slots // 32, :, :]
        scales = pages[:, :, 32 * 64 :].contiguous().view(torch.float32).unflatten(2, (2, 32))
        at = plan.slots % 32
        assert torch.equal(scales[torch.arange(21), :, int(first > 0), at], (largest / 127)[..., 0])
        size = x.shape[-1]
        values = pages[:, :, first : first + 32 * size].unflatten(2, (2, 16 * size))[torch.arange(21), :, at // 16]
        if first:
            values = values.view(21, 2, 8, size, 2).transpose(2, 3).reshape(21, 2, size, 16)
        else:
            values = values.view(21, 2, *tiles).transpose(3, 4).reshape(21, 2, size, 16)
        values = values[torch.arange(21), :, :, at % 16]
        assert torch.equal(values.float(), codes)
        read.append(values.double() * largest.double() / 127)
    out = torch.empty(21, 4, 16, dtype=q.dtype)
    rows.backend.forward(q, rows.kv, plan, 0.2, out)
    expected = attend(q, *read, 0, need, 0.2, None)
    torch.testing.assert_close(out.double(), expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@pytest.mark.parametrize("latent", [False, True])
def test_products_with_bytes_are_those_of_floats(latent: bool, isa: str) -> None:
    """Whatever the sizes of queries and of values are: what is left to differ is the rounding of the result, and of
    weights where tile registers take them as bfloat16."""
    need = replace(LATENTS, head_dim=64) if latent else replace(NEED, head_dim=64)
    dim, heads, length = need.v_head_dim or 64, need.num_q_heads, SEGMENT + 70
    q, k, v = (torch.randn(length, h, d) for h, d in ((heads, 64), (need.num_kv_heads, 64), (need.num_kv_heads, dim)))
    q[3], q[7] = 0, q[7] * 1e-20
    q[-9, 0, 5], q[-5, 1, 60] = torch.nan, torch.inf
    most = 1 if latent else 3  # latents are keys as well, whose scores would be in the thousands
    v = (v * torch.logspace(-most, most, length)[torch.randperm(length)][:, None, None]).bfloat16()
    found = []
    for dtype in ("bfloat16", "float32"):
        rows = make(replace(need, dtype=dtype, kv_dtype="int8"), length=length)
        plan = rows.planner.plan(rows.paged.grow([(0, length)]))
        kept = k.bfloat16() if not latent else torch.cat((v, k[..., dim:].bfloat16()), -1)
        rows.backend.write_kv(kept, v, rows.kv, plan.slots)
        out = torch.full((length, heads, dim), torch.nan, dtype=getattr(torch, dtype))
        rows.backend.forward(q.bfloat16().to(out.dtype), rows.kv, plan, 0.2, out)
        found.append(out.float())
    whole, floats = found
    bad = torch.zeros(length, heads, dtype=torch.bool)
    bad[-9, 0] = bad[-5, 1] = True
    assert whole[bad].isnan().all()
    whole, floats = whole[~bad], floats[~bad]
    largest = floats.abs().amax(-1, keepdim=True)
    off = ((whole - floats).abs() - floats.abs() * 2**-8) / largest
    assert off.max() <= (2**-8 if isa != "amx" else 2**-6)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_latents_are_the_keys_with_a_part_of_them_as_values(dtype: str) -> None:
    """The same bits, in half the memory, as from keys and values that are kept apart."""
    need = replace(LATENTS, dtype=dtype, kv_dtype=dtype, head_dim=176, v_head_dim=144, num_q_heads=16)
    rows, apart = make(need, length=700), make(replace(need, mla=False), length=700)
    assert apart.kv.numel() * 176 == rows.kv.numel() * 320
    for count in (SEGMENT + 9, 1, 70):
        q, k = (torch.randn(count, h, 176).to(getattr(torch, dtype)) for h in (16, 1))
        results = []
        for each in (rows, apart):
            plan = each.planner.plan(each.paged.grow([(0, count)]))
            out = torch.full((count, 16, 144), torch.nan, dtype=q.dtype)
            each.backend.write_kv(k, k[..., :144], each.kv, plan.slots)
            each.backend.forward(q, each.kv, plan, 0.1, out)
            results.append(out)
        assert torch.equal(*results)


def test_a_prompt_without_values_behind_it() -> None:
    """Nothing is read beyond the row's last position, whatever lies there."""
    rows = make(replace(NEED, dtype="bfloat16", kv_dtype="bfloat16"))
    for count in (1, 15, 1, 3):
        for out in check(rows, [(0, count)]):
            assert torch.isfinite(out).all()


def test_wrong_shapes_are_refused() -> None:
    rows = make(NEED)
    backend, kv = rows.backend, rows.kv
    plan = rows.planner.plan(rows.paged.grow([(0, 4)]))
    q, k, out = torch.zeros(4, 4, 32), torch.zeros(4, 2, 32), torch.zeros(4, 4, 32)
    for wrong in (q[:3], q[:, :2], torch.zeros(4, 4, 16), q.double()):
        with pytest.raises(PluginError):
            backend.forward(wrong, kv, plan, 1.0, out)
    for wrong in (out[:3], out.bfloat16(), torch.zeros(4, 4, 64)[..., :32]):
        with pytest.raises(PluginError):
            backend.forward(q, kv, plan, 1.0, wrong)
    with pytest.raises(PluginError):
        backend.forward(q, kv[:, :1], plan, 1.0, out)
    with pytest.raises(PluginError):
        backend.forward(q, kv, plan, 1.0, out, torch.zeros(3))
    for wrong in (k[:3], k[:, :1], k[..., :16], k.int()):
        with pytest.raises(PluginError):
            backend.write_kv(wrong, wrong, kv, plan.slots)
    with pytest.raises(PluginError):
        backend.write_kv(k, k, kv, plan.slots.int())
    cos = torch.zeros(4, 16)
    for angles in (
        (cos[:3], cos[:3]),
        (cos, cos[:, :8]),
        (cos.double(), cos),
        (torch.zeros(4, 17), torch.zeros(4, 17)),
    ):
        with pytest.raises(PluginError):
            backend.rotate_write(q, k, k, kv, plan.slots, *angles, False)
    for wrong in (q[:3], q[..., :16], q.bfloat16()):
        with pytest.raises(PluginError):
            backend.rotate_write(wrong, k, k, kv, plan.slots, cos, cos, False)


def test_reasons_for_refusal() -> None:
    backend, device = CpuAttention(), DeviceInfo("cpu", "cpu")
    assert backend.can_run(NEED, device) is None
    assert backend.can_run(replace(NEED, mla=True), device) is None
    assert "mla" in (backend.can_run(replace(NEED, mla=True, v_head_dim=48), device) or "")
    assert "multiple" in (backend.can_run(replace(NEED, num_q_heads=5), device) or "")
    assert "causal" in (backend.can_run(replace(NEED, causal=False, alibi=True), device) or "")
    with pytest.raises(PluginError, match="native"):
        backend.planner(NEED, StepLimits(1, 16, 1, 16), plain_platform())


STEPS = st.lists(
    st.dictionaries(st.integers(0, 3), st.integers(0, 70), min_size=1).map(lambda work: list(work.items())),
    min_size=1,
    max_size=5,
)


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    steps=STEPS,
    dtypes=st.sampled_from(
        [("float32", "float32"), ("bfloat16", "bfloat16"), ("bfloat16", "int8"), ("float16", "int8")]
    ),
    block_size=st.sampled_from([16, 32, 112]),
    heads=st.sampled_from([(1, 1), (7, 1), (9, 3), (64, 1), (80, 1)]),
    window=st.none() | st.integers(1, 100),
    extras=st.fixed_dictionaries(
        {"softcap": st.none() | st.just(4.0), **dict.fromkeys(("sinks", "alibi", "mla"), st.booleans())}
    ),
)
def test_any_sequence_of_steps(
    isa: str,
    steps: list,
    dtypes: tuple[str, str],
    block_size: int,
    heads: tuple[int, int],
    window: int | None,
    extras: dict,
) -> None:
    """Rows that start, rest, decode and continue in any order, over memory that holds NaN where nothing was written."""
    need = AttnNeed(16, *heads, *dtypes, block_size, window=window, **extras)
    rows = make(need, num_rows=4, length=5 * 70)
    for work in steps:
        check(rows, work)


def test_dtypes_have_the_numbers_of_the_kernels() -> None:
    from lmkit_platform_cpu import native as module

    assert {str(d): n for d, n in DTYPES.items() if n < 3} == module.DTYPES
    assert isinstance(CpuPlanner(NEED, StepLimits(1, 16, 1, 16), native).capture, str)
