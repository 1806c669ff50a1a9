"""The operators over kernels in plain torch; what they refuse, and that only a name chooses them."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lmkit.api import DeviceInfo, LinearSpec, OpRequest, QuantFormat
from lmkit.plugins.host import PluginHost
from lmkit.plugins.select import consider
from lmkit_layers.linear import PLAIN
from lmkit_layouts import AwqWords, Fp8Format, GptqWords, OffsetRows, PackedRows, Rounding
from lmkit_op_cutlass.linear import CutlassFp8, CutlassInt4, CutlassLinear
from lmkit_testing import PluginConformance
from lmkit_testing.host import codes, make_device

sys.path.insert(0, str(Path(__file__).parent))
from plain_kernels import H100, compare, noise, plain, stored

B200 = make_device("cuda", cc=(10, 0))
NAMES = {"plain": "linear_cutlass", "fp8": "fp8_cutlass", "int4": "int4_cutlass"}


class TestLinear(PluginConformance):
    plugin = "op:linear_cutlass"


class TestFp8(PluginConformance):
    plugin = "op:fp8_cutlass"


class TestInt4(PluginConformance):
    plugin = "op:int4_cutlass"


@pytest.fixture(autouse=True, scope="module")
def plainly() -> Iterator[None]:
    with plain():
        yield


ROWS = st.sampled_from([(1,), (3,), (2, 9), (33,), (130,)])
SIZES = st.tuples(st.integers(1, 40).map(lambda n: 8 * n), st.integers(1, 300))  # in, out


@settings(max_examples=15, deadline=None)
@given(ROWS, SIZES, st.sampled_from([torch.bfloat16, torch.float16]), st.booleans())
def test_plain(rows: tuple[int, ...], sizes: tuple[int, int], dtype: torch.dtype, biased: bool) -> None:
    (k, n), layer = sizes, LinearSpec("up", sizes[0], (sizes[1],))
    x, weight = noise(1, *rows, k).to(dtype), noise(2, n, k).to(dtype)
    compare(CutlassLinear(), PLAIN, layer, {"weight": weight}, x, x, noise(3, n).to(dtype) if biased else None)


@settings(max_examples=15, deadline=None)
@given(ROWS, st.integers(1, 5), st.integers(1, 300), st.sampled_from(["tensor", "token", "stored"]), st.booleans())
def test_float8_by_row(rows: tuple[int, ...], lines: int, n: int, inputs: Any, by_row: bool) -> None:
    layer = LinearSpec("up", 16 * lines, (n, 8))
    fmt = Fp8Format(None, layer.out_features, layer.in_features, rows=by_row, inputs=Rounding(inputs))
    params = stored(fmt, layer, "bfloat16")
    if inputs == "stored":
        params["input_scale"] = torch.tensor([0.01, 0.02])
    x = noise(1, *rows, layer.in_features).bfloat16()
    rounded = Rounding(inputs).apply(x.float().view(-1, x.shape[-1]), 0.02).view(x.shape)
    compare(CutlassFp8(), fmt, layer, params, x, rounded, noise(3, n + 8).bfloat16())


@settings(max_examples=15, deadline=None)
@given(ROWS, st.integers(1, 3), st.integers(1, 300), st.booleans(), st.sampled_from([128, 64]))
def test_float8_by_blocks(rows: tuple[int, ...], blocks: int, n: int, powers: bool, height: int) -> None:
    """Merged parts begin blocks of their own, wherever the tile is."""
    layer, inputs = LinearSpec("up", 128 * blocks, (n, 70)), Rounding("group", 128, powers)
    fmt = Fp8Format((height, 128), layer.out_features, layer.in_features, inputs=inputs)
    x = noise(1, *rows, layer.in_features).bfloat16()
    compare(CutlassFp8(), fmt, layer, stored(fmt, layer, "bfloat16"), x, inputs.apply(x.float()), None)


@settings(max_examples=20, deadline=None)
@given(ROWS, st.integers(1, 9), st.integers(1, 5), st.sampled_from([0, 32, 64, 128, 192]), st.booleans(), st.booleans())
def test_int4(rows: tuple[int, ...], words: int, parts: int, group: int, ordered: bool, half: bool) -> None:
    dtype = torch.float16 if half else torch.bfloat16
    k = 32 * words if not (ordered and group) else group * (1 + words // 3)
    layer = LinearSpec("up", k, (32 * parts,))
    fmt = GptqWords(stored_bits=4, group=group, parts=layer.out_features, width=k, ordered=ordered, version=2)
    params = stored(fmt, layer, "bfloat16")
    if ordered and group:
        places = torch.arange(k, dtype=torch.int32) // group
        params["g_idx"] = places[torch.randperm(k, generator=torch.Generator().manual_seed(words))]
    x = noise(1, *rows, k).to(dtype)
    compare(CutlassInt4(), fmt, layer, params, x, x, noise(3, 32 * parts).to(dtype))


@pytest.mark.parametrize("k", [72, 104, 200])
def test_int4_columns_that_end_within_a_step(k: int) -> None:
    """A step has two groups of 32, of which there may be one, or a part of one."""
    layer = LinearSpec("up", k, (64,))
    fmt = AwqWords(group=8, parts=(64,), width=k)
    assert "groups of 32" in str(CutlassInt4().can_run(fmt, layer, H100))
    x = noise(1, 5, k).bfloat16()
    for zeros in (False, True):
        rows = PackedRows(stored_bits=4, group=32, parts=(64,), width=k, zeros=zeros)
        compare(CutlassInt4(), rows, layer, stored(rows, layer, "bfloat16"), x, x, None)


def test_no_tokens() -> None:
    layer = LinearSpec("up", 16, (8,))
    packed = CutlassLinear().pack(PLAIN, {"weight": noise(0, 8, 16).bfloat16()}, layer, torch.bfloat16)
    assert CutlassLinear().apply(torch.zeros(0, 16).bfloat16(), packed, None).shape == (0, 8)


def test_activations_between_others_are_copied() -> None:
    """Columns of a wider tensor, and rows that begin where TMA cannot read."""
    layer, wide = LinearSpec("up", 16, (8,)), noise(1, 5, 40).bfloat16()
    for x in (wide[:, 3:19], wide[:, :16], wide.flatten()[1:65].view(4, 16)):
        compare(CutlassLinear(), PLAIN, layer, {"weight": noise(2, 8, 16).bfloat16()}, x, x, None)


def fp8(block: tuple[int, int] | None, k: int, inputs: Rounding | None) -> Fp8Format:
    return Fp8Format(block, (32,), k, inputs=inputs)


REFUSED = [
    (CutlassLinear, PLAIN, 60, H100, "multiple of 8 columns, up has 60"),
    (CutlassLinear, fp8(None, 64, None), 64, H100, "unquantized weights, not 'fp8'"),
    (CutlassLinear, PLAIN, 64, make_device("cuda", cc=(8, 0)), "9.0 and 10.0, the device has 8.0"),
    (CutlassLinear, PLAIN, 64, make_device("cuda"), "the device has none"),
    (CutlassFp8, PLAIN, 64, H100, "stay as they are"),
    (CutlassFp8, fp8(None, 64, None), 64, H100, "stay as they are"),
    (CutlassFp8, fp8(None, 72, Rounding("token")), 72, H100, "multiple of 16 columns"),
    (CutlassFp8, fp8((128, 64), 128, Rounding("group", 64)), 128, H100, "not 64 and 64"),
    (CutlassFp8, fp8((128, 128), 128, Rounding("token")), 128, H100, "not 128 and all"),
    (CutlassFp8, fp8(None, 128, Rounding("group", 128)), 128, H100, "not all and 128"),
    (CutlassFp8, fp8((128, 128), 192, Rounding("group", 128)), 192, H100, "multiple of 128 columns"),
    (CutlassFp8, fp8((128, 128), 128, Rounding("group", 128)), 128, B200, "capability 9.0, the device has 10.0"),
    (CutlassInt4, PLAIN, 64, H100, "integers of 4 bits"),
    (CutlassInt4, GptqWords(stored_bits=8, bits=8, group=64, parts=(32,), width=64), 64, H100, "integers of 4 bits"),
    (CutlassInt4, GptqWords(stored_bits=4, group=48, parts=(32,), width=96), 96, H100, "not of 48"),
    (CutlassInt4, OffsetRows(group=64, parts=(32,), width=64), 64, H100, "not offsets"),
    (CutlassInt4, AwqWords(group=64, parts=(32,), width=64), 64, B200, "capability 9.0, the device has 10.0"),
]  # fmt: skip


@pytest.mark.parametrize(("kernel", "fmt", "k", "device", "reason"), REFUSED)
def test_refusals(kernel: Any, fmt: QuantFormat, k: int, device: DeviceInfo, reason: str) -> None:
    assert reason in str(kernel().can_run(fmt, LinearSpec("up", k, (32,)), device))


def test_a_rank_whose_share_does_not_fit_is_refused_when_it_is_packed() -> None:
    with pytest.raises(ValueError, match="multiple of 8 columns, up has 60"):
        CutlassLinear().pack(PLAIN, {"weight": torch.zeros(8, 60)}, LinearSpec("up", 60, (8,)), torch.bfloat16)


@pytest.mark.parametrize(
    ("form", "device", "refused"),
    [
        ("plain", make_device("cpu"), {"platform"}),
        ("plain", make_device("cuda", cc=(8, 9)), {"capability"}),
        ("int4", make_device("cuda", cc=(10, 0)), {"capability"}),
        ("fp8", make_device("cuda", cc=(12, 0)), {"capability"}),
        ("plain", make_device("cuda", cc=(9, 0)), set()),
        ("fp8", make_device("cuda", cc=(10, 0)), set()),
    ],
)
def test_only_a_name_chooses_them(
    form: str, device: DeviceInfo, refused: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Named, a kernel is refused by all that is missing, or chosen; `auto` never takes what no GPU has run."""
    host, name = PluginHost(), NAMES[form]
    request = OpRequest(op="linear", format=form, device=device, dtype="bfloat16")
    missing = host.installed_version("nvidia-cutlass-dsl") is None
    assert codes(consider(host, request, name)).get(name, set()) == refused | (
        {"requirement-missing"} if missing else set()
    )
    assert "experimental" in codes(consider(host, request))[name]
    monkeypatch.setattr(host, "installed_version", lambda dist: "4.8.1")
    assert codes(consider(host, request, name)).get(name, set()) == refused
    if not refused:
        assert consider(host, request, name).chosen is not None
    assert "experimental" in codes(consider(host, request))[name]
