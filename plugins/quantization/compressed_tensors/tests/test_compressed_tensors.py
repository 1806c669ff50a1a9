"""compressed-tensors: the kit, files of llmcompressor, and what is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from lmkit.api import CannotSplit, CheckpointError, LinearSpec, UnsupportedModel
from lmkit.config import EngineConfig, ModelConfig
from lmkit.plugins.resolve import resolve
from lmkit_layouts import ByteRows, Fp8Format, NvFp4, PackedRows
from lmkit_layouts.fp4 import unpack_fp4
from lmkit_quantization_compressed_tensors.scheme import CompressedTensorsScheme
from lmkit_quantization_mxfp4.kernel import Fp4Torch
from lmkit_testing import QuantizationConformance
from lmkit_testing.model import drift
from lmkit_testing.produced import FLOAT4, INTEGER, REFERENCE, check, check_rounded, folders, load
from lmkit_testing.steps import ModelDriver
from safetensors.torch import load_file

SCHEME = "lmkit_quantization_compressed_tensors.scheme:CompressedTensorsScheme"
PLAIN = LinearSpec("layers.0.plain", 256, (384,), sources=("m.plain",))
QKV = LinearSpec("layers.0.qkv", 256, (256, 128, 128), True, "column", ("q", "k", "v"), ("m.q", "m.k", "m.v"))
TOKEN = {"num_bits": 8, "strategy": "token", "dynamic": True}


def group(bits: int = 4, size: int | None = 64, kind: str = "int", **more: Any) -> dict[str, Any]:
    """Weights of a group of layers; `size` columns share a scale, None = all of a row."""
    how = {"strategy": "channel"} if size is None else {"strategy": "group", "group_size": size}
    return {"num_bits": bits, "type": kind, "symmetric": True, **how, **more}


def config(weights: Any, form: str = "pack-quantized", **more: Any) -> dict[str, Any]:
    """A configuration of one group; `more` replaces what the group says."""
    groups = {"group_0": {"targets": ["Linear"], "weights": weights, **more}}
    return {"quant_method": "compressed-tensors", "format": form, "config_groups": groups, "ignore": ["lm_head"]}


WHOLE = group(8, None) | {"strategy": "tensor"}
FP8 = group(8, None, "float")
INPUTS = {"input_activations": TOKEN | {"type": "int"}}


class TestIntegers(QuantizationConformance):
    plugin = "quantization:compressed-tensors"
    configs = {
        "int4": config(group()),
        "zeros": config(group(4, 32, symmetric=False)),
        "rows": config(group(4, None, symmetric=False)),
        "two": config(group(2, 128)),
        "three": config(group(3, 32, symmetric=False)),
        "ordered": config(group(4, 64, actorder="group")),
        "int8": config(group(8, None)),
        "w8a8": config(group(8, None), "int-quantized", **INPUTS),
        "w4a8": config(group(4, 32), "int-quantized", **INPUTS),
        "w4a8 rows": config(group(4, None, symmetric=False), "int-quantized", **INPUTS),
        "w8 zeros": config(group(8, None, symmetric=False), "int-quantized"),
        "w8 groups": config(group(8, 64, symmetric=False), "naive-quantized"),
        "w8 tensors": config(WHOLE, "int-quantized"),
        "w8 tensors zeros": config(WHOLE | {"symmetric": False}, "int-quantized"),
    }
    kernels = ("linear_integer_native", "linear_reference")
    layers = (PLAIN, QKV)
    tolerance = {"float32": 2e-2, "bfloat16": 3e-2}  # activations of 8 bits

    def stored(self, fmt, layer, seed=0):
        tensors = super().stored(fmt, layer, seed)
        if isinstance(fmt, PackedRows) and fmt.ordered:
            groups = torch.arange(layer.in_features, dtype=torch.int32) // fmt.group
            mixed = torch.randperm(layer.in_features, generator=torch.Generator().manual_seed(seed))
            tensors["weight_g_idx"] = groups[mixed]
        if isinstance(fmt, ByteRows) and fmt.stored_bits == 4:
            tensors |= {k: t % 16 - 8 for k, t in tensors.items() if t.dtype == torch.int8}
        return tensors


class TestFloats(QuantizationConformance):
    plugin = "quantization:compressed-tensors"
    configs = {
        "fp8": config(FP8, "float-quantized"),
        "fp8 tensors": config(FP8 | {"strategy": "tensor"}, "float-quantized"),
        "fp8 blocks": config(FP8 | {"strategy": "block", "block_structure": [128, 128]}, "naive-quantized"),
    }
    kernels = ("fp8_weights", "linear_reference")

    def stored(self, fmt, layer, seed=0):
        tensors = super().stored(fmt, layer, seed)
        if fmt.block is None and not fmt.rows:
            tensors["weight_scale"] = torch.linspace(0.5, 1.5, len(layer.out_features))
        return tensors


def four(form: str, **more: Any) -> dict[str, Any]:
    """Weights of 4-bit floats, and what else the group says."""
    scale = (
        {"strategy": "tensor_group", "group_size": 16} if form[0] == "n" else {"strategy": "group", "group_size": 32}
    )
    inputs = more.pop("input_activations", None)
    weights = {"num_bits": 4, "type": "float", "symmetric": True, **scale, **more}
    return config(weights, f"{form}-pack-quantized", input_activations=inputs)


LOCAL = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16, "dynamic": "local"}


class TestNvFp4(QuantizationConformance):
    plugin = "quantization:compressed-tensors"
    configs = {
        "weights": four("nvfp4"),
        "activations": four("nvfp4", input_activations=LOCAL, scale_dtype="torch.float8_e4m3fn"),
    }
    kernels = ("fp4_torch", "linear_integer_native", "linear_reference")
    layers = (PLAIN, QKV)
    tolerance = {"float32": 1e-3, "bfloat16": 2e-2}  # native kernels have scales in float16

    def stored(self, fmt, layer, seed=0):
        wholes = torch.linspace(500, 3000, len(layer.out_features))
        return super().stored(fmt, layer, seed) | {"weight_global_scale": wholes}


class TestMxFp4(QuantizationConformance):
    plugin = "quantization:compressed-tensors"
    configs = {"mxfp4": four("mxfp4", scale_dtype="torch.uint8")}
    kernels = ("fp4_torch", "linear_integer_native", "linear_reference")
    layers = (PLAIN, QKV)
    tolerance = {"float32": 1e-4, "bfloat16": 2e-2}  # native kernels round activations to 15 bits

    def stored(self, fmt, layer, seed=0):
        tensors = super().stored(fmt, layer, seed)
        return tensors | {"weight_scale": 120 + tensors["weight_scale"] % 8}


@pytest.mark.parametrize("folder", folders(__file__), ids=lambda folder: folder.name)
@pytest.mark.parametrize(("kernel", "tolerance"), [(REFERENCE, 2e-3), (INTEGER, 8e-2)])
def test_producers_checkpoint(folder: Path, kernel: str, tolerance: float) -> None:
    """Exact up to rounding; integer kernels round activations to 8 bits, too."""
    check(folder, SCHEME, kernel, tolerance)


@pytest.mark.parametrize("name", ["fp8", "fp8_block", "mixed", "static"])
def test_activations_are_rounded_as_the_producer_does(name: str) -> None:
    """Per token, per group of columns, beside other formats; with stored scales, and those of a float8 cache."""
    (folder,) = folders(__file__, name)
    check_rounded(folder, SCHEME, 1e-4, "float8_e4m3fn" if name == "static" else "")


def test_bytes_of_4_bits_and_activations_of_8() -> None:
    """int4 panels, activations rounded as finely as the producer's or finer: near what it computes itself."""
    (folder,) = folders(__file__, "w8a8")
    expected = load_file(folder / "expected.safetensors")
    loaded = load(folder, SCHEME, INTEGER)
    got = ModelDriver(loaded, "float32").run(0, expected["tokens"][0].tolist(), 7)
    packed = [loaded.model.get_submodule(f"layers.0.{name}").packed for name in ("mlp.gate_up", "mlp.down", "attn.qkv")]
    assert [(each.bits, each.planes) for each in packed] == [(4, 1), (4, 1), (8, 1)]
    for name in ("rounded", "logits"):
        assert drift(got, expected[name]) < 4e-2


