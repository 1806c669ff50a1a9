"""Modules that models are made of: rotary angles, norms, activations, linears, attention."""

from __future__ import annotations

import cmath
import math
from types import SimpleNamespace
from typing import Any

import lmkit_layers
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from lmkit.api import AttnNeed, DeviceInfo, LayerInfo, LinearSpec, ModelInfo, SelectionError, UnsupportedModel
from lmkit_layers import Builder, Latent, PlainFormat, RMSNorm, Rotary, TorchRowOps, activation
from lmkit_layers.adapters import Adapter, AdapterBank, Delta
from lmkit_layers.attention import Attention
from lmkit_layers.linear import ReferenceLinear
from lmkit_layers.rotary import frequencies
from lmkit_testing import PluginConformance
from lmkit_testing.steps import Ranks
from torch import Tensor, nn

ROWS = TorchRowOps()
PLAIN = {"rope_type": "default", "theta": 100.0, "partial": 1.0}


class TestLinear(PluginConformance):
    plugin = "op:linear_reference"


class TestRowwise(PluginConformance):
    plugin = "op:rowwise_torch"


@given(st.integers(0, 500), st.sampled_from([2, 8, 10]), st.sampled_from([1.0, 0.5]), st.booleans())
def test_rotation_is_multiplication_by_a_unit_complex_number(
    position: int, dim: int, partial: float, interleaved: bool
) -> None:
    """Entry j and its partner form one number, turned by position / theta^(2j/dim)."""
    turned = int(dim * partial) // 2 * 2
    if turned != int(dim * partial) or not turned:
        return
    x = torch.randn(1, 3, dim, generator=torch.Generator().manual_seed(position))
    cos, sin = Rotary(dim, {**PLAIN, "partial": partial}, ROWS)(torch.tensor([position]))
    got = x.clone()
    ROWS.rotate(got, cos, sin, interleaved)
    for j in range(turned // 2):
        a, b = (2 * j, 2 * j + 1) if interleaved else (j, j + turned // 2)
        turn = cmath.exp(1j * position * 100.0 ** (-2 * j / turned))
        for head in range(3):
            value = complex(x[0, head, a], x[0, head, b]) * turn
            assert abs(complex(got[0, head, a], got[0, head, b]) - value) < 2e-3
    assert torch.equal(got[..., turned:], x[..., turned:])


def test_scaled_frequencies() -> None:
    base, one = frequencies(8, PLAIN)
    assert one == 1.0
    assert torch.equal(frequencies(8, {**PLAIN, "rope_type": "linear", "factor": 4.0})[0], base / 4)
    assert torch.equal(frequencies(8, {**PLAIN, "rope_type": "dynamic", "factor": 4.0})[0], base)
    yarn = {**PLAIN, "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    scaled, magnitude = frequencies(8, yarn)
    assert magnitude == pytest.approx(0.1 * math.log(4) + 1)
    assert bool(((scaled <= base) & (scaled >= base / 4)).all())
    mixed, magnitude = frequencies(8, {**yarn, "mscale": 2.0, "mscale_all_dim": 1.0})
    assert magnitude == pytest.approx((0.2 * math.log(4) + 1) / (0.1 * math.log(4) + 1))
    assert torch.equal(mixed, scaled)
    with pytest.raises(UnsupportedModel, match="spiral"):
        frequencies(8, {**PLAIN, "rope_type": "spiral"})


def test_norm_is_computed_in_float32() -> None:
    norm = RMSNorm(64, 1e-5, torch.bfloat16, ROWS)
    norm.weight.data = torch.rand(64).bfloat16()
    x = (torch.randn(3, 64) * 100).bfloat16()
    wide = x.double()
    expected = wide / (wide.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * norm.weight.double()
    torch.testing.assert_close(norm(x).double(), expected, atol=1e-2, rtol=2**-7)


def test_norm_adds_to_the_residual_stream_first() -> None:
    norm = RMSNorm(16, 1e-5, torch.float32, ROWS)
    norm.weight.data = torch.rand(16)
    h, delta = torch.randn(3, 16), torch.randn(3, 16)
    total = h + delta
    assert torch.equal(norm.add(h, delta), norm(total))
    assert torch.equal(h, total)
    assert torch.equal(norm.add(h, None), norm(total))


def test_norm_into_its_own_operand() -> None:
    """Heads of a merged projection are normed where they lie, also with a weight of another precision."""
    norm = RMSNorm(8, 1e-5, torch.float32, ROWS)
    norm.weight.data = torch.rand(8)
    merged = torch.randn(3, 5, 8).bfloat16()
    before, heads = merged.clone(), merged[:, 1:3]
    norm(heads, out=heads)
    assert torch.equal(merged[:, 1:3], norm(before[:, 1:3].contiguous()))
    assert torch.equal(merged[:, 0], before[:, 0])
    assert torch.equal(merged[:, 3:], before[:, 3:])


def test_unknown_activation() -> None:
    assert activation("silu")(torch.zeros(1)) == 0
    with pytest.raises(UnsupportedModel, match="hidden_act"):
        activation("swoosh")


def test_a_format_without_kernel_is_named() -> None:
    info = ModelInfo("Toy", 11, 8, (LayerInfo(0, AttnNeed(2, 4, 2)),), 32, "float32", 0)
    builder = Builder(info, torch.float32, DeviceInfo("cpu", "cpu"), object(), {})  # type: ignore[arg-type]
    with pytest.raises(SelectionError, match="plain"):
        builder.linear(LinearSpec("some.layer", 4, (4,)))


class HalfFormat(PlainFormat):
    """Stored values are half of what they mean."""

    name = "half"

    def dequantize(self, params: Any, dtype: torch.dtype) -> torch.Tensor:
        return 2 * params["weight"].to(dtype)


@pytest.mark.parametrize("online", [True, False])
def test_weights_that_a_model_reads_are_dense(online: bool) -> None:
    """Whatever kernels there are; and nothing is quantized that would be dequantized at once."""
    spec = LinearSpec("kv_b", 3, (4 * 7,), dense=True)
    info = ModelInfo("Toy", 11, 8, (), 32, "float32", 0, linears=(spec,))
    scheme: Any = SimpleNamespace(for_layer=lambda _: HalfFormat())
    made = Builder(info, torch.float32, DeviceInfo("cpu", "cpu"), None, {}, scheme=scheme, online=online)
    linear = made.linear(spec)
    linear.weight.data = weight = torch.randn(28, 3)
    linear.pack()
    assert torch.equal(linear.packed.weight, weight if online else 2 * weight)


@pytest.mark.parametrize("tokens", [1, 5])
def test_latents_are_read_as_what_they_would_become(tokens: int) -> None:
    """Products with keys, and weighted sums of values, as where keys and values were made of each latent."""
    info = ModelInfo("Toy", 11, 8, (), 32, "float32", 0)
    made = Builder(info, torch.float64, DeviceInfo("cpu", "cpu"), None, {})
    linear = made.linear(LinearSpec("kv_b", 6, (4 * 7,), dense=True))
    linear.weight.data = torch.randn(28, 6, dtype=torch.float64)
    linear.pack()
    latent, q = torch.randn(9, 6, dtype=torch.float64), torch.randn(tokens, 4, 5, dtype=torch.float64)
    keys, values = linear(latent).view(9, 4, 7).split((5, 2), -1)
    absorbed = Latent(linear, 5, 2)
    scores = torch.einsum("thr,lr->thl", absorbed(q, "keys"), latent)
    torch.testing.assert_close(scores, torch.einsum("thd,lhd->thl", q, keys))
    read = torch.einsum("thl,lr->thr", scores, latent)
    torch.testing.assert_close(absorbed(read, "values"), torch.einsum("thl,lhd->thd", scores, values))


def test_sinks_belong_to_layers_that_need_them() -> None:
    from lmkit_layers import Attention

    plain, sinks = (AttnNeed(4, 2, 1, sinks=flag) for flag in (False, True))
    assert Attention(object(), plain, 0, 0, 1.0).sinks is None  # type: ignore[arg-type]
    parameter = Attention(object(), sinks, 0, 0, 1.0).sinks  # type: ignore[arg-type]
    assert (parameter.shape, parameter.dtype) == ((2,), torch.float32)


def test_names_are_imported_on_first_use() -> None:
    for name in lmkit_layers.__all__:
        assert getattr(lmkit_layers, name)
    with pytest.raises(AttributeError, match="no attribute 'Nonsense'"):
        _ = lmkit_layers.Nonsense


def test_the_last_attention_reads_nothing_for_nobody() -> None:
    """Where no hidden state of the step is read, keys and values are written, and that is all."""
    calls: list[str] = []
    backend: Any = SimpleNamespace(write_kv=lambda *_: calls.append("write"), forward=lambda *_: calls.append("read"))
    attn = Attention(backend, AttnNeed(4, 2, 1), 0, 0, 1.0, last=True)
    q, k = torch.ones(3, 2, 4), torch.ones(3, 1, 4)
    for rows, called in (([], ["write"]), ([2], ["write", "read"])):
        x: Any = SimpleNamespace(
            attn=[SimpleNamespace(slots=None)], kv=[None], logits_rows=torch.tensor(rows), only_logits=True
        )
        assert attn(q, k, k, x).shape == (3, 8)
        assert calls == called
        calls.clear()


@pytest.mark.parametrize("kv_dtype", ["float8_e4m3fn", "float8_e5m2", "bfloat16"])
def test_scales_of_a_float8_cache(kv_dtype: str) -> None:
    """Keys and values are divided by them as they are written; a layer that reads another's cache has its scales."""
    seen: dict[str, Any] = {}
    backend: Any = SimpleNamespace(
        write_kv=lambda k, v, *_: seen.update(k=k, v=v),
        forward=lambda q, kv, plan, scale, out: (seen.update(q=q, scale=scale), out.fill_(1.0)),
    )
    need = AttnNeed(4, 2, 1, kv_dtype=kv_dtype)
    writer = Attention(backend, need, 0, 0, 0.5)
    reader = Attention(backend, need, 0, 0, 0.25, writer)
    assert not list(reader.parameters())
    stored = dict(writer.named_parameters())
    assert set(stored) == ({"k_scale", "v_scale"} if "float8" in kv_dtype else set())
    for name, value in (("k_scale", 4.0), ("v_scale", 8.0)):
        if name in stored:
            stored[name].data.fill_(value)
    writer.settle()
    reader.settle()
    by_k, by_v = (4.0, 8.0) if stored else (1.0, 1.0)
    q, k = torch.ones(3, 2, 4), torch.full((3, 1, 4), 2.0)
    x: Any = SimpleNamespace(attn=[SimpleNamespace(slots=None)], kv=[None], only_logits=False)
    assert torch.equal(writer(q, k, k, x), torch.full((3, 8), by_v))
    assert torch.equal(seen["k"] * by_k, k)
    assert torch.equal(seen["v"] * by_v, k)
    assert (seen["scale"], seen["q"] is q) == (0.5 * by_k, True)
    seen.clear()
    assert torch.equal(reader(q, k, k, x), torch.full((3, 8), by_v))
    assert (seen.keys(), seen["scale"]) == ({"q", "scale"}, 0.25 * by_k)


@pytest.mark.parametrize(("name", "scales"), [("k_scale", (3.0, 3.0)), ("v_scale", (3.0, 3.0)), ("", None)])
def test_one_scale_of_a_cache_stands_for_both(name: str, scales: tuple[float, float] | None) -> None:
    backend: Any = object()
    attn = Attention(backend, AttnNeed(4, 2, 1, kv_dtype="float8_e4m3fn"), 0, 0, 1.0)
    for key, parameter in list(attn.named_parameters()):
        parameter.data.fill_(3.0)
        if key != name:  # the checkpoint has none
            setattr(attn, key, None)
    attn.settle()
    assert attn.scales == scales


def test_values_that_are_a_part_of_keys_have_their_scale() -> None:
    need = AttnNeed(6, 2, 1, kv_dtype="float8_e4m3fn", v_head_dim=4, mla=True)
    attn = Attention(object(), need, 0, 0, 1.0)  # type: ignore[arg-type]
    for (_, parameter), value in zip(attn.named_parameters(), (3.0, 5.0), strict=True):
        parameter.data.fill_(value)
    attn.settle()
    assert attn.scales == (3.0, 3.0)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("vocab_size", [12, 13])
def test_a_head_of_ranks_makes_the_logits_of_one(vocab_size: int, tied: bool, bias: bool) -> None:
    """Each makes those of its part of the vocabulary, changed by adapters too; one that does not divide is whole."""
    spec = LinearSpec("lm_head", 8, (vocab_size,), bias, "column", sources=("lm_head",))
    info: Any = SimpleNamespace(linears=(spec,), kv_groups=list)
    numbers = torch.Generator().manual_seed(3)
    weight, own, a, b, x = (
        torch.randn(size, generator=numbers) for size in ((vocab_size, 8), (vocab_size, 8), (8, 2), (2, 3), (4, 8))
    )
    added, adapters = torch.randn(vocab_size, generator=numbers), torch.tensor([0, -1, 1, 0])

    def logits(collectives: Any = None) -> tuple[int, Tensor, Tensor]:
        kernels = {"linear:plain": [ReferenceLinear()]}
        made = Builder(info, torch.float32, DeviceInfo("cpu", "cpu"), None, kernels, collectives=collectives)
        model, head = nn.Module(), made.linear(spec)
        model.lm_head, rows = head, head.own_rows
        if tied:
            model.embed = made.embedding(vocab_size, 8)
            model.embed.weight = nn.Parameter(weight)
            head.tie(model.embed)
        else:
            head.weight = nn.Parameter(weight[rows].clone())
        if bias:
            head.bias = nn.Parameter(added[rows].clone())
        head.pack()
        bank = AdapterBank(model, 2, torch.device("cpu"))  # type: ignore[arg-type]
        model.logits = head  # type: ignore[assignment]
        bank.load(Adapter("a", {"lm_head": [Delta(5, 8, a, b)]}, {}))
        bank.load(Adapter("b", {}, {"lm_head": own}))
        return head.local.total_out, head(x).detach(), bank.logits(x, adapters).detach()

    with torch.inference_mode():
        _, *whole = logits()
        for size, *found in Ranks(2).run(logits):
            assert size == (6 if vocab_size == 12 else vocab_size)
            for here, expected in zip(found, whole, strict=True):
                assert torch.allclose(here, expected, atol=1e-6)
    assert not torch.allclose(whole[0], whole[1])
