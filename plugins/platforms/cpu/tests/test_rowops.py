"""Native row-wise operators against torch's, in float64, on every instruction set of the machine."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from lmkit.api import DeviceInfo, PluginError, Routing
from lmkit_layers import TorchRowOps
from lmkit_platform_cpu.native import load
from lmkit_platform_cpu.rowops import ACTIVATIONS, NativeRowOps

native = load()
if native is None:
    pytest.skip("the native kernels were not built", allow_module_level=True)

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SIZES = [1, 5, 16, 67, 896]
torch_ops = TorchRowOps()


@pytest.fixture(params=[name for name in native.isas if name != "avx512_vnni"])  # here that is avx512
def ops(request: pytest.FixtureRequest) -> Iterator[NativeRowOps]:
    native.set_isa(request.param)
    yield NativeRowOps()
    native.set_isa("auto")


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


def close(got: torch.Tensor, want: torch.Tensor, slack: float = 0.0) -> None:
    """Within one unit in the last place of what float64 gives (float32 sums: a few)."""
    unit = torch.finfo(got.dtype).eps * (4 if got.dtype == torch.float32 else 1)
    torch.testing.assert_close(got.double(), want.to(got.dtype).double(), rtol=unit, atol=unit / 8 + slack)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("rows", [0, 1, 3, 50])
def test_norms(ops: NativeRowOps, dtype: torch.dtype, size: int, rows: int) -> None:
    x, weight, bias = torch.randn(rows, size), torch.randn(size), torch.randn(size)
    x, residual = x.to(dtype), torch.randn(rows, size).to(dtype)
    for w, b in ((weight, bias), (weight.to(dtype), bias.to(dtype))):
        close(ops.rms_norm(x, w, 1e-5), torch_ops.rms_norm(x.double(), w.double(), 1e-5))
        close(ops.layer_norm(x, w, b, 1e-5), torch_ops.layer_norm(x.double(), w.double(), b.double(), 1e-5), slack=1e-6)
        close(ops.layer_norm(x, w, None, 1e-5), torch_ops.layer_norm(x.double(), w.double(), None, 1e-5), slack=1e-6)
        h, given = residual.clone(), x.clone()
        got = ops.rms_norm(x, w, 1e-5, residual=h)
        assert torch.equal(h, residual + x), "the sum is rounded to its type before it is normed"
        assert torch.equal(x, given)
        close(got, torch_ops.rms_norm(h.double(), w.double(), 1e-5))
        out = torch.full_like(x, torch.nan)
        assert ops.rms_norm(x, w, 1e-5, out=out) is out
        assert torch.equal(out, ops.rms_norm(x, w, 1e-5))


@pytest.mark.parametrize("dtype", DTYPES)
def test_norm_of_heads_in_place_leaves_the_rest_alone(ops: NativeRowOps, dtype: torch.dtype) -> None:
    qkv = torch.randn(7, 6, 24).to(dtype)
    want, weight = qkv.clone(), torch.randn(24).to(dtype)
    q = qkv[:, :4]
    ops.rms_norm(q, weight, 1e-6, out=q)
    assert torch.equal(qkv[:, 4:], want[:, 4:])
    close(q, torch_ops.rms_norm(want[:, :4].double(), weight.double(), 1e-6))


@pytest.mark.one_in(3)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", list(ACTIVATIONS))
@pytest.mark.parametrize("size", SIZES)
def test_activations(ops: NativeRowOps, dtype: torch.dtype, name: str, size: int) -> None:
    x = (4 * torch.randn(3, 2 * size)).to(dtype)
    x[0, 0], x[1, 0], x[2, 0] = 200.0, -200.0, 0.0
    close(ops.activate(x, name), torch_ops.activate(x.double(), name), slack=4e-7)
    close(ops.gate(x, name), torch_ops.gate(x.double(), name), slack=4e-6)
    x[1, size // 2] = torch.nan
    assert torch.equal(ops.activate(x, name).isnan(), x.isnan())
    assert ops.gate(x[:0], name).shape == (0, size)
    wide = torch.randn(3, 4 * size).to(dtype)
    assert torch.equal(ops.gate(wide[:, : 2 * size], name), ops.gate(wide[:, : 2 * size].contiguous(), name))


@pytest.mark.one_in(3)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("rows", [0, 1, 3, 50])
def test_sums(ops: NativeRowOps, dtype: torch.dtype, size: int, rows: int) -> None:
    x, y, h = (torch.randn(rows, 2 * size).to(dtype)[:, :size] for _ in range(3))
    gate = (torch.randn(1, size) / size**0.5).to(dtype)
    for weight in (None, gate):
        want = torch_ops.add(x.double(), y.double(), h.double(), None if weight is None else weight.double())
        got = x.clone()
        assert ops.add(got, y, h, weight) is got
        close(got, want, slack=1e-6)
    for row in range(rows):
        alone = [t[row : row + 1].clone() for t in (x, y, h)]
        assert torch.equal(ops.add(*alone, gate)[0], got[row]), "a row depends on nothing else"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("pairs", [1, 4, 11, 32])
def test_rotary(ops: NativeRowOps, dtype: torch.dtype, interleaved: bool, pairs: int) -> None:
    positions = torch.tensor([0, 1, 7, 131_071, 1_000_000])
    inv_freq = 1.0 / 10000.0 ** (torch.arange(pairs) / pairs)
    cos, sin = ops.angles(positions, inv_freq, 1.5)
    for got, want in zip((cos, sin), torch_ops.angles(positions, inv_freq, 1.5), strict=True):
        torch.testing.assert_close(got, want, atol=5e-7, rtol=0)
    whole = torch.randn(5, 4, 2 * pairs + 3).to(dtype)
    want = whole.clone()
    ops.rotate(whole[:, 1:3], cos, sin, interleaved)
    part = want[:, 1:3].double()
    torch_ops.rotate(part, cos, sin, interleaved)
    close(whole[:, 1:3], part, slack=1e-6)
    assert torch.equal(whole[:, 0], want[:, 0])
    assert torch.equal(whole[..., 2 * pairs :], want[..., 2 * pairs :])


@pytest.mark.parametrize("dtype", DTYPES)
def test_embedding(ops: NativeRowOps, dtype: torch.dtype) -> None:
    weight = torch.randn(11, 5).to(dtype)
    ids = torch.tensor([10, 0, 3, 3])
    assert torch.equal(ops.embed(ids, weight), weight[ids])
    assert ops.embed(ids[:0], weight).shape == (0, 5)
    assert torch.equal(ops.embed(torch.tensor([11, -1, 2]), weight).isnan().all(1), torch.tensor([True, True, False]))


@pytest.mark.parametrize("dtype", DTYPES)
def test_gate_that_limits_both(ops: NativeRowOps, dtype: torch.dtype) -> None:
    x = (8 * torch.randn(3, 134)).to(dtype)
    close(ops.gate(x, "swiglu_clamped"), torch_ops.gate(x.double(), "swiglu_clamped"), slack=4e-6)
    x[1, 3] = x[2, 70] = torch.nan
    assert ops.gate(x, "swiglu_clamped").isnan().sum() == 2


ROUTINGS = [
    Routing(2),
    Routing(3, "sigmoid", renormalize=False, scale=2.5),
    Routing(4, num_groups=4, top_groups=2, renormalize=False, float32=True),
    Routing(4, "sigmoid", num_groups=4, top_groups=2, group_score="two best", epsilon=1e-20, float32=True),
]


@pytest.mark.one_in(3)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("routing", ROUTINGS, ids=str)
@pytest.mark.parametrize(("experts", "size", "tokens"), [(8, 1, 3), (12, 33, 1), (64, 128, 70), (4, 16, 0)])
def test_routers(ops: NativeRowOps, dtype: torch.dtype, routing: Routing, experts: int, size: int, tokens: int) -> None:
    """The experts that torch chooses, where the scores differ by more than rounding; the same weights."""
    if experts // routing.num_groups < 2 and routing.group_score == "two best":
        pytest.skip("groups of one expert have no two best")
    x, weight = torch.randn(tokens, size + 3).to(dtype)[:, :size], (torch.randn(experts, size) / size**0.5).to(dtype)
    bias, correction = torch.randn(experts).to(dtype), torch.rand(experts)
    for b, c in ((None, None), (bias, None), (None, correction), (bias, correction)):
        ids, weights = ops.route(x, weight, b, c, routing)
        assert (ids.shape, ids.dtype, weights.dtype) == ((tokens, routing.top_k), torch.int64, dtype)
        wide = replace(routing, float32=True)  # logits of float64 are not rounded
        want_ids, want = torch_ops.route(x.double(), weight.double(), None if b is None else b.double(), c, wide)
        if routing.float32 or dtype == torch.float32:
            got = torch.zeros(tokens, experts).scatter(1, ids, weights.float())
            torch.testing.assert_close(
                got, torch.zeros(tokens, experts).scatter(1, want_ids, want.float()),
                atol=1e-5 if dtype == torch.float32 else 1e-2, rtol=1e-5 if dtype == torch.float32 else 1e-2,
            )  # fmt: skip
        for row in range(min(tokens, 2)):
            alone = ops.route(x[row : row + 1], weight, b, c, routing)
            assert torch.equal(alone[0][0], ids[row])
            assert torch.equal(alone[1][0], weights[row])


@pytest.mark.parametrize("dtype", DTYPES)
def test_routers_round_logits(ops: NativeRowOps, dtype: torch.dtype) -> None:
    """To the type of x unless told otherwise; the first of equals is chosen."""
    x, weight = torch.tensor([[1.0, 1.0]]).to(dtype), torch.tensor([[1.0, 0.0], [1.0, 1e-4], [-1.0, 0.0]]).to(dtype)
    ids, _ = ops.route(x, weight, None, None, Routing(1))
    assert ids.tolist() == [[1 if dtype == torch.float32 else 0]]
    ids, _ = ops.route(x, weight, None, None, Routing(1, float32=True))
    assert ids.tolist() == [[1]]


def test_routers_show_what_is_not_finite(ops: NativeRowOps) -> None:
    """In the weights of its own row; ids are experts all the same."""
    for routing in ROUTINGS:
        for bad in (torch.nan, torch.inf):
            x, weight = torch.randn(3, 16), torch.randn(8, 16)
            x[1, 2] = bad
            ids, weights = ops.route(x, weight, None, None, routing)
            assert ((ids >= 0) & (ids < 8)).all()
            assert all(len(set(row)) == len(row) for row in ids.tolist())
            assert not weights[[0, 2]].isnan().any()
            assert weights[1].isnan().any()


def test_a_row_does_not_depend_on_the_others(ops: NativeRowOps) -> None:
    x, weight = torch.randn(300, 130).bfloat16(), torch.randn(130).bfloat16()
    for run in (lambda x: ops.rms_norm(x, weight, 1e-5), lambda x: ops.gate(x, "silu")):
        assert torch.equal(run(x)[171:172], run(x[171:172]))


def test_what_does_not_fit_is_refused() -> None:
    ops, x, w = NativeRowOps(), torch.zeros(3, 8), torch.zeros(8)
    cos = torch.zeros(3, 4)
    calls = [
        lambda: ops.rms_norm(x, w[:4], 1e-5),
        lambda: ops.rms_norm(x, w.bfloat16(), 1e-5),
        lambda: ops.rms_norm(x, w, 1e-5, residual=torch.zeros(2, 8)),
        lambda: ops.rms_norm(x, w, 1e-5, out=torch.zeros(3, 4)),
        lambda: ops.rms_norm(x.double(), w.double(), 1e-5),
        lambda: ops.rms_norm(torch.zeros(8, 3).T, w, 1e-5),
        lambda: ops.layer_norm(x, w, w[:2], 1e-5),
        lambda: ops.gate(torch.zeros(3, 7), "silu"),
        lambda: ops.rotate(x[:, None], cos[:2], cos[:2]),
        lambda: ops.rotate(x[:, None], cos.bfloat16(), cos.bfloat16()),
        lambda: ops.rotate(x[:, None], torch.zeros(3, 5), torch.zeros(3, 5)),
        lambda: ops.embed(torch.zeros(3, dtype=torch.int32), x),
        lambda: ops.route(x, torch.zeros(4, 7), None, None, Routing(2)),
        lambda: ops.route(x, torch.zeros(4, 8).bfloat16(), None, None, Routing(2)),
        lambda: ops.route(x, torch.zeros(4, 8), w, None, Routing(2)),
        lambda: ops.route(x, torch.zeros(4, 8), None, w[:4].bfloat16(), Routing(2)),
        lambda: ops.route(x, torch.zeros(4, 8), None, None, Routing(5)),
        lambda: ops.route(x, torch.zeros(4, 8), None, None, Routing(1, num_groups=3)),
        lambda: ops.route(x, torch.zeros(4, 8), None, None, Routing(1, num_groups=2, top_groups=3)),
        lambda: ops.angles(torch.zeros(3), w, 1.0),
    ]
    for call in calls:
        with pytest.raises(PluginError):
            call()
    assert ops.can_run("bfloat16", DeviceInfo("cpu", "cpu")) is None
    assert "float64" in (ops.can_run("float64", DeviceInfo("cpu", "cpu")) or "")
