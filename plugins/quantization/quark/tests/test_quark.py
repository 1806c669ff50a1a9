"""AMD Quark: the kit, its own files, and what is refused."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from lmkit.api import CheckpointError, LinearSpec, UnsupportedModel, WeightMismatch
from lmkit.config import EngineConfig, ModelConfig
from lmkit.plugins.resolve import resolve
from lmkit_layouts import AwqWords, ByteRows, Fp8Format, MxFp4
from lmkit_quantization_quark.scheme import QuarkScheme
from lmkit_testing import QuantizationConformance
from lmkit_testing.produced import INTEGER, REFERENCE, changed, check, check_experts, folders, fours, load, words

SCHEME = "lmkit_quantization_quark.scheme:QuarkScheme"
PLAIN = LinearSpec("layers.0.plain", 256, (384,), sources=("m.plain",))
QKV = LinearSpec("layers.0.qkv", 256, (256, 128, 128), True, "column", ("q", "k", "v"), ("m.q", "m.k", "m.v"))
EXPORT = {"kv_cache_group": [], "min_kv_scale": 0.0, "pack_method": "reorder", "weight_format": "real_quantized"}


def spec(dtype: str, qscheme: str, **others: object) -> dict[str, Any]:
    return {"dtype": dtype, "qscheme": qscheme, "is_dynamic": False, "symmetric": True, "ch_axis": None} | others


def config(weight: object, inputs: object = None, **others: object) -> dict[str, Any]:
    layer = {"weight": weight, "input_tensors": inputs, "bias": None, "output_tensors": None}
    return {
        "quant_method": "quark", "global_quant_config": layer, "export": EXPORT, "exclude": ["lm_head"], **others
    }  # fmt: skip


FP8 = spec("fp8_e4m3", "per_tensor")
ROWS8 = spec("fp8_e4m3", "per_channel", ch_axis=0)
INT8 = spec("int8", "per_channel", ch_axis=0)
INT4 = spec("int4", "per_group", ch_axis=-1, group_size=64)
MX = spec("fp4", "per_group", ch_axis=-1, group_size=32, scale_format="e8m0", symmetric=None)


class TestIntegers(QuantizationConformance):
    plugin = "quantization:quark"
    configs = {
        "int4": config(INT4),
        "int8": config(INT8),
        "w8a8": config(spec("int8", "per_tensor"), spec("int8", "per_channel", is_dynamic=True)),
    }
    kernels = ("linear_integer_native", "linear_reference")
    layers = (PLAIN, QKV)
    tolerance = {"float32": 2e-2, "bfloat16": 3e-2}  # activations of 8 bits


class TestFloats(QuantizationConformance):
    plugin = "quantization:quark"
    configs = {
        "tensor": config(FP8, FP8),
        "rows": config(ROWS8),
        "blocks": config(spec("fp8_e4m3", "per_block", block_size=[128, 128])),
    }
    kernels = ("fp8_torch", "linear_reference")
    layers = (PLAIN, QKV)

    def stored(self, fmt, layer, seed=0):
        found = super().stored(fmt, layer, seed)
        if isinstance(fmt, Fp8Format) and fmt.block is None and not fmt.rows:
            found["weight_scale"] = torch.linspace(0.5, 1.5, len(layer.out_features))
        return found


class TestMxFp4(QuantizationConformance):
    plugin = "quantization:quark"
    configs = {"mxfp4": config(MX, MX | {"is_dynamic": True})}
    kernels = ("fp4_torch", "linear_integer_native", "linear_reference")
    layers = (PLAIN, QKV)
    tolerance = {"float32": 1e-3, "bfloat16": 2e-2}

    def stored(self, fmt, layer, seed=0):
        found = super().stored(fmt, layer, seed)
        return found | {"weight_scale": found["weight_scale"] % 12 + 120}


@pytest.mark.parametrize("folder", folders(__file__), ids=lambda folder: folder.name)
@pytest.mark.parametrize(("kernel", "tolerance"), [(REFERENCE, 2e-3), (INTEGER, 8e-2)], ids=["reference", "kernels"])
def test_producers_checkpoint(folder: Path, kernel: str, tolerance: float) -> None:
    """Exact up to scales, which are stored in float16; kernels of 4 bits round activations to 8 bits, too."""
    check(folder, SCHEME, kernel, tolerance)


def test_the_resolver_takes_it_as_it_is() -> None:
    """Nobody names the format: the checkpoint does."""
    (folder,) = folders(__file__, "mixed")
    resolved, _, _ = resolve(EngineConfig(model=ModelConfig(model=str(folder))))
    chosen = resolved.choice("quantization")
    assert chosen is not None
    assert (chosen.name, "quant_method=quark" in chosen.why) == ("quark", True)
    for component in ("linear:int4", "linear:fp8", "linear:mxfp4"):
        assert resolved.choice("op", component) is not None


def store(weight: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    codes, zeros, scales, worth = fours(weight, 32)
    packed = {"weight": words(codes.T), "weight_zero_point": words(zeros.T), "weight_scale": scales.T.contiguous()}
    return packed, worth


def test_native_experts_run_them(tmp_path: Path) -> None:
    pytest.importorskip("lmkit_model_qwen")
    pytest.importorskip("lmkit_platform_cpu")
    weight = spec("uint4", "per_group", ch_axis=-1, group_size=32, symmetric=False)
    check_experts(tmp_path, SCHEME, config(weight, export=EXPORT | {"pack_method": "order"}), store)


def test_modules_have_what_the_first_rule_says() -> None:
    rules = {"*.k": {"weight": MX}, "m.*": {"weight": FP8}, "*": {"weight": None}, "never": {"weight": INT4}}
    scheme = QuarkScheme.parse(config(INT4, layer_quant_config=rules, exclude=["m.q", "*.gate"]))
    found = [scheme.for_layer(LinearSpec(name, 64, (64,))) for name in ("m.k", "m.v", "other", "m.q", "m.gate")]
    assert [type(fmt) for fmt in found] == [MxFp4, Fp8Format, *[type(None)] * 3]
    with pytest.raises(UnsupportedModel, match="merged"):
        scheme.for_layer(QKV)
    usual = QuarkScheme.parse(config(INT4, exclude=["m.q", "q"]))
    found = [usual.for_layer(LinearSpec(name, 64, (64,))) for name in ("m.q", "m.q.more", "lm_head")]
    assert [type(fmt) for fmt in found] == [type(None), AwqWords, AwqWords]
    assert isinstance(QuarkScheme.parse(config(INT8)).for_layer(PLAIN), ByteRows)


GLOBAL = "global_quant_config"


@pytest.mark.parametrize(
    ("given", "key"),
    [
        (config(spec("fp6_e3m2", "per_group")), f"{GLOBAL}.weight.dtype"),
        (config(spec("int2", "per_group")), f"{GLOBAL}.weight.dtype"),
        (config(spec("int8", "per_group", group_size=32)), f"{GLOBAL}.weight.qscheme"),
        (config(spec("int4", "per_channel", ch_axis=0)), f"{GLOBAL}.weight.qscheme"),
        (config(INT4 | {"group_size": 20}), f"{GLOBAL}.weight.group_size"),
        (config(INT4 | {"ch_axis": 0}), f"{GLOBAL}.weight.ch_axis"),
        (config(INT4 | {"zero_point_type": "float32"}), f"{GLOBAL}.weight.zero_point_type"),
        (config(INT8 | {"ch_axis": 1}), f"{GLOBAL}.weight.ch_axis"),
        (config(FP8 | {"is_dynamic": True}), f"{GLOBAL}.weight.is_dynamic"),
        (config(FP8 | {"symmetric": False}), f"{GLOBAL}.weight.symmetric"),
        (config(MX | {"group_size": 16}), f"{GLOBAL}.weight.group_size"),
        (config(MX | {"scale_format": "e4m3"}), f"{GLOBAL}.weight.scale_format"),
        (config(spec("fp8_e4m3", "per_block", block_size=[128])), f"{GLOBAL}.weight.block_size"),
        (config(FP8 | {"surprise": 1}), f"{GLOBAL}.weight.surprise"),
        (config([FP8, INT4]), f"{GLOBAL}.weight"),
        (config(FP8, 8), f"{GLOBAL}.input_tensors"),
        (config(FP8, spec("fp6_e3m2", "per_group")), f"{GLOBAL}.input_tensors.dtype"),
        (config(FP8) | {GLOBAL: {"weight": FP8, "output_tensors": FP8}}, f"{GLOBAL}.output_tensors"),
        (config(FP8) | {GLOBAL: {"weight": FP8, "bias": FP8}}, f"{GLOBAL}.bias"),
        (config(FP8) | {GLOBAL: 8}, GLOBAL),
        (config(FP8, layer_quant_config={"a b": None}), "layer_quant_config"),
        (config(FP8, layer_quant_config={"*": {"weight": {"dtype": "int3"}}}), "layer_quant_config.*.weight.dtype"),
        (config(FP8, layer_type_quant_config={"Linear": None}), "layer_type_quant_config"),
        (config(FP8, kv_cache_quant_config={"*k_proj": {"output_tensors": FP8}}), "kv_cache_quant_config"),
        (config(FP8, algo_config=[{"name": "rotation"}]), "algo_config"),
        (config(FP8, exclude="lm_head"), "exclude"),
        (config(FP8, exclude=["re:.*"]), "exclude"),
        (config(FP8, export=None), "export"),
        (config(FP8, export=EXPORT | {"weight_format": "fake_quantized"}), "export.weight_format"),
        (config(FP8, export=EXPORT | {"pack_method": "other"}), "export.pack_method"),
        (config(FP8, export=EXPORT | {"kv_cache_group": ["*k_proj"]}), "export.kv_cache_group"),
        (config(FP8, surprise=1), "surprise"),
    ],
)
def test_values_not_understood_are_refused(given: dict[str, Any], key: str) -> None:
    with pytest.raises(UnsupportedModel) as failure:
        QuarkScheme.parse(copy.deepcopy(given))
    assert failure.value.key == f"quantization_config.{key}"


GATE = "model.layers.0.mlp.gate_proj"
NAN = float("nan")


@pytest.mark.parametrize(
    ("name", "key", "value", "error", "match"),
    [
        ("int8", "weight_scale", torch.full((128,), NAN), CheckpointError, r"layers\.0\.mlp\.gate_up: scales"),
        ("int4", "weight_scale", torch.full((2, 128), NAN), CheckpointError, r"layers\.0\.mlp\.gate_up: scales"),
        ("fp8", "weight_scale", torch.tensor(NAN), CheckpointError, r"layers\.0\.mlp\.gate_up: scales"),
        ("fp8_rows", "weight_scale", torch.full((128,), NAN), CheckpointError, r"layers\.0\.mlp\.gate_up: scales"),
        ("mxfp4", "weight_scale", torch.full((128, 2), 255, dtype=torch.uint8), CheckpointError, r"gate_up: scales"),
        ("int4", "weight_zero_point", None, WeightMismatch, r"gate_proj\.qzeros"),
        ("int4", "weight_scale", torch.ones(4, 128), WeightMismatch, r"gate_proj\.scales has shape"),
        ("int8", "weight_scale", torch.ones(64), WeightMismatch, r"gate_proj\.weight_scale has shape"),
        ("int8", "weight", torch.zeros(128, 64), CheckpointError, r"gate_proj\.weight is plain"),
    ],
)
def test_tensors_that_do_not_fit_are_refused_by_name(
    tmp_path: Path, name: str, key: str, value: Any, error: Any, match: str
) -> None:
    (folder,) = folders(__file__, name)
    with pytest.raises(error, match=match):
        load(changed(folder, tmp_path, {f"{GATE}.{key}": value}), SCHEME, REFERENCE)