FOURS = ("nvfp4", "nvfp4_activations", "mxfp4", "mxfp4_activations")


@pytest.mark.parametrize("folder", folders(__file__, *FOURS), ids=lambda folder: folder.name)
def test_producers_4_bit_floats_are_exact(folder: Path) -> None:
    """Where 4 bits are kept, too; integers have scales in float16 and activations of 15 bits, never 4."""
    for kernel, tolerance in ((REFERENCE, 1e-5), (FLOAT4, 1e-5), (INTEGER, 2e-3)):
        check(folder, SCHEME, kernel, tolerance)


def test_mixed_groups_of_the_producer() -> None:
    """The format of each group holds; what the producer ignored is left as it is."""
    (folder,) = folders(__file__, "mixed")
    scheme = CompressedTensorsScheme.parse(json.loads((folder / "config.json").read_text())["quantization_config"])
    names = ("mlp.up_proj", "self_attn.q_proj", "self_attn.o_proj")
    found = [scheme.for_layer(LinearSpec(n, 64, (64,), sources=(f"model.layers.0.{n}",))) for n in names]
    assert isinstance(found[0], PackedRows)
    assert isinstance(found[1], Fp8Format)
    assert found[2] is None


@pytest.mark.parametrize(("name", "quantized"), [("w8a8", False), ("w8_zeros", True)])
def test_the_output_head_is_as_the_producer_left_it(name: str, quantized: bool) -> None:
    (folder,) = folders(__file__, name)
    scheme = CompressedTensorsScheme.parse(json.loads((folder / "config.json").read_text())["quantization_config"])
    assert (scheme.for_layer(LinearSpec("lm_head", 64, (32,), sources=("lm_head",))) is not None) == quantized


