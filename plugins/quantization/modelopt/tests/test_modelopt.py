"""ModelOpt: the kit, files of its export, a mixture, and what is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lmkit.api import CheckpointError, LinearSpec, UnsupportedModel, WeightMismatch
from lmkit.config import EngineConfig, ModelConfig
from lmkit.plugins.resolve import resolve
from lmkit_layouts import Fp8Format, NvFp4
from lmkit_layouts.fp4 import TWICE
from lmkit_quantization_modelopt.scheme import ModelOptScheme
from lmkit_testing import QuantizationConformance, produced
from lmkit_testing.checkpoints import tiny_checkpoint
from lmkit_testing.model import choice, deviation, drift, load_tiny, prompt, reference
from lmkit_testing.produced import FLOAT4, INTEGER, REFERENCE, check, check_rounded, folders, in_own_file
from lmkit_testing.steps import ModelDriver, Ranks
from lmkit_worker.loaded import LoadedModel
from safetensors.torch import load_file, save_file
from torch import Tensor

SCHEME = "lmkit_quantization_modelopt.scheme:ModelOptScheme"
PLAIN = LinearSpec("layers.0.plain", 256, (384,), sources=("m.plain",))
QKV = LinearSpec("layers.0.qkv", 256, (256, 128, 128), True, "column", ("q", "k", "v"), ("m.q", "m.k", "m.v"))
PRODUCER = {"name": "modelopt", "version": "0.47.0"}
FP8 = {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["lm_head"], "producer": PRODUCER}
NVFP4 = FP8 | {"quant_algo": "NVFP4", "group_size": 16}
OWN = {
    "quant_method": "modelopt",
    "producer": PRODUCER,
    "quantization": {
        "quant_algo": "NVFP4", "kv_cache_quant_algo": None, "group_size": 16, "exclude_modules": ["lm_head"],
    },
}  # fmt: skip
LAYERS = {"m.plain": {"quant_algo": "NVFP4", "group_size": 16}, **{f"m.{p}": {"quant_algo": "FP8"} for p in "qkv"}}
MIXED = {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": LAYERS, "ignore": []}


class TestFp8(QuantizationConformance):
    plugin = "quantization:modelopt"
    configs = {"fp8": FP8}
    kernels = ("fp8_weights", "linear_reference")
    layers = (PLAIN, QKV)

    def stored(self, fmt, layer, seed=0):
        return super().stored(fmt, layer, seed) | {"weight_scale": torch.linspace(0.5, 1.5, len(layer.out_features))}


class TestNvFp4(QuantizationConformance):
    plugin = "quantization:modelopt"
    configs = {"nvfp4": NVFP4, "its own form": OWN, "weights": NVFP4 | {"quant_algo": "W4A16_NVFP4"}}
    kernels = ("fp4_torch", "linear_integer_native", "linear_reference")
    layers = (PLAIN, QKV)
    tolerance = {"float32": 1e-3, "bfloat16": 2e-2}  # native kernels have scales in float16

    def stored(self, fmt, layer, seed=0):
        return super().stored(fmt, layer, seed) | {"weight_scale_2": torch.linspace(0.5, 1.5, len(layer.out_features))}


@pytest.mark.parametrize("folder", folders(__file__), ids=lambda folder: folder.name)
@pytest.mark.parametrize(("kernel", "tolerance"), [(REFERENCE, 1e-5), (INTEGER, 2e-3)], ids=["reference", "kernels"])
def test_producers_checkpoint(folder: Path, kernel: str, tolerance: float) -> None:
    """Weights are exact, and activations are not rounded.

    Native kernels have scales in float16, and activations of 15 bits.
    """
    check(folder, SCHEME, kernel, tolerance)


def test_activations_and_cache_of_float8() -> None:
    """Activations are rounded as the producer does; scales of the cache are found under its names."""
    (folder,) = folders(__file__, "modelopt_fp8")
    check_rounded(folder, SCHEME, 1e-4)
    loaded = produced.load(folder, SCHEME, REFERENCE, cache="float8_e4m3fn")
    attention = loaded.model.get_submodule("layers.0.attn.attn")
    stored = load_file(folder / "model.safetensors")
    assert attention.scales == tuple(float(stored[f"model.layers.0.self_attn.{n}_proj.{n}_scale"]) for n in "kv")


@pytest.mark.parametrize("folder", folders(__file__), ids=lambda folder: folder.name)
def test_both_files_of_the_producer_say_the_same(folder: Path) -> None:
    given = json.loads((folder / "config.json").read_text())["quantization_config"]
    own = json.loads((folder / "hf_quant_config.json").read_text()) | {"quant_method": "modelopt"}
    assert ModelOptScheme.parse(given) == ModelOptScheme.parse(own)


def test_mixed_precision_of_the_producer() -> None:
    (folder,) = folders(__file__, "modelopt_mixed")
    scheme = ModelOptScheme.parse(json.loads((folder / "config.json").read_text())["quantization_config"])
    names = ("mlp.up_proj", "self_attn.q_proj", "self_attn.o_proj")
    found = [scheme.for_layer(LinearSpec(n, 64, (64,), sources=(f"model.layers.0.{n}",))) for n in names]
    assert isinstance(found[0], NvFp4)
    assert isinstance(found[1], Fp8Format)
    assert found[2] is None


@pytest.mark.parametrize(
    ("excluded", "plain"),
    [
        (["m.plain"], True),
        (["m*"], True),
        (["*.plain"], True),
        (["m.pl*n"], True),
        (["m.plai", "other*", "m.plain.x"], False),
        ([], False),
    ],
)
def test_modules_left_as_they_are(excluded: list[str], plain: bool) -> None:
    for given in (NVFP4 | {"ignore": excluded}, NVFP4 | {"exclude_modules": excluded, "ignore": None}):
        assert (ModelOptScheme.parse(given).for_layer(PLAIN) is None) == plain


def test_merged_layers_are_stored_alike() -> None:
    with pytest.raises(UnsupportedModel, match=r"layers\.0\.qkv"):
        ModelOptScheme.parse(NVFP4 | {"ignore": ["m.k"]}).for_layer(QKV)


def own(**change: Any) -> dict[str, Any]:
    return OWN | {"quantization": OWN["quantization"] | change}  # type: ignore[operator]


@pytest.mark.parametrize(
    ("given", "key"),
    [
        (FP8 | {"quant_algo": "W4A8_AWQ"}, "quant_algo"),
        (FP8 | {"quant_algo": None}, "quant_algo"),
        (FP8 | {"kv_cache_scheme": {"num_bits": 4, "type": "float", "dynamic": False}}, "kv_cache_scheme.num_bits"),
        (FP8 | {"kv_cache_scheme": "NVFP4"}, "kv_cache_scheme"),
        (FP8 | {"kv_cache_quant_algo": "INT8"}, "kv_cache_quant_algo"),
        (NVFP4 | {"group_size": 32}, "group_size"),
        (NVFP4 | {"ignore": ["a[b]"]}, "ignore"),
        (NVFP4 | {"pre_quant_scale": True}, "pre_quant_scale"),
        (NVFP4 | {"has_zero_point": True}, "has_zero_point"),
        (NVFP4 | {"quantized_layers": LAYERS}, "quantized_layers"),
        (own(kv_cache_quant_algo="NVFP4"), "quantization.kv_cache_quant_algo"),
        (own(exclude_modules="lm_head"), "quantization.exclude_modules"),
        (own(quant_algo="NVFP4_SVD"), "quantization.quant_algo"),
        (own(surprise=1), "quantization.surprise"),
        (OWN | {"surprise": 1}, "surprise"),
        (OWN | {"quant_algo": "FP8"}, "quant_algo"),
        (OWN | {"quantization": "FP8"}, "quantization"),
        (MIXED | {"quantized_layers": {}}, "quantized_layers"),
        (MIXED | {"quantized_layers": {"a b": {"quant_algo": "FP8"}}}, "quantized_layers"),
        (MIXED | {"quantized_layers": {"a": "FP8"}}, "quantized_layers"),
        (MIXED | {"quantized_layers": {"a": {"quant_algo": "W8A16"}}}, "quantized_layers.a.quant_algo"),
        (MIXED | {"quantized_layers": {"a": {"quant_algo": "FP8", "bits": 8}}}, "quantized_layers.a.bits"),
        (MIXED | {"quantized_layers": {"a": LAYERS["m.plain"] | {"group_size": 8}}}, "quantized_layers.a.group_size"),
    ],
)  # fmt: skip
def test_values_not_understood_are_refused(given: dict[str, Any], key: str) -> None:
    with pytest.raises(UnsupportedModel) as failure:
        ModelOptScheme.parse(given)
    assert failure.value.key == f"quantization_config.{key}"


def test_the_resolver_takes_it_as_it_is() -> None:
    """Nobody names the format: the checkpoint does."""
    (folder,) = folders(__file__, "modelopt_mixed")
    resolved, _, _ = resolve(EngineConfig(model=ModelConfig(model=str(folder))))
    chosen = resolved.choice("quantization")
    assert chosen is not None
    assert (chosen.name, "quant_method=modelopt" in chosen.why) == ("modelopt", True)
    for component, kernel in (("linear:fp8", "fp8_torch"), ("linear:nvfp4", "linear_integer_native")):
        first = resolved.choice("op", component)
        assert first is not None
        assert first.name in (kernel, "fp4_torch")


def test_a_file_beside_the_configuration_is_enough(tmp_path: Path) -> None:
    """As it is published: nothing in config.json."""
    (folder,) = folders(__file__, "modelopt_nvfp4")
    own = json.loads((folder / "hf_quant_config.json").read_text())
    resolved, checkpoint, _ = resolve(
        EngineConfig(model=ModelConfig(model=str(in_own_file(folder, tmp_path, "hf_quant_config.json", own))))
    )
    chosen = resolved.choice("quantization")
    assert chosen is not None
    assert chosen.name == "modelopt"
    said = json.loads((folder / "config.json").read_text())["quantization_config"]
    assert ModelOptScheme.parse(checkpoint.config["quantization_config"]) == ModelOptScheme.parse(said)


# ---------------------------------------------------------------------------------------------------- a mixture

QWEN = "lmkit_model_qwen.arch:Qwen"
SIZES = {
    "hidden_size": 64, "intermediate_size": 64, "moe_intermediate_size": 64, "num_attention_heads": 4, "head_dim": 16,
    "num_experts": 4, "num_experts_per_tok": 2, "norm_topk_prob": True,
}  # fmt: skip
EXPERTS = NVFP4 | {"ignore": ["lm_head", "*.mlp.gate", "model.layers.0.self_attn*"]}


def store(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """What a checkpoint has of `weight`, and what it is worth: by the steps of the producer's `NVFP4QTensor`."""
    whole = weight.abs().max() / (6 * 448)
    groups = weight.unflatten(1, (-1, 16))
    scales = (groups.abs().amax(-1) / 6 / whole).clamp(2**-9, 448).to(torch.float8_e4m3fn)
    steps = (scales.float() * whole)[..., None]
    numbers = torch.tensor(TWICE) / 2
    codes = ((groups / steps)[..., None] - numbers).abs().argmin(-1).to(torch.uint8)
    worth = (numbers[codes.long()] * steps).flatten(1)
    codes = codes.flatten(1)
    packed = codes[:, ::2] | codes[:, 1::2] << 4
    return {"weight": packed, "weight_scale": scales, "weight_scale_2": whole, "input_scale": torch.tensor(0.5)}, worth


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """(quantized, dequantized)"""
    pytest.importorskip("lmkit_model_qwen")
    plain = tiny_checkpoint("Qwen3MoeForCausalLM", tmp_path_factory.mktemp("plain"), **SIZES)
    quantized = tmp_path_factory.mktemp("quantized")
    stored: dict[str, Tensor] = {}
    worth: dict[str, Tensor] = {}
    for name, tensor in load_file(plain / "model.safetensors").items():
        stored[name] = worth[name] = tensor
        if name.endswith("_proj.weight") and "layers.0.self_attn" not in name:
            tensors, worth[name] = store(stored.pop(name).float())
            stored |= {name.removesuffix("weight") + key: value for key, value in tensors.items()}
    save_file(worth, plain / "model.safetensors", {"format": "pt"})
    save_file(stored, quantized / "model.safetensors", {"format": "pt"})
    config = json.loads((plain / "config.json").read_text())
    (quantized / "config.json").write_text(json.dumps(config | {"quantization_config": EXPERTS}))
    return quantized, plain


