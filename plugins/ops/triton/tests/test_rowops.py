"""Every kernel in the laboratory: the reference's values, in bounds, no races, every output written, few bytes."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

from hypothesis import given, settings
from hypothesis import strategies as st
from lmkit.api import DrawParams
from lmkit_layers.rowwise import TorchRowOps
from lmkit_op_triton.rowops import ACTIVATIONS, TritonRowOps
from lmkit_testing import PluginConformance
from lmkit_testing.triton_lab import Seen, lab
from torch import Tensor

OPS, REFERENCE = TritonRowOps(), TorchRowOps()
DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.float16])
CLOSE = {torch.float32: 1e-5, torch.bfloat16: 8e-3, torch.float16: 1e-3}  # half a unit in the last place, and a little


class TestTriton(PluginConformance):
    plugin = "op:rowwise_triton"


def made(*shape: int, dtype: torch.dtype = torch.float32, gap: int = 0, seed: int = 0) -> Tensor:
    """Random values; with a gap of that many entries behind each row."""
    wide = torch.randn(*shape[:-1], shape[-1] + gap, generator=torch.Generator().manual_seed(seed))
    return wide.to(dtype)[..., : shape[-1]]


def close(found: Tensor, wanted: Tensor) -> None:
    """`wanted` is computed in float32 from the same numbers."""
    limit = CLOSE[found.dtype]
    torch.testing.assert_close(found.float(), wanted.float(), rtol=limit, atol=limit)


def watched(work: Callable[[], object], *unwritten: str, shuffle: int | None = None) -> Seen:
    with lab(unwritten=unwritten, shuffle=shuffle) as seen:
        work()
    return seen


@settings(max_examples=12, deadline=None)
@given(
    st.integers(1, 5), st.sampled_from([1, 7, 64, 100, 576]), DTYPES, st.sampled_from([0, 3]), st.booleans(), st.data()
)
def test_norms(rows: int, size: int, dtype: torch.dtype, gap: int, rms: bool, data: st.DataObject) -> None:
    x, weight, bias = made(rows, size, dtype=dtype, gap=gap), made(size, seed=1), made(size, seed=2)
    residual = made(rows, size, dtype=dtype, seed=3) if data.draw(st.booleans()) else None
    weight = weight.to(dtype) if data.draw(st.booleans()) else weight
    sums = None if residual is None else residual + x  # rounded, as the model keeps it
    taken = x.float() if sums is None else sums.float()
    found: list[Tensor] = []
    if rms:
        wanted = REFERENCE.rms_norm(taken, weight.float(), 1e-5)
        watched(lambda: found.append(OPS.rms_norm(x, weight, 1e-5, residual)), "out", shuffle=rows)
    else:
        bias = bias.to(weight.dtype)
        wanted = REFERENCE.layer_norm(taken, weight.float(), bias.float(), 1e-5)
        watched(lambda: found.append(OPS.layer_norm(x, weight, bias, 1e-5, residual)), "out")
    close(found[0], wanted)
    if residual is not None:
        assert torch.equal(residual, sums)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norms_of_heads_in_place(dtype: torch.dtype) -> None:
    """Queries are parts of what one linear made: gaps between tokens, and the result goes where they were."""
    whole = made(3, 5 * 16, dtype=dtype)
    x, weight = whole[:, :48].view(3, 3, 16), made(16, dtype=dtype, seed=1)
    wanted, rest = REFERENCE.rms_norm(x.float(), weight.float(), 1e-6), whole[:, 48:].clone()
    watched(lambda: OPS.rms_norm(x, weight, 1e-6, out=x))
    close(x, wanted)
    assert torch.equal(whole[:, 48:], rest)


def test_a_norm_with_its_addition_moves_little() -> None:
    rows, size = 4, 1024
    x, h, weight = (made(rows, size, dtype=torch.bfloat16, seed=i) for i in range(3))
    seen = watched(lambda: OPS.rms_norm(x, weight[0], 1e-5, h), "out")
    assert seen.launches == 1
    assert seen.moved <= 1.05 * (4 * rows + 1) * size * 2 + 5 * 32


@settings(max_examples=12, deadline=None)
@given(
    st.integers(1, 4), st.sampled_from([1, 33, 1024, 1500]), DTYPES, st.sampled_from(sorted(ACTIVATIONS)), st.booleans()
)
def test_activations(rows: int, size: int, dtype: torch.dtype, name: str, gap: bool) -> None:
    x = made(rows, 2 * size, dtype=dtype, gap=5 if gap else 0) * 3
    x = made(rows, 2 * size, dtype=dtype, gap=5) if gap else x
    found: list[Tensor] = []
    seen = watched(lambda: found.append(OPS.gate(x, name)), "out")
    close(found[0], REFERENCE.gate(x.float(), name))
    assert seen.moved <= 1.05 * 3 * rows * size * dtype.itemsize + 3 * rows * 2 * 32
    if name != "swiglu_clamped":
        watched(lambda: found.append(OPS.activate(x, name)), "out")
        close(found[1], REFERENCE.activate(x.float(), name))


@settings(max_examples=8, deadline=None)
@given(st.integers(1, 4), st.sampled_from([5, 64, 600]), DTYPES, st.booleans())
def test_additions(rows: int, size: int, dtype: torch.dtype, gated: bool) -> None:
    x, y, h = (made(rows, n, dtype=dtype, gap=2, seed=i) for i, n in enumerate((size, size, 48)))
    gate = made(1, 48, dtype=dtype, seed=4) if gated else None
    wanted = REFERENCE.add(x.float(), y.float(), h.float(), None if gate is None else gate.float())
    found: list[Tensor] = []
    watched(lambda: found.append(OPS.add(x, y, h, gate)))
    assert found[0] is x
    close(x, wanted)


@settings(max_examples=8, deadline=None)
@given(st.integers(1, 5), st.sampled_from([8, 100, 1025]), DTYPES)
def test_embedding(tokens: int, size: int, dtype: torch.dtype) -> None:
    weight, ids = made(11, size, dtype=dtype), torch.arange(tokens) * 7 % 11
    found: list[Tensor] = []
    seen = watched(lambda: found.append(OPS.embed(ids, weight)), "out")
    assert torch.equal(found[0], weight[ids])
    assert seen.moved <= 1.05 * 2 * tokens * size * dtype.itemsize + (4 * tokens + 2) * 32


@settings(max_examples=8, deadline=None)
@given(
    st.integers(1, 4),
    st.integers(1, 9),
    st.sampled_from([1, 8, 20, 32]),
    DTYPES,
    st.booleans(),
    st.sampled_from([0, 6]),
)
def test_rotation(tokens: int, heads: int, pairs: int, dtype: torch.dtype, interleaved: bool, rest: int) -> None:
    """In place, on a part of what one linear made, and a part of each head."""
    whole = made(tokens, heads + 2, 2 * pairs + rest, dtype=dtype)
    x = whole[:, 1 : heads + 1]
    positions, frequencies = torch.arange(tokens) * 37, made(pairs).abs()
    angles: list[Tensor] = []
    watched(lambda: angles.extend(OPS.angles(positions, frequencies, 1.3)), "cos", "sin")
    for found, wanted in zip(angles, REFERENCE.angles(positions, frequencies, 1.3), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
    wanted, outside = x.float(), whole[:, [0, -1]].clone()
    REFERENCE.rotate(wanted, *angles, interleaved)
    watched(lambda: OPS.rotate(x, *angles, interleaved))
    close(x, wanted)
    assert torch.equal(whole[:, [0, -1]], outside)


@settings(max_examples=8, deadline=None)
@given(st.integers(1, 4), st.sampled_from([1, 9, 4096, 4097, 9000]), DTYPES, st.integers(0, 99))
def test_argmax(rows: int, size: int, dtype: torch.dtype, seed: int) -> None:
    x = made(rows, size, dtype=dtype, seed=seed).round()  # with equals
    found: list[Tensor] = []
    seen = watched(lambda: found.extend(OPS.argmax(x)), "ids", "largest", "most", "where")
    wanted = REFERENCE.argmax(x)
    assert torch.equal(found[0], wanted[0])
    assert torch.equal(found[1], wanted[1])
    assert seen.launches == 2


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_faulty_rows_are_said(bad: float) -> None:
    """Their token means nothing, and is one of the vocabulary."""
    x = made(2, 5000)
    x[1, 4500] = bad
    if bad < 0:
        x[1] = bad
    with lab():
        found = OPS.argmax(x), OPS.draw(x.clone(), drawn_at([0.5, 0.5]))
    for ids, largest in found:
        assert torch.isfinite(largest).tolist() == [True, False]
        assert torch.equal(torch.isnan(largest), torch.tensor([False, bad != bad]))
        assert ((ids >= 0) & (ids < 5000)).all()


def drawn_at(share: list[float], **given: object) -> DrawParams:
    rows = len(share)
    return DrawParams(
        np.full(rows, given.get("temperature", 1.0), np.float32), np.full(rows, given.get("min_p", 0.0), np.float32),
        np.full(rows, given.get("top_k", 0), np.int64), np.full(rows, given.get("top_p", 1.0), np.float32),
        np.array(share),
    )  # fmt: skip


@settings(max_examples=8, deadline=None)
@given(
    st.sampled_from([3, 50, 4097, 9000]), st.sampled_from([0.01, 0.7, 1.0, 3.0]), st.sampled_from([0.0, 0.01, 0.4]),
    st.sampled_from([0, 1, 5, 200]), st.sampled_from([1.0, 0.95, 0.3]), st.integers(0, 999),
)  # fmt: skip
def test_draw(size: int, temperature: float, min_p: float, top_k: int, top_p: float, seed: int) -> None:
    rows = 3
    share = np.random.default_rng(seed).random(rows).tolist()
    how = drawn_at(share, temperature=temperature, min_p=min_p, top_k=min(top_k, size - 1), top_p=top_p)
    x = made(rows, size, seed=seed) * 4
    found: list[Tensor] = []
    seen = watched(lambda: found.extend(OPS.draw(x.clone(), how)), "ids", "largest")
    wanted = REFERENCE.draw(x.clone(), how)
    assert torch.equal(found[0], wanted[0])
    assert torch.equal(found[1], wanted[1])
    assert seen.launches == 1


def test_a_greedy_row_among_others_takes_the_first_of_the_largest() -> None:
    x = made(2, 5000)
    x[0, [70, 4200]] = 9.0
    params = drawn_at([0.0, 0.5])
    params.temperature[0] = 1e-30
    with lab():
        assert OPS.draw(x, params)[0][0] == 70