@pytest.mark.parametrize(
    ("inputs", "name", "activations"),
    [
        (None, "int8", "float"),
        (TOKEN | {"type": "int"}, "w8a8", "int8"),
        (TOKEN | {"type": "int", "symmetric": False}, "int8", "float"),
        (TOKEN | {"type": "int", "dynamic": False, "strategy": "tensor"}, "int8", "float"),
    ],
)
def test_activations_are_rounded_where_that_is_what_it_is_for(
    inputs: dict[str, Any] | None, name: str, activations: str
) -> None:
    fmt = CompressedTensorsScheme.parse(config(group(8, None), "int-quantized", input_activations=inputs)).for_layer(
        PLAIN
    )
    assert isinstance(fmt, ByteRows)
    assert (fmt.name, fmt.activations) == (name, activations)


@pytest.mark.parametrize(
    ("targets", "bits"),
    [
        ({"four": ["Linear"], "eight": ["re:m.*"]}, 8),
        ({"four": ["m.plain"], "eight": ["re:m.*"]}, 4),
        ({"four": ["re:m.*"], "eight": ["m.other"]}, 4),
        ({"four": ["re:plain"], "eight": ["m"]}, None),  # patterns fit at the beginning, names as a whole
        ({"four": ["re:.*plain"], "eight": ["re:.*[n]$"]}, 8),  # as the producer sorts them
        ({"four": ["LlamaMLP"], "eight": []}, None),
    ],
)
def test_names_come_before_patterns_and_patterns_before_classes(targets: dict[str, list[str]], bits: int) -> None:
    given = config(group())
    sizes = {"four": group(4), "eight": group(8)}
    given["config_groups"] = {key: {"targets": each, "weights": sizes[key]} for key, each in targets.items()}
    for groups in (given["config_groups"], dict(reversed(given["config_groups"].items()))):
        fmt = CompressedTensorsScheme.parse(given | {"config_groups": groups}).for_layer(PLAIN)
        assert fmt is None if bits is None else isinstance(fmt, PackedRows) and fmt.stored_bits == bits