@pytest.fixture(scope="module")
def expected(checkpoints: tuple[Path, Path]) -> Tensor:
    with torch.no_grad():
        return reference(checkpoints[1], "float32")(torch.tensor([prompt(97)])).logits[0]


def load(folder: Path, kernel: str = FLOAT4, experts: str = "", **options: Any) -> LoadedModel:
    chosen = [choice("quantization", SCHEME), choice("op", kernel, "linear:nvfp4")]
    chosen += [choice("op", experts, "moe:nvfp4")] if experts else []
    return load_tiny(folder, QWEN, "float32", choices=tuple(chosen), **options)


def test_experts_keep_4_bits(checkpoints: tuple[Path, Path], expected: Tensor) -> None:
    loaded = load(checkpoints[0])
    assert deviation(ModelDriver(loaded, "float32").run(0, prompt(97), 7), expected) < 1e-4
    numbers = 4 * 2 * 64 * 64
    packed = loaded.model.layers[1].mlp.experts.up.packed
    assert packed.nbytes == numbers // 2 + numbers // 16 + 4 * 2 * 64 * 4  # a float32 for each row


def test_native_experts_run_them(checkpoints: tuple[Path, Path], expected: Tensor) -> None:
    """As integers of 4 bits, looked up in a table, with a float16 per group."""
    pytest.importorskip("lmkit_platform_cpu")
    loaded = load(checkpoints[0], INTEGER, "lmkit_platform_cpu.experts:NativeExperts")
    assert drift(ModelDriver(loaded, "float32").run(0, prompt(97), 7), expected) < 2e-3
    numbers = 4 * 2 * 64 * 64
    assert loaded.model.layers[1].mlp.experts.up.packed.nbytes == numbers // 2 + numbers // 16 * 2


