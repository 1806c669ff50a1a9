"""HQQ: the kit, its own files, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lmkit.api import CheckpointError, LinearSpec, ParamSpec, UnsupportedModel
from lmkit.config import EngineConfig, ModelConfig
from lmkit.plugins.resolve import resolve
from lmkit_quantization_hqq.scheme import HqqScheme
from lmkit_quantization_hqq.stored import Stored
from lmkit_quantization_hqq.tensors import HqqTensors, unpacked
from lmkit_testing import QuantizationConformance
from lmkit_testing.produced import INTEGER, REFERENCE, Held, changed, check, check_experts, folders, fours, load, made

SCHEME = "lmkit_quantization_hqq.scheme:HqqScheme"
LAYERS = (
    LinearSpec("layers.0.plain", 256, (384,), sources=("m.plain",)),
    LinearSpec("layers.0.qkv", 256, (256, 128, 128), True, "column", ("q", "k", "v"), ("m.q", "m.k", "m.v")),
)
USUAL: dict[str, Any] = {
    "nbits": 4, "channel_wise": True, "group_size": 64, "optimize": True, "round_zero": True, "axis": 1,
    "view_as_float": False,
}  # fmt: skip


def one(**change: object) -> dict[str, Any]:
    return {
        "weight_quant_params": USUAL | change, "scale_quant_params": None, "zero_quant_params": None,
        "offload_meta": False,
    }  # fmt: skip


def config(found: object, *skipped: str) -> dict[str, Any]:
    return {"quant_method": "hqq", "quant_config": found, "skip_modules": list(skipped)}


class TestHqq(QuantizationConformance):
    plugin = "quantization:hqq"
    configs = {
        "4 bits": config(one(), "lm_head"),
        "rows": config(one(group_size=None, nbits=2)),
        "8 bits": config(one(nbits=8, group_size=32)),
    }
    kernels = ("linear_integer_native", "linear_reference")
    layers = LAYERS
    tolerance = {"float32": 2e-2, "bfloat16": 3e-2}  # activations of 8 bits


@pytest.mark.parametrize("folder", folders(__file__), ids=lambda folder: folder.name)
@pytest.mark.parametrize(("kernel", "tolerance"), [(REFERENCE, 5e-5), (INTEGER, 8e-2)], ids=["reference", "kernels"])
def test_producers_checkpoint(folder: Path, kernel: str, tolerance: float) -> None:
    """Exact; integer kernels round scales and offsets to float16, and with 4 bits activations to 8 bits."""
    check(folder, SCHEME, kernel, tolerance)


def test_the_resolver_takes_it_as_it_is() -> None:
    """Nobody names the format: the checkpoint does."""
    (folder,) = folders(__file__, "bits4")
    resolved, _, _ = resolve(EngineConfig(model=ModelConfig(model=str(folder))))
    chosen, kernel = resolved.choice("quantization"), resolved.choice("op", "linear:int4")
    assert chosen is not None
    assert kernel is not None
    assert (chosen.name, "quant_method=hqq" in chosen.why) == ("hqq", True)
    assert kernel.name in ("linear_integer_native", "linear_reference")


@pytest.mark.parametrize(("bits", "each", "dtype"), [(1, 8, torch.uint8), (2, 4, torch.uint8), (3, 10, torch.int32)])
def test_codes_are_taken_apart(bits: int, each: int, dtype: torch.dtype) -> None:
    codes = torch.randint(0, 1 << bits, (each * 6, 16), generator=torch.Generator().manual_seed(bits))
    numbers = torch.zeros(6, 16, dtype=torch.int64)
    for part in codes.split(6):
        numbers = (numbers << bits) | part
    assert torch.equal(unpacked(numbers.to(dtype), bits, each), codes.to(torch.uint8))


def test_routers_are_dequantized() -> None:
    """What the model wants plain, and a file has quantized."""
    noise = torch.Generator().manual_seed(0)
    codes = torch.randint(0, 256, (16, 32), generator=noise).to(torch.uint8)
    scale, zero = torch.rand(32, 1, generator=noise), torch.rand(32, 1, generator=noise) * 15
    said = {"nbits": 4, "group_size": 32, "axis": 1, "shape": [8, 128], "packing": list(b"4bit_u8")}
    tensors = {"W_q": codes, "scale": scale, "zero": zero, **{key: torch.tensor(value) for key, value in said.items()}}
    held = Held({f"m.gate.{key}": value for key, value in tensors.items()})
    wanted = ParamSpec((8, 128), "float32")
    found = made(HqqTensors(held, lambda name: wanted, of_module=lambda name: Stored(4, 32)))
    expected = (torch.cat([codes >> 4, codes & 15]).float() - zero) * scale
    assert list(found) == ["m.gate.weight"]
    assert (found["m.gate.weight"] - expected.view(8, 128)).abs().max() < 1e-5


def store(weight: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    codes, zeros, scales, worth = fours(weight, 32)
    first, second = codes.view(-1, 32).to(torch.uint8).chunk(2)
    said = {"nbits": 4, "group_size": 32, "axis": 1, "shape": list(weight.shape), "packing": list(b"4bit_u8")}
    tensors = {"W_q": first << 4 | second, "scale": scales.view(-1, 1), "zero": zeros.half().view(-1, 1)}
    return tensors | {key: torch.tensor(value) for key, value in said.items()}, worth


def test_native_experts_run_them(tmp_path: Path) -> None:
    pytest.importorskip("lmkit_model_qwen")
    pytest.importorskip("lmkit_platform_cpu")
    check_experts(tmp_path, SCHEME, config(one(group_size=32), "lm_head"), store)


@pytest.mark.parametrize(
    ("given", "key"),
    [
        (config(one(nbits=5)), "quant_config.weight_quant_params.nbits"),
        (config(one(nbits=1.58)), "quant_config.weight_quant_params.nbits"),
        (config(one(group_size=20)), "quant_config.weight_quant_params.group_size"),
        (config(one(axis=0)), "quant_config.weight_quant_params.axis"),
        (config(one(channel_wise=False)), "quant_config.weight_quant_params.channel_wise"),
        (config(one(surprise=1)), "quant_config.weight_quant_params.surprise"),
        (config(one() | {"scale_quant_params": USUAL}), "quant_config.scale_quant_params"),
        (config(one() | {"zero_quant_params": USUAL}), "quant_config.zero_quant_params"),
        (config(one() | {"surprise": 1}), "quant_config.surprise"),
        (config({"weight_quant_params": 4}), "quant_config.weight_quant_params"),
        (config({"mlp.up_proj": one(nbits=7)}), "quant_config.mlp.up_proj.weight_quant_params.nbits"),
        (config({"mlp.up_proj": 4}), "quant_config"),
        (config({"a b": one()}), "quant_config"),
        (config({}), "quant_config"),
        (config(one(), "a*"), "skip_modules"),
        (config(one()) | {"surprise": 1}, "surprise"),
    ],
)
def test_values_not_understood_are_refused(given: dict[str, Any], key: str) -> None:
    with pytest.raises(UnsupportedModel) as failure:
        HqqScheme.parse(given)
    assert failure.value.key == f"quantization_config.{key}"


def test_modules_have_what_is_said_of_their_tags() -> None:
    tags = {"self_attn.q_proj": one(nbits=8), "mlp.experts.up_proj": one(nbits=3), "mlp.down_proj": None}
    scheme = HqqScheme.parse(config(tags, "lm_head"))
    names = ("layers.7.self_attn.q_proj", "layers.0.mlp.experts.11.up_proj", "layers.0.mlp.down_proj", "layers.0.other")
    found = [scheme.of_module(f"model.{name}") for name in names]
    assert found == [Stored(8, 64), Stored(3, 64), None, None]
    usual = HqqScheme.parse(config(one(), "lm_head", "mlp.gate"))
    names = ("lm_head", "model.layers.0.mlp.gate", "model.layers.0.mlp.gate_proj")
    assert [usual.of_module(name) for name in names] == [None, None, Stored(4, 64)]
    with pytest.raises(UnsupportedModel, match="merged"):
        scheme.for_layer(LinearSpec("qkv", 64, (64, 64), sources=("model.self_attn.q_proj", "model.self_attn.k_proj")))


GATE = "model.layers.0.mlp.gate_proj"
NAN = torch.full((256, 1), float("nan"))


@pytest.mark.parametrize(
    ("key", "value", "error", "match"),
    [
        ("scale", NAN, CheckpointError, r"layers\.0\.mlp\.gate_up: scales"),
        ("zero", NAN, CheckpointError, r"layers\.0\.mlp\.gate_up: scales"),
        ("scale", None, CheckpointError, r"gate_proj\.scale is missing"),
        ("scale", torch.ones(128, 1), CheckpointError, r"gate_proj\.scale .* needs .* \[256, 1\]"),
        ("W_q", torch.zeros(7, 32, dtype=torch.uint8), CheckpointError, r"gate_proj\.W_q has 224 bytes"),
        ("nbits", torch.tensor(8, dtype=torch.int32), CheckpointError, r"gate_proj\.nbits is \[8\]"),
        ("nbits", None, CheckpointError, r"gate_proj\.nbits is missing"),
        ("nbits", torch.zeros(100, dtype=torch.int32), CheckpointError, r"gate_proj\.nbits .* needs a few integers"),
        ("axis", torch.tensor(0, dtype=torch.int32), CheckpointError, r"gate_proj\.axis is \[0\]"),
        ("group_size", torch.tensor(64, dtype=torch.int32), CheckpointError, r"gate_proj\.group_size is \[64\]"),
        ("packing", torch.tensor(list(b"8bit_u8"), dtype=torch.uint8), CheckpointError, r"gate_proj\.packing is"),
        ("shape", torch.tensor([128]), CheckpointError, r"gate_proj\.shape is \[128\]"),
        ("shape", torch.tensor([-128, -64]), CheckpointError, r"gate_proj\.shape is \[-128, -64\]"),
        ("shape", torch.tensor([1 << 40, 1 << 40]), CheckpointError, r"gate_proj\.W_q has 4096 bytes"),
        ("shape", torch.tensor([512, 16]), UnsupportedModel, r"columns of model\.layers\.0\.mlp\.gate_proj"),
        ("weight", torch.zeros(128, 64), CheckpointError, r"gate_proj\.weight is plain"),
    ],
)
def test_tensors_that_do_not_fit_are_refused_by_name(
    tmp_path: Path, key: str, value: Any, error: Any, match: str
) -> None:
    (folder,) = folders(__file__, "bits4")
    with pytest.raises(error, match=match):
        load(changed(folder, tmp_path, {f"{GATE}.{key}": value}), SCHEME, REFERENCE)


def test_what_the_configuration_calls_plain_is_plain(tmp_path: Path) -> None:
    (folder,) = folders(__file__, "bits4")
    quantized = {f"lm_head.{key}": torch.zeros(8, dtype=torch.uint8) for key in ("W_q", "nbits")}
    with pytest.raises(CheckpointError, match=r"lm_head\.W_q is there, and quantization_config says"):
        load(changed(folder, tmp_path, quantized), SCHEME, REFERENCE)
