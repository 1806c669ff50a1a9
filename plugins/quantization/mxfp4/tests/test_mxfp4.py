"""Experts in MXFP4 as gpt-oss publishes them, and the kernel for 4-bit floats."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from lmkit.api import CannotSplit, CheckpointError, LinearSpec, UnsupportedModel, WeightMismatch
from lmkit.config import EngineConfig, ModelConfig
from lmkit.plugins.resolve import resolve
from lmkit_layouts import MxFp4
from lmkit_layouts.fp4 import HALVES, LARGEST, TWICE, unpack_fp4
from lmkit_quantization_mxfp4.kernel import Fp4Torch, Fp4Weight
from lmkit_quantization_mxfp4.scheme import MxFp4Scheme
from lmkit_testing import QuantizationConformance
from lmkit_testing.checkpoints import tiny_checkpoint
from lmkit_testing.model import choice, deviation, load_tiny, prompt
from lmkit_testing.steps import ModelDriver
from lmkit_worker.loaded import LoadedModel
from safetensors.torch import load_file, save_file
from torch import Tensor

TARGET = "lmkit_quantization_mxfp4.scheme:MxFp4Scheme"
GPT_OSS = "lmkit_model_gpt_oss.arch:GptOss"
# As the producer publishes it.
KEPT = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
CONFIG = {"quant_method": "mxfp4", "modules_to_not_convert": KEPT}
EXPERT = LinearSpec("layers.0.experts.down", 128, (96,), sources=("model.layers.0.mlp.experts.down_proj",))
PAIR = LinearSpec("up", 64, (64, 64), False, "column", ("gate", "up"), ("m.experts.gate_up_proj",))


class TestMxFp4(QuantizationConformance):
    plugin = "quantization:mxfp4"
    configs = {"published": CONFIG}
    kernels = ("fp4_torch", "linear_integer_native", "linear_reference")
    layers = (EXPERT, PAIR)
    tolerance = {"float32": 1e-4, "bfloat16": 2e-2}  # native kernels round activations to 15 bits

    def stored(self, fmt, layer, seed=0):
        tensors = super().stored(fmt, layer, seed)
        return tensors | {"weight_scale": 120 + tensors["weight_scale"] % 8}


def nearest(x: Tensor) -> Tensor:
    """The code of the nearest number; halfway, of the even one."""
    numbers = torch.tensor(TWICE[:8]) / 2
    distance = (x.abs().clamp(max=6)[..., None] - numbers).abs()
    order = torch.tensor([0, 2, 4, 6, 1, 3, 5, 7])  # even mantissas win
    code = order[distance[..., order].argmin(-1)]
    return (code + 8 * (x < 0)).to(torch.uint8)


def quantize(weight: Tensor) -> tuple[Tensor, Tensor]:
    """[..., k] -> blocks [..., k / 32, 16] and scales [..., k / 32], by section 6.3 of the Microscaling specification.

    The exponent of a scale is that of the largest number of a group, less 2, which is that of 6 = 1.5 * 2^2.
    """
    groups = weight.unflatten(-1, (-1, 32))
    most = groups.abs().amax(-1)
    exponent = torch.where(most > 0, most.log2().floor() - 2, 0).clamp(-127, 127)
    codes = nearest(groups / exponent.exp2()[..., None])
    return codes[..., ::2] | codes[..., 1::2] << 4, (exponent + 127).to(torch.uint8)


# ---------------------------------------------------------------------------------------------------- the layout


def layout(n: int, k: int) -> tuple[MxFp4, LinearSpec]:
    return MxFp4(parts=(n,), width=k), LinearSpec("layers.3.experts.up", k, (n,))


def meant(code: int) -> float:
    """By the definition of E2M1: a sign, an exponent with bias 1, one bit of mantissa; subnormal at exponent 0."""
    sign, exponent, mantissa = (-1) ** (code >> 3), code >> 1 & 3, code & 1
    return sign * (2.0 ** (exponent - 1) * (1 + mantissa / 2) if exponent else mantissa / 2)


def test_all_codes_mean_what_the_specification_says() -> None:
    data = torch.arange(256, dtype=torch.uint8)
    expected = [number for byte in range(256) for number in (meant(byte & 15), meant(byte >> 4))]
    assert unpack_fp4(data.view(16, 16)).flatten().tolist() == expected
    assert nearest(torch.tensor([meant(c) for c in range(8)])).tolist() == list(range(8))


@given(st.data())
def test_weights_are_exact_in_float32(data: st.DataObject) -> None:
    """Also as integers, where scales allow that; the kernel that keeps 4 bits multiplies by the same."""
    n, groups = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 3))
    codes = data.draw(st.lists(st.integers(0, 255), min_size=16, max_size=16))
    exponents = data.draw(st.lists(st.integers(0, LARGEST), min_size=n * groups, max_size=n * groups))
    fmt, layer = layout(n, 32 * groups)
    params = {
        "weight_packed": torch.tensor(codes, dtype=torch.uint8).repeat(n, groups),
        "weight_scale": torch.tensor(exponents, dtype=torch.uint8).view(n, groups),
    }
    weight = fmt.dequantize(params, torch.float32)
    numbers = [number for byte in codes for number in (meant(byte & 15), meant(byte >> 4))]
    expected = [math.ldexp(number, e - 127) for e in exponents for number in numbers]
    assert weight.flatten().tolist() == torch.tensor(expected, dtype=torch.float64).float().tolist()
    packed = Fp4Torch().pack(fmt, dict(params), layer, torch.float32)
    assert torch.equal(Fp4Torch().apply(torch.eye(32 * groups), packed, None).T, weight)
    exact = all(HALVES[0] <= e <= HALVES[1] for e in exponents) or not any(numbers)
    if not exact:
        with pytest.raises(CheckpointError, match="fp4_torch"):
            fmt.integers(params)
        return
    found = fmt.integers(params)
    assert torch.equal(found.scales, found.scales.half().float())
    assert isinstance(found.zeros, int)
    scales = found.scales.repeat_interleave(32, 1)
    assert found.table is not None
    assert torch.equal((found.table[found.codes.long()].float() - found.zeros) * scales, weight)


def test_scales_of_zeros_may_be_anything_as_integers() -> None:
    fmt, _ = layout(1, 64)
    codes = torch.full((1, 32), 0x35, dtype=torch.uint8)
    codes[:, :16] = 0x80  # 0, and 0 with a sign
    found = fmt.integers({"weight_packed": codes, "weight_scale": torch.tensor([[0, 127]], dtype=torch.uint8)})
    assert found.scales.tolist() == [[0.0, 0.5]]


@pytest.mark.parametrize(("scale", "match"), [(255, "not numbers"), (254, "too large"), (253, "too large")])
def test_scales_that_are_no_numbers_are_refused(scale: int, match: str) -> None:
    fmt, layer = layout(2, 32)
    params = {
        "weight_packed": torch.zeros(2, 16, dtype=torch.uint8),
        "weight_scale": torch.tensor([[127], [scale]], dtype=torch.uint8),
    }
    with pytest.raises(CheckpointError, match=match):
        fmt.dequantize(params, torch.float32)
    with pytest.raises(CheckpointError, match=match):
        fmt.integers(params)
    with pytest.raises(CheckpointError, match=match):
        Fp4Torch().pack(fmt, params, layer, torch.float32)


def test_columns_that_do_not_divide_are_named() -> None:
    fmt, layer = layout(4, 48)
    with pytest.raises(UnsupportedModel, match=r"columns of layers\.3\.experts\.up"):
        fmt.params(layer, "float32")
    fmt, layer = layout(4, 96)
    with pytest.raises(CannotSplit, match="two ranks"):
        fmt.params(replace(layer, in_features=48), "float32")


# ---------------------------------------------------------------------------------------------------- the scheme


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ({"modules_to_not_convert": "lm_head"}, "modules_to_not_convert"),
        ({"modules_to_not_convert": ["re:.*"]}, "modules_to_not_convert"),
        ({"modules_to_not_convert": ["a(b"]}, "modules_to_not_convert"),
        ({"modules_to_not_convert": ["*" * 9]}, "modules_to_not_convert"),
        ({"modules_to_not_convert": ["x\n"]}, "modules_to_not_convert"),
        ({"modules_to_not_convert": [1]}, "modules_to_not_convert"),
        ({"modules_to_not_convert": ["a*"] * 1001}, "modules_to_not_convert"),
        ({"dequantize": True}, "dequantize"),
        ({"group_size": 32}, "group_size"),
    ],
)
def test_values_not_understood_are_refused(change: dict[str, Any], key: str) -> None:
    with pytest.raises(UnsupportedModel) as failure:
        MxFp4Scheme.parse(CONFIG | change)
    assert failure.value.key == f"quantization_config.{key}"


@pytest.mark.parametrize(
    ("kept", "plain"),
    [
        (None, False),
        (["model.layers.0.mlp"], True),
        (["model.layers.*.mlp.experts"], True),
        (["experts.down_proj"], True),
        (["model.layers.1*"], False),
        (["xperts", "down", "model.layers.0.mlp.exp"], False),
        (["*"], True),
    ],
)
def test_experts_may_be_left_plain(kept: list[str] | None, plain: bool) -> None:
    scheme = MxFp4Scheme.parse({"quant_method": "mxfp4", "modules_to_not_convert": kept})
    assert (scheme.for_layer(EXPERT) is None) == plain


def test_what_is_no_expert_is_plain() -> None:
    scheme = MxFp4Scheme.parse({"quant_method": "mxfp4"})
    for name in ("model.layers.0.self_attn.q_proj", "model.layers.0.mlp.router", "lm_head"):
        assert scheme.for_layer(LinearSpec(name, 64, (64,), sources=(name,))) is None


# ---------------------------------------------------------------------------------------------------- a checkpoint

SIZES = {
    "num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16, "sliding_window": 9, "hidden_size": 64,
    "intermediate_size": 96,
}  # fmt: skip


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny gpt-oss with its experts as they are published.

    The producer makes them on accelerators only; they are made here by the specification.
    """
    pytest.importorskip("lmkit_model_gpt_oss")
    folder = tiny_checkpoint("GptOssForCausalLM", tmp_path_factory.mktemp("mxfp4"), **SIZES)
    stored: dict[str, Tensor] = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        if name.endswith("_proj") and ".experts." in name:  # [E, in, out]
            stored[f"{name}_blocks"], stored[f"{name}_scales"] = quantize(tensor.transpose(1, 2).contiguous())
        else:
            stored[name] = tensor
    save_file(stored, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": CONFIG}))
    return folder


@pytest.fixture(scope="module")
def expected(checkpoint: Path) -> Tensor:
    """Logits of transformers over the weights that its own reader gives."""
    from transformers import AutoModelForCausalLM, Mxfp4Config

    model = AutoModelForCausalLM.from_pretrained(
        checkpoint,
        dtype=torch.float32,
        quantization_config=Mxfp4Config(dequantize=True, modules_to_not_convert=KEPT),
    )
    with torch.no_grad():
        return model.eval()(torch.tensor([prompt(97)])).logits[0]


FOUR_BITS = {
    "linear:mxfp4": "lmkit_quantization_mxfp4.kernel:Fp4Torch",
    "moe:mxfp4": "lmkit_quantization_mxfp4.experts:Fp4Experts",
}
KERNELS = {
    "experts in 4 bits": FOUR_BITS,
    "4 bits": {"linear:mxfp4": "lmkit_quantization_mxfp4.kernel:Fp4Torch"},
    "reference": {"linear:mxfp4": "lmkit_layers.linear:ReferenceLinear"},
    "integers": {"linear:mxfp4": "lmkit_platform_cpu.integer:IntegerLinear"},
    "experts": {
        "linear:mxfp4": "lmkit_platform_cpu.integer:IntegerLinear",
        "moe:mxfp4": "lmkit_platform_cpu.experts:NativeExperts",
    },
}


def load(folder: Path, kernel: str = "4 bits", **options: Any) -> LoadedModel:
    if kernel in ("integers", "experts"):
        pytest.importorskip("lmkit_platform_cpu")
    ops = (choice("op", target, component) for component, target in KERNELS[kernel].items())
    return load_tiny(folder, GPT_OSS, "float32", choices=(choice("quantization", TARGET), *ops), **options)


@pytest.mark.parametrize("kernel", KERNELS)
def test_logits_of_the_producers_reader(checkpoint: Path, expected: Tensor, kernel: str) -> None:
    """Weights are exact in each; integer kernels round activations to 15 bits."""
    got = ModelDriver(load(checkpoint, kernel), "float32").run(0, prompt(97), 7)
    assert deviation(got, expected) < (2e-3 if kernel in ("integers", "experts") else 1e-4)


def test_weights_stay_small(checkpoint: Path) -> None:
    """4 bits and a scale of two bytes per 32, each expert by itself or all at once."""
    numbers = 4 * 2 * 96 * 64
    for kernel in ("4 bits", "experts in 4 bits"):
        packed = load(checkpoint, kernel).model.layers[0].mlp.experts.up.packed
        assert all(isinstance(one, Fp4Weight) and one.codes.dtype == torch.uint8 for one in packed.experts)
        assert packed.nbytes == numbers // 2 + numbers // 32 * 2
    whole = load(checkpoint, "experts").model.layers[0].mlp.experts.up.packed
    assert whole.nbytes == numbers // 2 + numbers // 32 * 2


def changed(checkpoint: Path, folder: Path, name: str, value: Tensor | None) -> Path:
    tensors = load_file(checkpoint / "model.safetensors")
    tensors.pop(name)
    save_file(tensors if value is None else tensors | {name: value}, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_bytes((checkpoint / "config.json").read_bytes())
    return folder


SCALES = "model.layers.1.mlp.experts.down_proj_scales"


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_scale_that_is_no_number_is_refused_with_its_layer(checkpoint: Path, tmp_path: Path, kernel: str) -> None:
    scales = torch.full((4, 64, 3), 120, dtype=torch.uint8)
    scales[3, 5, 2] = 255
    with pytest.raises(CheckpointError, match=r"layers\.1\.mlp\.experts\.down: scales.*not numbers"):
        load(changed(checkpoint, tmp_path, SCALES, scales), kernel)


def test_small_scales_run_where_4_bits_are_kept(checkpoint: Path, tmp_path: Path) -> None:
    scales = torch.full((4, 64, 3), HALVES[0] - 1, dtype=torch.uint8)
    folder = changed(checkpoint, tmp_path, SCALES, scales)
    assert load(folder).model.layers[1].mlp.experts.down.packed is not None
    with pytest.raises(CheckpointError, match=r"layers\.1\.mlp\.experts\.down: has a scale of 2\^-24") as failure:
        load(folder, "experts")
    assert failure.value.fix is not None
    options = failure.value.fix.rpartition("--op ")[2]
    resolved, _, _ = resolve(EngineConfig(model=ModelConfig(model=str(folder)), wanted={"op": options}))
    assert [c.name for c in resolved.choices if c.component in FOUR_BITS] == options.split(",")
    assert load(folder, "experts in 4 bits").model.layers[1].mlp.experts.down.packed is not None


def test_a_missing_tensor_is_named_as_the_file_has_it(checkpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(WeightMismatch, match=r"layers\.1\.mlp\.experts\.down_proj_scales"):
        load(changed(checkpoint, tmp_path, SCALES, None))


def test_shapes_of_another_model_are_refused(checkpoint: Path, tmp_path: Path) -> None:
    blocks = torch.zeros(4, 64, 3, 8, dtype=torch.uint8)
    with pytest.raises(WeightMismatch, match="down_proj_blocks has shape"):
        load(changed(checkpoint, tmp_path, SCALES.replace("scales", "blocks"), blocks))


def test_the_resolver_takes_it_as_it_is(checkpoint: Path) -> None:
    """Nobody names the format: the checkpoint does; experts are integers where native kernels are."""
    pytest.importorskip("lmkit_platform_cpu")
    resolved, _, _ = resolve(EngineConfig(model=ModelConfig(model=str(checkpoint))))
    chosen = resolved.choice("quantization")
    assert chosen is not None
    assert (chosen.name, "quant_method=mxfp4" in chosen.why) == ("mxfp4", True)
    found = {component: [c.name for c in resolved.choices if c.component == component] for component in FOUR_BITS}
    assert found["linear:mxfp4"][-2:] == ["fp4_torch", "linear_reference"]
    assert found["moe:mxfp4"][-1] == "moe_fp4_torch"