@pytest.mark.parametrize("deals", [1, 2])
def test_two_ranks_equal_one(checkpoints: tuple[Path, Path], expected: Tensor, deals: int) -> None:
    for logits in Ranks(2).logits(partial(load, checkpoints[0], deals=deals), prompt(97)):
        assert deviation(logits, expected) < 1e-4


@pytest.mark.parametrize(
    ("tensor", "value", "error", "match"),
    [
        ("weight_scale_2", torch.tensor(float("nan")), CheckpointError, r"layers\.1\.mlp\.experts\.up: weight_scale_2"),
        ("weight_scale_2", torch.tensor(0.0), CheckpointError, r"layers\.1\.mlp\.experts\.up: weight_scale_2"),
        ("weight_scale", torch.full((64, 4), float("nan")), CheckpointError, r"layers\.1\.mlp\.experts\.up: scales"),
        ("weight_scale", torch.ones(64, 2), WeightMismatch, r"up_proj\.weight_scale has shape"),
        ("weight_scale_2", None, WeightMismatch, r"up_proj\.weight_scale_2"),
    ],
)
def test_scales_that_cannot_be_are_refused_with_their_layer(
    checkpoints: tuple[Path, Path], tmp_path: Path, tensor: str, value: Tensor | None, error: Any, match: str
) -> None:
    tensors = load_file(checkpoints[0] / "model.safetensors")
    name = f"model.layers.1.mlp.experts.2.up_proj.{tensor}"
    dtype = tensors.pop(name).dtype
    changed = tensors if value is None else tensors | {name: value.to(dtype)}
    save_file(changed, tmp_path / "model.safetensors", {"format": "pt"})
    (tmp_path / "config.json").write_bytes((checkpoints[0] / "config.json").read_bytes())
    with pytest.raises(error, match=match):
        load(tmp_path)


def test_sizes_that_do_not_divide_are_named() -> None:
    layer = replace(PLAIN, in_features=40)
    fmt = ModelOptScheme.parse(NVFP4).for_layer(layer)
    assert fmt is not None
    with pytest.raises(UnsupportedModel, match=r"columns of layers\.0\.plain"):
        fmt.params(layer, "float32")
