"""Native sampling against its definition in float64, on every instruction set of the machine."""

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from lmkit.api import DrawParams, PluginError
from lmkit_layers import TorchRowOps, truncate
from lmkit_platform_cpu.native import load
from lmkit_platform_cpu.rowops import PIECE, NativeRowOps

native = load()
if native is None:
    pytest.skip("the native kernels were not built", allow_module_level=True)

torch_ops = TorchRowOps()


@pytest.fixture(params=[name for name in native.isas if name != "avx512_vnni"])  # here that is avx512
def ops(request: pytest.FixtureRequest) -> Iterator[NativeRowOps]:
    native.set_isa(request.param)
    yield NativeRowOps()
    native.set_isa("auto")


def params(rows: int, temperature=1.0, min_p=0.0, top_k=0, top_p=1.0, share=0.5) -> DrawParams:  # type: ignore[no-untyped-def]
    def array(value: object, dtype: type) -> np.ndarray:
        return np.broadcast_to(np.asarray(value, dtype), rows).copy()

    return DrawParams(
        array(temperature, np.float32), array(min_p, np.float32), array(top_k, np.int64), array(top_p, np.float32),
        array(share, np.float64),
    )  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", [1, 7, 16, 1000, PIECE, 2 * PIECE + 5])
def test_argmax(ops: NativeRowOps, dtype: torch.dtype, size: int) -> None:
    """The first of equal ones; low precision has many."""
    x = torch.randn(5, size).to(dtype)
    token, largest = ops.argmax(x)
    assert torch.equal(token, x.float().argmax(-1))
    assert torch.equal(largest, x.float().amax(-1))
    wide = torch.randn(3, 2 * size).to(dtype)
    assert torch.equal(ops.argmax(wide[:, :size])[0], wide[:, :size].float().argmax(-1))
    assert ops.argmax(x[:0])[0].shape == (0,)


@pytest.mark.parametrize("at", [0, 3, PIECE + 1])
@pytest.mark.parametrize("op", ["argmax", "draw"])
def test_what_is_no_number_is_seen(ops: NativeRowOps, at: int, op: str) -> None:
    x = torch.randn(5, PIECE + 20)
    x[1, at], x[2], x[3, at], x[4, at] = torch.nan, -torch.inf, torch.inf, -torch.inf
    x[3, at + 5] = -torch.inf
    best = x.clone()
    largest = ops.argmax(x)[1] if op == "argmax" else ops.draw(x, params(5))[1]
    assert largest.isnan().tolist() == [False, True, False, False, False]
    assert largest[2:4].tolist() == [-torch.inf, torch.inf]
    assert largest[4] == best[4].max()
    assert largest[0] == best[0].max()


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    size=st.sampled_from([1, 2, 40, 511, 3000, PIECE + 700]),
    spread=st.sampled_from([0.0, 0.3, 2.0, 8.0]),
    temperature=st.sampled_from([1e-30, 0.2, 1.0, 50.0]),
    min_p=st.sampled_from([0.0, 0.01, 0.5, 1.0]),
    top_k=st.sampled_from([0, 1, 2, 20, 63, 500]),
    top_p=st.sampled_from([1.0, 0.999, 0.9, 0.3, 1e-6]),
    seed=st.integers(0, 1000),
)
@example(size=40, spread=0.3, temperature=1.0, min_p=0.5, top_k=20, top_p=1.0, seed=450)  # min_p keeps less than top_k
def test_draws_what_the_definition_says(
    ops: NativeRowOps, size: int, spread: float, temperature: float, min_p: float, top_k: int, top_p: float, seed: int
) -> None:
    """The kept tokens are those of torch's operators, the drawn one is where the sum passes the share."""
    noise = torch.Generator().manual_seed(seed)
    share = np.array([0.0, 0.37, 0.999999])
    x = spread * torch.randn(3, size, generator=noise)
    x[:, torch.rand(size, generator=noise) < 0.3] -= torch.inf
    x[:, 0] = 0.0
    p = params(3, temperature, min_p, top_k if top_k < size else 0, top_p, share)
    weights = truncate.weigh(x.clone(), p)[0].double()
    ends = weights.cumsum(-1)
    token, largest = ops.draw(x.clone(), p)
    assert torch.equal(largest, x.amax(-1))
    for row, t in enumerate(token.tolist()):
        lightest = weights[row][weights[row] > 0].min()
        whole = torch.exp((x[row].double() - x[row].max()) / p.temperature[row].item())
        # A token that weighs as much as the lightest kept may fall on either side by rounding, and shift the ends.
        slack = float(whole[(whole / lightest - 1).abs() < 1e-5].sum()) if spread else 0.0
        target, total = share[row] * float(ends[row, -1]), float(ends[row, -1])
        edge = 1e-5 * total + slack
        assert whole[t] >= lightest * (1 - 1e-5)
        assert (ends[row, t - 1] if t else 0.0) <= target + edge
        assert ends[row, t] >= target - edge


def test_the_same_tokens_as_torch(ops: NativeRowOps) -> None:
    """On a vocabulary of real size, with parameters that differ by row."""
    noise = np.random.default_rng(0)
    x = 3 * torch.randn(24, 50_000, generator=torch.Generator().manual_seed(1))
    p = params(
        24, noise.choice([0.5, 1.0, 1.5], 24), noise.choice([0, 0.001, 0.02], 24), noise.choice([0, 1, 5, 200], 24),
        noise.choice([0.5, 0.9, 1.0], 24), noise.random(24),
    )  # fmt: skip
    assert torch.equal(ops.draw(x.clone(), p)[0], torch_ops.draw(x.clone(), p)[0])
    alone = DrawParams(*(getattr(p, name)[7:8] for name in ("temperature", "min_p", "top_k", "top_p", "share")))
    assert ops.draw(x[7:8].clone(), alone)[0][0] == ops.draw(x.clone(), p)[0][7]


def test_what_does_not_fit_is_refused() -> None:
    ops = NativeRowOps()
    for call in (
        lambda: ops.argmax(torch.zeros(3)),
        lambda: ops.argmax(torch.zeros(3, 0)),
        lambda: ops.argmax(torch.zeros(8, 3).T),
        lambda: ops.draw(torch.zeros(3, 8).bfloat16(), params(3)),
        lambda: ops.draw(torch.zeros(3, 8), params(2)),
    ):
        with pytest.raises(PluginError):
            call()
