"""torchao: the kit, its own files, tiles, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from lmkit.api import CheckpointError, LinearSpec, ParamSpec, UnsupportedModel
from lmkit.config import EngineConfig, ModelConfig
from lmkit.plugins.resolve import resolve
from lmkit_layouts import ByteRows, Fp8Format, OffsetRows
from lmkit_quantization_torchao.scheme import TorchaoScheme
from lmkit_quantization_torchao.tensors import TorchaoTensors
from lmkit_testing import QuantizationConformance
from lmkit_testing.produced import INTEGER, REFERENCE, Held, changed, check, check_experts, folders, fours, load, made

SCHEME = "lmkit_quantization_torchao.scheme:TorchaoScheme"
PLAIN = LinearSpec("layers.0.plain", 256, (384,), sources=("m.plain",))
QKV = LinearSpec("layers.0.qkv", 256, (256, 128, 128), True, "column", ("q", "k", "v"), ("m.q", "m.k", "m.v"))
HEAD = LinearSpec("lm_head", 256, (384,), sources=("lm_head",))


def said(kind: str, version: int = 2, **data: object) -> dict[str, Any]:
    return {"_type": kind, "_version": version, "_data": data}


def named(kind: str, name: str) -> dict[str, Any]:
    return {"_type": kind, "_data": name}


def config(default: object, **others: object) -> dict[str, Any]:
    return {"quant_method": "torchao", "quant_type": {"default": default}, **others}


ROW, TENSOR, GROUP = said("PerRow", 1, dim=-1), said("PerTensor", 1), said("PerGroup", 1, group_size=32)
PACKING = {"int4_packing_format": named("Int4PackingFormat", "PLAIN"), "int4_tile_packed_ntile": 8}
TILES = {"int4_packing_format": named("Int4PackingFormat", "TILE_PACKED_TO_4D")}
INT4 = said("Int4WeightOnlyConfig", group_size=64, **PACKING)
INT8 = said("Int8WeightOnlyConfig", granularity=GROUP, group_size=None, set_inductor_config=True)
FOUR = said("IntxWeightOnlyConfig", granularity=GROUP, weight_dtype=named("torch.dtype", "int4"))
FLOAT8 = said("Float8WeightOnlyConfig", granularity=ROW)
BOTH = said("Float8DynamicActivationFloat8WeightConfig", granularity=[TENSOR, TENSOR])


class TestIntegers(QuantizationConformance):
    plugin = "quantization:torchao"
    configs = {
        "int4": config(INT4),
        "int8": config(INT8),
        "rows of 4 bits": config(FOUR),
        "w8a8": config(said("Int8DynamicActivationInt8WeightConfig", granularity=[ROW, TENSOR])),
    }
    kernels = ("linear_integer_native", "linear_reference")
    layers = (PLAIN, QKV)
    tolerance = {"float32": 2e-2, "bfloat16": 3e-2}  # activations of 8 bits

    def stored(self, fmt, layer, seed=0):
        found = super().stored(fmt, layer, seed)
        if isinstance(fmt, ByteRows) and fmt.stored_bits == 4:
            found = {key: t if t.is_floating_point() else t >> 4 for key, t in found.items()}
        return found


class TestFloat8(QuantizationConformance):
    plugin = "quantization:torchao"
    configs = {
        "rows": config(FLOAT8),
        "groups": config(said("Float8WeightOnlyConfig", granularity=GROUP)),
        "blocks": config(BOTH | {"_data": {"granularity": [GROUP, said("PerBlock", 1, block_size=[128, 128])]}}),
    }
    kernels = ("fp8_torch", "linear_reference")
    layers = (PLAIN, QKV)


@pytest.mark.parametrize("folder", folders(__file__), ids=lambda folder: folder.name)
@pytest.mark.parametrize(("kernel", "tolerance"), [(REFERENCE, 2e-3), (INTEGER, 8e-2)], ids=["reference", "kernels"])
def test_producers_checkpoint(folder: Path, kernel: str, tolerance: float) -> None:
    """Exact up to scales, which are stored in float16; kernels of 4 bits round activations to 8 bits, too."""
    check(folder, SCHEME, kernel, tolerance)


def test_the_resolver_takes_it_as_it_is() -> None:
    """Nobody names the format: the checkpoint does."""
    (folder,) = folders(__file__, "int4")
    resolved, _, _ = resolve(EngineConfig(model=ModelConfig(model=str(folder))))
    chosen, kernel = resolved.choice("quantization"), resolved.choice("op", "linear:int4")
    assert chosen is not None
    assert kernel is not None
    assert (chosen.name, "quant_method=torchao" in chosen.why) == ("torchao", True)
    assert kernel.name in ("linear_integer_native", "linear_reference")


def store(weight: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    codes, zeros, scales, worth = fours(weight, 32)
    packed = (codes[:, ::2] | codes[:, 1::2] << 4).to(torch.uint8) ^ 0x88
    zero = (8 - zeros) * scales.float()
    tensors = {"qdata": packed.view(torch.int8), "scale": scales.float().T, "zero_point": zero.T}
    return {f"_weight_{key}": tensor.contiguous() for key, tensor in tensors.items()}, worth


def test_native_experts_run_them(tmp_path: Path) -> None:
    pytest.importorskip("lmkit_model_qwen")
    pytest.importorskip("lmkit_platform_cpu")
    check_experts(tmp_path, SCHEME, config(said("Int4WeightOnlyConfig", group_size=32, **PACKING)), store)


# ------------------------------------------------------------------------------------------------------- tiles


def tiles(codes: torch.Tensor) -> torch.Tensor:
    """By the steps of `matrix_to_m16n8k16_Bint4_layout<8>`, one lane at a time; bytes have the even column on top."""
    n, k = codes.shape
    data = (codes[:, ::2] << 4 | codes[:, 1::2]).tolist()
    out = torch.zeros(n // 8, k // 128, 32, 4, dtype=torch.int64)
    for tile in range(n // 8):
        for outer in range(k // 128):
            for lane in range(32):
                row = data[tile * 8 + lane // 4]
                for inner in range(0, 8, 2):
                    base = (outer * 8 + inner) * 8
                    at = [base + lane % 4, base + lane % 4 + 4, base + 8 + lane % 4, base + 8 + lane % 4 + 4]
                    v = [row[i] for i in at]
                    high = sum((byte & 15) << 16 + 4 * i for i, byte in enumerate(v))
                    low = sum((byte >> 4) << 4 * i for i, byte in enumerate(v))
                    out[tile, outer, lane, inner // 2] = high | low
    return torch.where(out >= 1 << 31, out - (1 << 32), out).to(torch.int32)


def test_tiles_are_rows() -> None:
    """Vectors by hand, since only GPUs make tiles: codes and numbers are those that were put there."""
    noise = torch.Generator().manual_seed(0)
    rows, columns, group = 16, 192, 64
    codes = torch.zeros(rows, 1024, dtype=torch.uint8)
    codes[:, :columns] = torch.randint(0, 16, (rows, columns), generator=noise)
    both = torch.randn(1024 // group, rows, 2, generator=noise).bfloat16()
    scheme = TorchaoScheme.parse(config(INT4 | {"_data": {"group_size": group, **TILES}}))
    fmt = scheme.for_layer(LinearSpec("m.up", columns, (rows,)))
    assert isinstance(fmt, OffsetRows)
    scales, zeros = (both[: columns // group, :, i].float().t().repeat_interleave(group, 1) for i in (0, 1))
    weight = (codes[:, :columns].float() - 8) * scales + zeros  # as tinygemm has it
    held = Held({"m.up._weight_qdata": tiles(codes), "m.up._weight_scale_and_zero": both})
    wanted = ParamSpec((rows, columns // 2), "uint8")
    found = made(TorchaoTensors(held, lambda name: wanted, of_module=scheme.of_module))
    stored = {name.removeprefix("m.up."): value for name, value in found.items()}
    assert torch.equal(fmt.dequantize(stored, torch.float32), weight)
    plain = made(TorchaoTensors(held, lambda name: ParamSpec((rows, columns), "float32"), of_module=scheme.of_module))
    assert torch.equal(plain["m.up.weight"], weight)


# ----------------------------------------------------------------------------------------------------- refused


@pytest.mark.parametrize(
    ("default", "key"),
    [
        (said("Int4WeightOnlyConfig", group_size=20), "_data.group_size"),
        (said("Int4WeightOnlyConfig", int4_packing_format=named("X", "PLAIN_INT32")), "_data.int4_packing_format"),
        (said("Int4WeightOnlyConfig", int4_packing_format=named("X", "PRESHUFFLED")), "_data.int4_packing_format"),
        (said("Int4WeightOnlyConfig", int4_tile_packed_ntile=16, **TILES), "_data.int4_tile_packed_ntile"),
        (said("Int4WeightOnlyConfig", 1), "_version"),
        (said("Int4WeightOnlyConfig", surprise=1), "_data.surprise"),
        (said("UIntXWeightOnlyConfig"), "_type"),
        (said("Int8WeightOnlyConfig", granularity=said("PerRow", 1, dim=0)), "_data.granularity"),
        (said("Int8WeightOnlyConfig", granularity=said("PerGroup", 1, group_size=20)), "_data.granularity"),
        (said("Int8WeightOnlyConfig", granularity="PerRow"), "_data.granularity"),
        (said("Int8WeightOnlyConfig", group_size=32), "_data.group_size"),
        (said("IntxWeightOnlyConfig", granularity=said("PerAxis", 1, axis=1)), "_data.granularity"),
        (said("IntxWeightOnlyConfig", weight_dtype=named("torch.dtype", "uint4")), "_data.weight_dtype"),
        (said("IntxWeightOnlyConfig", intx_packing_format=named("X", "OPAQUE_TORCHAO_AUTO")),
         "_data.intx_packing_format"),
        (said("Float8WeightOnlyConfig", weight_dtype=named("torch.dtype", "float8_e5m2")), "_data.weight_dtype"),
        (said("Float8WeightOnlyConfig", granularity=said("PerBlock", 1, block_size=[128])), "_data.granularity"),
        (said("Float8DynamicActivationFloat8WeightConfig", packing_format=named("X", "SPARSE_2D_DATA_2D_METADATA")),
         "_data.packing_format"),
        (said("FqnToConfig", 1, fqn_to_config={"a b": INT8}), "_data.fqn_to_config"),
        (said("FqnToConfig", 1, fqn_to_config=[INT8]), "_data.fqn_to_config"),
        (said("FqnToConfig", 1, fqn_to_config={"re:(": INT8}), "_data.fqn_to_config"),
        (said("FqnToConfig", 1, fqn_to_config={"m": INT8 | {"_version": 1}}), "_data.fqn_to_config.m._version"),
        (said("FqnToConfig", 1, fqn_to_config={"m": INT8}, module_fqn_to_config={"m": FOUR}), "_data.fqn_to_config"),
    ],
)  # fmt: skip
def test_values_not_understood_are_refused(default: object, key: str) -> None:
    with pytest.raises(UnsupportedModel) as failure:
        TorchaoScheme.parse(config(default))
    assert failure.value.key == f"quantization_config.quant_type.default.{key}"


@pytest.mark.parametrize(
    ("given", "key"),
    [
        (config(INT8) | {"quant_type": "int8_weight_only"}, "quant_type"),
        (config("int8_weight_only"), "quant_type.default"),
        (config(INT8, modules_to_not_convert=["a*"]), "modules_to_not_convert"),
        (config(INT8, include_input_output_embeddings=3), "include_input_output_embeddings"),
        (config(INT8, surprise=3), "surprise"),
    ],
)
def test_settings_not_understood_are_refused(given: dict[str, Any], key: str) -> None:
    with pytest.raises(UnsupportedModel) as failure:
        TorchaoScheme.parse(given)
    assert failure.value.key == f"quantization_config.{key}"


@pytest.mark.parametrize(
    ("given", "plain", "head"),
    [
        ({}, True, False),
        ({"modules_to_not_convert": []}, True, True),
        ({"modules_to_not_convert": ["lm_head"]}, True, False),
        ({"modules_to_not_convert": ["plain"]}, False, True),
        ({"modules_to_not_convert": ["m", "lm_head"], "include_input_output_embeddings": True}, False, True),
        ({"modules_to_not_convert": ["m.plai"]}, True, True),
    ],
)
def test_modules_left_as_they_are(given: dict[str, Any], plain: bool, head: bool) -> None:
    scheme = TorchaoScheme.parse(config(INT8, **given))
    found = (scheme.for_layer(PLAIN), scheme.for_layer(HEAD))
    assert [fmt is not None for fmt in found] == [plain, head]


def test_modules_have_what_the_first_rule_says() -> None:
    rules = {"re:m[.].*": FOUR, "m.q": None, "m.k.weight": FLOAT8, "_default": INT8}
    scheme = TorchaoScheme.parse(config(said("FqnToConfig", 1, fqn_to_config=rules)))
    found = [scheme.for_layer(LinearSpec(name, 64, (64,))) for name in ("m.q", "m.k", "m.other", "other.m.v")]
    assert found[0] is None
    assert [type(fmt) for fmt in found[1:]] == [Fp8Format, ByteRows, ByteRows]
    assert [fmt.name for fmt in found[1:] if fmt is not None] == ["fp8", "int4", "int8"]
    with pytest.raises(UnsupportedModel, match="merged"):
        scheme.for_layer(QKV)


@pytest.mark.parametrize(("default", "sizes"), [(INT4, (64, 96)), (BOTH, (64, 72)), (BOTH, (24, 64))])
def test_sizes_that_the_producer_leaves_alone_are_plain(default: Any, sizes: tuple[int, int]) -> None:
    scheme = TorchaoScheme.parse(config(default))
    assert scheme.for_layer(LinearSpec("m.up", sizes[1], (sizes[0],))) is None
    assert scheme.for_layer(LinearSpec("m.up", 64, (64,))) is not None


GATE = "model.layers.0.mlp.gate_proj"
NAN = float("nan")


@pytest.mark.parametrize(
    ("name", "key", "value", "error", "match"),
    [
        ("int8_activations", "_weight_scale", torch.full((128, 1), NAN), CheckpointError, r"mlp\.gate_up: scales"),
        ("int4", "_weight_scale", torch.full((2, 128), NAN), CheckpointError, r"layers\.0\.mlp\.gate_up: scales"),
        ("int4", "_weight_zero_point", torch.full((2, 128), NAN), CheckpointError, r"layers\.0\.mlp\.gate_up: scales"),
        ("float8_tensor", "_weight_scale", torch.full((1, 1), NAN), CheckpointError, r"mlp\.gate_up: scales"),
        ("intx", "_weight_qdata", torch.full((128, 64), 8, dtype=torch.int8), CheckpointError,
         r"layers\.0\.mlp\.gate_up: holds integers that are none of 4 bits"),
        ("int8_activations", "_weight_scale", None, CheckpointError, r"gate_proj\._weight_scale is missing"),
        ("int8_activations", "_weight_qdata", None, CheckpointError, r"gate_proj\._weight_qdata is missing"),
        ("int8_activations", "_weight_scale", torch.ones(128, 2), CheckpointError, r"needs .* \[128, 1\]"),
        ("int8_activations", "_weight_zero_point", torch.zeros(128, 1), CheckpointError, r"_zero_point is float32"),
        ("int8_activations", "_weight_qdata", torch.zeros(128, dtype=torch.int8), CheckpointError, "2 dimensions"),
        ("int8_activations", "_weight_act_pre_scale", torch.ones(64), UnsupportedModel, "_weight_act_pre_scale"),
        ("int4", "_weight_qdata", torch.zeros(128, 64, dtype=torch.int8), CheckpointError, r"needs .* \[4, 128\]"),
        ("int8_activations", "weight", torch.zeros(128, 64), CheckpointError, r"gate_proj\.weight is plain"),
        ("intx", "_weight_scale_and_zero", torch.zeros(1, 1, 2), UnsupportedModel, "_weight_scale_and_zero"),
    ],
)  # fmt: skip
def test_tensors_that_do_not_fit_are_refused_by_name(
    tmp_path: Path, name: str, key: str, value: Any, error: Any, match: str
) -> None:
    (folder,) = folders(__file__, name)
    with pytest.raises(error, match=match):
        load(changed(folder, tmp_path, {f"{GATE}.{key}": value}), SCHEME, REFERENCE)


def test_a_plain_weight_that_nobody_announced_is_refused(tmp_path: Path) -> None:
    (folder,) = folders(__file__, "int8_activations")
    tensors = dict.fromkeys((f"{GATE}._weight_{key}" for key in ("qdata", "scale", "zero_point")), None)
    with pytest.raises(CheckpointError, match=r"mlp\.gate_proj\.weight is plain"):
        load(changed(folder, tmp_path, tensors | {f"{GATE}.weight": torch.zeros(128, 64)}), SCHEME, REFERENCE)


def test_what_is_listed_and_quantized_all_the_same_is_dequantized(tmp_path: Path) -> None:
    """transformers matches ends of names in some versions, and not in others."""
    (folder,) = folders(__file__, "int8_activations")
    target = changed(folder, tmp_path, {})
    given = json.loads((target / "config.json").read_text())
    given["quantization_config"]["modules_to_not_convert"] = ["down_proj", "lm_head"]
    (target / "config.json").write_text(json.dumps(given))
    loaded = load(target, SCHEME, REFERENCE)
    usual = load(folder, SCHEME, REFERENCE)
    x = torch.randn(3, 128, generator=torch.Generator().manual_seed(0))
    expected = usual.model.layers[0].mlp.down(x)
    assert (loaded.model.layers[0].mlp.down(x) - expected).abs().max() < 1e-3 * expected.abs().max()