@pytest.mark.parametrize(
    ("ignored", "kept"),
    [(["m.plain"], True), (["re:.*plain$"], True), (["Linear"], True), (["plain", "re:plain", "LlamaMLP"], False)],
)
def test_modules_left_as_they_are(ignored: list[str], kept: bool) -> None:
    scheme = CompressedTensorsScheme.parse(config(group()) | {"ignore": ignored})
    assert (scheme.for_layer(PLAIN) is None) == kept


def test_merged_layers_are_stored_alike() -> None:
    with pytest.raises(UnsupportedModel, match=r"layers\.0\.qkv"):
        CompressedTensorsScheme.parse(config(group()) | {"ignore": ["m.k"]}).for_layer(QKV)


W, G = "config_groups.group_0.weights", "config_groups.group_0"


@pytest.mark.parametrize(
    ("given", "key"),
    [
        (config(group(), "nvfp4-pack-quantized"), f"{W}.type"),
        (config(group(), "mxfp8-quantized"), "format"),
        (config(group(), "mxfp6-pack-quantized"), "format"),
        (four("nvfp4", num_bits=8), f"{W}.num_bits"),
        (four("nvfp4", num_bits=None), f"{W}.num_bits"),
        (four("nvfp4", group_size=32), f"{W}.group_size"),
        (four("nvfp4", strategy="group"), f"{W}.strategy"),
        (four("nvfp4", scale_dtype="torch.uint8"), f"{W}.scale_dtype"),
        (four("nvfp4", symmetric=False), f"{W}.symmetric"),
        (four("mxfp4", group_size=16), f"{W}.group_size"),
        (four("mxfp4", strategy="tensor_group"), f"{W}.strategy"),
        (four("mxfp4", scale_dtype="torch.float8_e4m3fn"), f"{W}.scale_dtype"),
        (four("mxfp4", actorder="group"), f"{W}.actorder"),
        (four("mxfp4", block_structure=[1, 32]), f"{W}.block_structure"),
        (four("mxfp4", surprise=1), f"{W}.surprise"),
        (four("nvfp4", input_activations=LOCAL | {"type": "int"}), f"{G}.input_activations.type"),
        (four("nvfp4", input_activations=LOCAL | {"num_bits": 6}), f"{G}.input_activations.num_bits"),
        (four("nvfp4", input_activations=LOCAL | {"dynamic": "global"}), f"{G}.input_activations.dynamic"),
        (config(group(), "marlin-24"), "format"),
        (config(group(), "mixed-precision"), f"{G}.format"),
        (config(group(), format="mxfp4-pack-quantized"), f"{W}.type"),
        (config(group(), format=["pack-quantized"]), f"{G}.format"),
        (config(group()) | {"kv_cache_scheme": TOKEN}, "kv_cache_scheme.type"),
        (config(group()) | {"kv_cache_scheme": "fp8"}, "kv_cache_scheme"),
        (config(group()) | {"kv_cache_scheme": FP8 | {"strategy": "attn_head"}}, "kv_cache_scheme.strategy"),
        (config(group()) | {"kv_cache_scheme": WHOLE | {"type": "float", "dynamic": True}}, "kv_cache_scheme.dynamic"),
        (config(group()) | {"kv_cache_scheme": TOKEN | {"type": "float", "num_bits": 4}}, "kv_cache_scheme.num_bits"),
        (config(group()) | {"transform_config": {"config_groups": {}}}, "transform_config"),
        (config(group()) | {"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity_config"),
        (config(group()) | {"sparsity_config": "2:4"}, "sparsity_config"),
        (config(group()) | {"config_groups": {}}, "config_groups"),
        (config(group()) | {"config_groups": {"W4A16": ["Linear"]}}, "config_groups"),
        (config(group()) | {"config_groups": {str(i): {} for i in range(1000)}}, "config_groups"),
        (config(group()) | {"ignore": "lm_head"}, "ignore"),
        (config(group()) | {"ignore": ["x"] * 10_001}, "ignore"),
        (config(group()) | {"ignore": ["re:x"] * 101}, "ignore"),
        (config(group()) | {"ignore": ["a b"]}, "ignore"),
        (config(group()) | {"ignore": [1]}, "ignore"),
        (config(group()) | {"ignore": ["re:("]}, "ignore"),
        (config(group(), targets=["re:" + "a" * 501]), f"{G}.targets"),
        (config(group(), targets=["Linear", "Embedding"]), f"{G}.targets"),
        (config(group(), output_activations=TOKEN), f"{G}.output_activations"),
        (config(group(), input_activations=TOKEN | {"num_bits": 4}), f"{G}.input_activations.num_bits"),
        (config(group(), input_activations=TOKEN | {"dynamic": "local"}), f"{G}.input_activations.dynamic"),
        (config(group(), input_activations=8), f"{G}.input_activations"),
        (config([]), f"{G}.weights"),
        (config(group(), surprise=1), f"{G}.surprise"),
        (config(group(5)), f"{W}.num_bits"),
        (config(group(3), "int-quantized"), f"{W}.num_bits"),
        (config(group(4, None, "float"), "float-quantized"), f"{W}.num_bits"),
        (config(group(kind="float")), f"{W}.type"),
        (config(group(actorder="sideways")), f"{W}.actorder"),
        (config(group(actorder=True)), f"{W}.actorder"),
        (config(group(symmetric=1)), f"{W}.symmetric"),
        (config(group(dynamic=True)), f"{W}.dynamic"),
        (config(group(4, 12)), f"{W}.group_size"),
        (config(group(4, 10**30 + 1)), f"{W}.group_size"),
        (config(group(4, None, group_size=32)), f"{W}.group_size"),
        (config(group(4, None) | {"strategy": "tensor"}), f"{W}.strategy"),
        (config(group(4, None) | {"strategy": None}), f"{W}.strategy"),
        (config(group(scale_dtype="torch.uint8")), f"{W}.scale_dtype"),
        (config(FP8 | {"strategy": "block"}, "float-quantized"), f"{W}.block_structure"),
        (config(FP8 | {"strategy": "block", "block_structure": [0, 8]}, "float-quantized"), f"{W}.block_structure"),
        (config(FP8 | {"block_structure": [8, 8]}, "float-quantized"), f"{W}.block_structure"),
    ],
)  # fmt: skip
def test_values_not_understood_are_refused(given: dict[str, Any], key: str) -> None:
    with pytest.raises(UnsupportedModel) as failure:
        CompressedTensorsScheme.parse(given)
    assert failure.value.key == f"quantization_config.{key}"


def paths(value: Any) -> list[tuple[Any, ...]]:
    """Where values lie in what JSON holds."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [()] + [(key, *rest) for key, each in items for rest in paths(each)]


def replaced(value: Any, path: tuple[Any, ...], by: object) -> Any:
    if not path:
        return by
    copy = dict(value) if isinstance(value, dict) else list(value)
    copy[path[0]] = replaced(value[path[0]], path[1:], by)
    return copy


LONG = ("x" * 10_000, ["re:a"] * 200, ["x"] * 10_001)
HOSTILE = (None, True, -1, 2**70, float("nan"), "", "re:", "re:(?R", [], [[]], {}, {"": {}}, {"x": 1}, *LONG)


@pytest.mark.parametrize("name", ["static", "fp8_block", "mixed", "mxfp4_activations"])
def test_whatever_stands_anywhere_is_understood_or_refused(name: str) -> None:
    """Every value of a real configuration, replaced by others, one at a time: the refusal names it, in few words."""
    (folder,) = folders(__file__, name)
    given = json.loads((folder / "config.json").read_text())["quantization_config"]
    layers = (PLAIN, replace(PLAIN, sources=("model.layers.0.mlp.down_proj",)))
    refused: list[UnsupportedModel] = []
    for changed in (replaced(given, path, value) for path in paths(given)[1:] for value in HOSTILE):
        try:
            scheme = CompressedTensorsScheme.parse(changed)
            for fmt, layer in ((scheme.for_layer(layer), layer) for layer in layers):
                assert fmt is None or fmt.params(layer, "float32")
        except UnsupportedModel as refusal:
            refused.append(refusal)
    assert len(refused) > 300
    for refusal in refused:
        assert refusal.key.startswith("quantization_config.")
        assert len(str(refusal)) < 1000


def test_a_pattern_that_takes_for_ever_is_refused() -> None:
    scheme = CompressedTensorsScheme.parse(config(group(), targets=[r"re:(a|aa)+$"]))
    with pytest.raises(UnsupportedModel, match="quick to match"):
        scheme.for_layer(LinearSpec("x", 64, (64,), sources=("a" * 60 + ".b",)))


def test_sizes_that_do_not_divide_are_named() -> None:
    zeros = group(4, 32, symmetric=False)
    for what, layer in (
        ("columns", LinearSpec("layers.1.up", 68, (64,))),
        ("rows", LinearSpec("layers.1.up", 64, (68,))),
    ):
        fmt = CompressedTensorsScheme.parse(config(zeros)).for_layer(layer)
        assert fmt is not None
        with pytest.raises(UnsupportedModel, match=rf"{what} of layers\.1\.up"):
            fmt.params(layer, "float32")


def test_groups_do_not_straddle_ranks() -> None:
    whole, part = LinearSpec("o", 192, (64,)), LinearSpec("o", 96, (64,))
    for weights in (group(), group(actorder="group")):
        fmt = CompressedTensorsScheme.parse(config(weights)).for_layer(whole)
        assert fmt is not None
        with pytest.raises(CannotSplit, match="two ranks"):
            fmt.params(part, "float32")


@pytest.mark.parametrize(
    ("given", "change", "match"),
    [
        (config(group()), {"weight_shape": torch.tensor([256, 384])}, "weight_shape"),
        (config(group()), {"weight_scale": torch.full((384, 4), float("nan"))}, "not numbers"),
        (config(group()), {"weight_scale": torch.full((384, 4), 1e6)}, "too large"),
        (config(group()), {"weight_g_idx": torch.zeros(256, dtype=torch.int32)}, "g_idx"),
        (config(group(actorder="group")), {"weight_g_idx": torch.zeros(256, dtype=torch.int32)}, "g_idx"),
        (config(group(8, None), "int-quantized"), {"weight_scale": torch.full((384, 1), float("inf"))}, "not numbers"),
        (config(FP8, "float-quantized"), {"weight_scale": torch.full((384, 1), float("nan"))}, "not numbers"),
        (config(group(), "int-quantized"), {"weight": torch.full((384, 256), 8, dtype=torch.int8)}, "none of 4 bits"),
    ],
)
def test_tensors_that_cannot_be_are_refused(given: dict[str, Any], change: dict[str, Any], match: str) -> None:
    fmt = CompressedTensorsScheme.parse(given).for_layer(PLAIN)
    assert fmt is not None
    params = TestIntegers().stored(fmt, PLAIN) | change
    with pytest.raises(CheckpointError, match=match):
        fmt.dequantize(params, torch.float32)


@pytest.mark.parametrize(
    ("key", "value", "match"),
    [
        ("weight_scale", "nan", "not numbers"),
        ("weight_global_scale", "nan", "weight_global_scale is nan"),
        ("weight_global_scale", "inf", "weight_global_scale is inf"),
        ("weight_global_scale", "0", "weight_global_scale is 0"),
        ("weight_global_scale", "-1", "weight_global_scale is -1"),
        ("weight_global_scale", "1e-38", "weight_global_scale is 1e-38"),
    ],
)
def test_scales_of_4_bit_floats_that_cannot_be_are_refused(key: str, value: str, match: str) -> None:
    fmt = CompressedTensorsScheme.parse(four("nvfp4")).for_layer(PLAIN)
    assert isinstance(fmt, NvFp4)
    params = TestNvFp4().stored(fmt, PLAIN)
    params[key] = torch.full(params[key].shape, float(value)).to(params[key].dtype)
    with pytest.raises(CheckpointError, match=match):
        fmt.dequantize(params, torch.float32)
    with pytest.raises(CheckpointError, match=match):
        Fp4Torch().pack(fmt, params, PLAIN, torch.float32)


@pytest.mark.parametrize(("whole", "match"), [(1e-5, "no float16"), (2e7, "few digits")])
def test_scales_that_are_no_float16_run_where_4_bits_are_kept(whole: float, match: str) -> None:
    fmt = CompressedTensorsScheme.parse(four("nvfp4")).for_layer(PLAIN)
    assert isinstance(fmt, NvFp4)
    params = TestNvFp4().stored(fmt, PLAIN) | {"weight_global_scale": torch.tensor([whole])}
    assert fmt.dequantize(params, torch.float32).isfinite().all()
    with pytest.raises(CheckpointError, match=match) as failure:
        fmt.integers(params)
    assert "--op fp4_torch" in str(failure.value.fix)


def test_merged_parts_have_their_own_number() -> None:
    """Scales are divided by it, and the weight is rounded once."""
    fmt = CompressedTensorsScheme.parse(four("nvfp4")).for_layer(QKV)
    assert isinstance(fmt, NvFp4)
    params = TestNvFp4().stored(fmt, QKV)
    whole = params["weight_global_scale"].double().repeat_interleave(torch.tensor([256, 128, 128]))[:, None]
    scales = params["weight_scale"].double().repeat_interleave(16, 1)
    expected = unpack_fp4(params["weight_packed"]).double() * scales / whole
    assert torch.equal(fmt.dequantize(params, torch.float32), expected.float())


def test_columns_out_of_order_have_the_scale_of_their_group() -> None:
    fmt = CompressedTensorsScheme.parse(config(group(actorder="group"))).for_layer(PLAIN)
    assert isinstance(fmt, PackedRows)
    params = TestIntegers().stored(fmt, PLAIN)
    codes = params["weight_packed"].view(torch.uint8).to(torch.int64)
    codes = torch.stack([codes & 15, codes >> 4], -1).flatten(1)
    scales = params["weight_scale"].half().float()[:, params["weight_g_idx"].long()]
    assert torch.equal(fmt.dequantize(params, torch.float32), (codes - 8).float() * scales)


@pytest.mark.parametrize(("scale", "columns"), [("channel", 256), ("tensor", 256), ("group", 64)])
def test_bytes_have_their_zero_and_scale(scale: str, columns: int) -> None:
    """(weight - zero) * scale, of each merged part where that is what a scale is for."""
    weights = group(8, None, symmetric=False) | {"strategy": scale} | ({"group_size": 64} if scale == "group" else {})
    fmt = CompressedTensorsScheme.parse(config(weights, "int-quantized")).for_layer(QKV)
    assert isinstance(fmt, ByteRows)
    params = TestIntegers().stored(fmt, QKV)
    scales, zeros = params["weight_scale"].half().float(), params["weight_zero_point"].float()
    if scale == "tensor":
        scales, zeros = (t.repeat_interleave(torch.tensor([256, 128, 128]))[:, None] for t in (scales, zeros))
    scales, zeros = (t.repeat_interleave(columns, 1) for t in (scales, zeros))
    assert torch.equal(fmt.dequantize(params, torch.float32), (params["weight"].float() - zeros) * scales)


@pytest.mark.parametrize("name", ["w4", "w8a8", "mixed"])
def test_the_resolver_takes_it_as_it_is(name: str) -> None:
    """Nobody names the format: the checkpoint does, and integer kernels come first for it."""
    pytest.importorskip("lmkit_platform_cpu")
    (folder,) = folders(__file__, name)
    resolved, _, _ = resolve(EngineConfig(model=ModelConfig(model=str(folder))))
    chosen = resolved.choice("quantization")
    assert chosen is not None
    assert (chosen.name, "quant_method=compressed-tensors" in chosen.why) == ("compressed-tensors", True)
    for component in ("linear:int4", "linear:int8", "linear:w8a8"):
        first = resolved.choice("op", component)
        assert first is not None
        assert first.name in ("linear_integer_native", "linear_reference")
