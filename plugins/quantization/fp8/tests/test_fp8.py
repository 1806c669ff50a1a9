"""The fp8 format and kernel; a checkpoint quantized by transformers' own operation."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from lmkit.api import CheckpointError, DeviceInfo, LinearSpec, UnsupportedModel, WeightMismatch
from lmkit_layouts import Rounding
from lmkit_quantization_fp8.kernel import SHIFT, Fp8Torch, Fp8Weight, Fp8Weights, widen
from lmkit_quantization_fp8.rounded import RoundedFp8
from lmkit_quantization_fp8.scaled import Fp8ScaledMM
from lmkit_quantization_fp8.scheme import Fp8Format, Fp8Scheme
from lmkit_testing import QuantizationConformance
from lmkit_testing.checkpoints import tiny_checkpoint
from lmkit_testing.model import choice, deviation, load_tiny, prompt, reference
from lmkit_testing.steps import ModelDriver
from safetensors.torch import load_file, save_file

BLOCK = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128], "fmt": "e4m3"}
TENSOR = {"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["lm_head"]}
TARGET = "lmkit_quantization_fp8.scheme:Fp8Scheme"
KERNEL = "lmkit_quantization_fp8.kernel:Fp8Weights"


class TestFp8(QuantizationConformance):
    plugin = "quantization:fp8"
    configs = {"block": BLOCK, "wide": BLOCK | {"weight_block_size": [64, 96]}, "tensor": TENSOR}
    kernels = ("fp8_weights", "linear_reference")

    def stored(self, fmt, layer, seed=0):
        tensors = super().stored(fmt, layer, seed)
        if fmt.block is None:
            tensors["weight_scale"] = torch.linspace(0.5, 1.5, len(layer.out_features))
        return tensors


class TestRounded(QuantizationConformance):
    plugin = "quantization:fp8"
    configs = {"online": {}}
    kernels = ("fp8_weights", "linear_reference")


def test_rounds_to_nearest() -> None:
    """Each row by its own largest, which is exact up to the rounding of its scale; rows of zeros stay so."""
    weight = torch.randn(8, 100, generator=torch.Generator().manual_seed(0)) * torch.logspace(-3, 3, 8)[:, None]
    weight[3] = 0
    fmt = Fp8Scheme.parse({}).for_layer(LinearSpec("up", 100, (8,)))
    assert isinstance(fmt, RoundedFp8)
    found = fmt.dequantize({"weight": weight}, torch.float32)
    largest = weight.abs().amax(1, keepdim=True)
    assert ((found - weight).abs() <= weight.abs() / 16 + largest / 448 * 2**-10).all()
    torch.testing.assert_close(found.abs().amax(1, keepdim=True), largest)


def test_rounding_leaves_the_output_head() -> None:
    assert Fp8Scheme.parse({}).for_layer(LinearSpec("lm_head", 64, (97,))) is None


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_cannot_be_rounded_is_refused(value: float) -> None:
    weight = torch.ones(4, 4)
    weight[1, 2] = value
    with pytest.raises(CheckpointError, match="NaN"):
        Fp8Torch().pack(RoundedFp8(4), {"weight": weight}, LinearSpec("layer.x", 4, (4,)), torch.float32)


LAYER = LinearSpec("qkv", 64, (32, 16, 16), parts=("q", "k", "v"), sources=("a.q_proj", "a.k_proj", "a.v_proj"))


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ({"fmt": "e5m2"}, "fmt"),
        ({"activation_scheme": "none"}, "activation_scheme"),
        ({"weight_block_size": [128]}, "weight_block_size"),
        ({"weight_block_size": [0, 128]}, "weight_block_size"),
        ({"weight_block_size": [True, 128]}, "weight_block_size"),
        ({"modules_to_not_convert": "lm_head"}, "modules_to_not_convert"),
        ({"modules_to_not_convert": ["re:.*gate"]}, "modules_to_not_convert"),
        ({"modules_to_convert": ["model.embed_tokens"]}, "modules_to_convert"),
        ({"kv_cache_scheme": {"num_bits": 8}}, "kv_cache_scheme.type"),
        ({"kv_cache_scheme": "dynamic"}, "kv_cache_scheme"),
        ({"quant_method": "fp4"}, "quant_method"),
    ],
)
def test_values_not_understood_are_refused(change: dict[str, object], key: str) -> None:
    with pytest.raises(UnsupportedModel) as failure:
        Fp8Scheme.parse(BLOCK | change)
    assert failure.value.key == f"quantization_config.{key}"


@pytest.mark.parametrize(
    ("skipped", "plain"),
    [([], False), (["a"], True), (["q_proj", "k_proj", "v_proj"], True), (["proj", "b"], False), (["a.q"], False)],
)
def test_skip_list_names_modules_at_dots(skipped: list[str], plain: bool) -> None:
    scheme = Fp8Scheme.parse(BLOCK | {"modules_to_not_convert": skipped})
    assert (scheme.for_layer(LAYER) is None) == plain


def test_a_merged_layer_is_skipped_whole_or_not_at_all() -> None:
    with pytest.raises(UnsupportedModel):
        Fp8Scheme.parse(BLOCK | {"modules_to_not_convert": ["q_proj"]}).for_layer(LAYER)


def test_output_head_is_never_quantized() -> None:
    assert Fp8Scheme.parse(BLOCK).for_layer(LinearSpec("lm_head", 64, (97,), sources=("lm_head",))) is None


def test_tensor_scales_need_exactly_one_name() -> None:
    fmt = Fp8Format(None, (4,), 4)
    weight = torch.ones(4, 4).to(torch.float8_e4m3fn)
    scale = torch.full((1,), 2.0)
    assert torch.equal(
        fmt.dequantize({"weight": weight, "weight_scale": scale}, torch.float32), torch.full((4, 4), 2.0)
    )
    for params in ({"weight": weight}, {"weight": weight, "weight_scale": scale, "weight_scale_inv": scale}):
        with pytest.raises(CheckpointError):
            fmt.dequantize(params, torch.float32)


def test_widening_is_exact_for_every_number() -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    numbers = codes[(codes & 0x7F) != 0x7F].view(torch.float8_e4m3fn)
    assert torch.equal(widen(numbers) * SHIFT, numbers.float())
    assert torch.equal(widen(numbers).signbit(), numbers.float().signbit())


@pytest.mark.parametrize(
    ("rounding", "dims"),
    [
        (Rounding("stored"), None),
        (Rounding("tensor"), (0, 1, 2, 3)),
        (Rounding("token"), (2, 3)),
        (Rounding("token", powers=True), (2, 3)),
        (Rounding("group", 16), (3,)),
        (Rounding("group", 16, powers=True), (3,)),
        (Rounding("group", 64), (3,)),
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_activations_through_float8(rounding: Rounding, dims: tuple[int, ...] | None, dtype: torch.dtype) -> None:
    """The nearest float8 number of steps, which are 448th parts of the largest magnitude, or stored."""
    noise = torch.Generator().manual_seed(0)
    x = (torch.randn(2, 3, 40, generator=noise) * torch.logspace(-4, 4, 40)).to(dtype)
    x[1, 2] = 0
    got = rounding.apply(x, 3.5)
    assert (got.shape, got.dtype) == (x.shape, dtype)
    width = rounding.group or 40
    values = torch.nn.functional.pad(x.float(), (0, -40 % width)).unflatten(-1, (-1, width))
    steps = values.abs().amax(dims, keepdim=True) / 448 if dims else torch.tensor(3.5)
    steps = steps.clamp(min=torch.finfo(torch.float32).tiny)
    steps = 2 ** steps.log2().ceil() if rounding.powers else steps
    codes = (values / steps).clamp(-448, 448).to(torch.float8_e4m3fn).float()
    expected = (codes * steps).flatten(-2)[..., :40].to(dtype)
    assert torch.equal(got, expected)
    error, most = (got.float() - x.float()).abs(), (steps * 448).expand(values.shape).flatten(-2)[..., :40]
    small = (steps * 2**-10).expand(values.shape).flatten(-2)[..., :40]
    assert bool((error <= x.float().abs() / 15 + small)[x.abs() <= most].all())


def test_scales_of_activations_that_are_stored() -> None:
    """Of merged parts the largest holds; what is missing or no positive number is refused where it is needed."""
    fmt = Fp8Scheme.parse(TENSOR).for_layer(LAYER)
    assert isinstance(fmt, Fp8Format)
    params = TestFp8().stored(fmt, LAYER)
    packed = Fp8Torch().pack(fmt, params | {"input_scale": torch.tensor([0.5, 2.0, 1.0])}, LAYER, torch.float32)
    assert (packed.inputs, packed.input_scale) == (Rounding("stored"), 2.0)
    for bad in (None, 0.0, -1.0, float("nan"), float("inf")):
        scale = {} if bad is None else {"activation_scale": torch.tensor([1.0, bad, 1.0])}
        with pytest.raises(CheckpointError, match="activations") as failure:
            Fp8Torch().pack(fmt, params | scale, LAYER, torch.float32)
        assert "fp8_weights" in str(failure.value.fix)
        assert Fp8Weights().pack(fmt, params | scale, LAYER, torch.float32).inputs is None


@pytest.mark.parametrize(
    ("config", "rounding"),
    [
        (BLOCK, Rounding("group", 128)),
        (BLOCK | {"scale_fmt": "ue8m0"}, Rounding("group", 128, powers=True)),
        (BLOCK | {"activation_scheme": "static"}, Rounding("stored")),
        (BLOCK | {"weight_block_size": None}, Rounding("token")),
        (TENSOR, Rounding("stored")),
    ],
)
def test_activations_are_rounded_as_the_checkpoint_says(config: dict[str, object], rounding: Rounding) -> None:
    fmt = Fp8Scheme.parse(config).for_layer(LAYER)
    assert isinstance(fmt, Fp8Format)
    assert fmt.inputs == rounding
    params = TestFp8().stored(fmt, LAYER) | {"input_scale": torch.tensor([0.02, 0.02, 0.02])}
    x = torch.randn(2, 3, 64, generator=torch.Generator().manual_seed(0))
    exact = Fp8Weights().apply(
        rounding.apply(x, 0.02), Fp8Weights().pack(fmt, dict(params), LAYER, torch.float32), None
    )
    kernel = Fp8Torch()
    assert torch.equal(kernel.apply(x, kernel.pack(fmt, dict(params), LAYER, torch.float32), None), exact)


H200 = DeviceInfo(platform="cuda", device_type="cuda", capability=(9, 0))


@pytest.mark.parametrize(
    "inputs", [Rounding("stored"), Rounding("tensor"), Rounding("token"), Rounding("token", 0, True)]
)
@pytest.mark.parametrize("rows", [False, True])
@pytest.mark.parametrize("biased", [False, True])
def test_products_of_float8(inputs: Rounding, rows: bool, biased: bool) -> None:
    """Those of the portable kernel, which multiplies what both round to."""
    layer = LinearSpec("qkv", 64, (32, 16))
    fmt = Fp8Format(None, (32, 16), 64, rows=rows, inputs=inputs)
    noise = torch.Generator().manual_seed(0)
    scales = torch.rand(48, 1, generator=noise) if rows else torch.rand(2, generator=noise)
    weight = torch.randn(48, 64, generator=noise).to(torch.float8_e4m3fn)
    params = {"weight": weight, "weight_scale": scales, "input_scale": torch.full((2,), 0.01)}
    x = torch.randn(2, 3, 64, generator=noise, dtype=torch.bfloat16)
    bias = torch.randn(48, generator=noise, dtype=torch.bfloat16) if biased else None
    kernel, portable = Fp8ScaledMM(), Fp8Torch()
    assert kernel.can_run(fmt, layer, H200) is None
    found = kernel.apply(x, kernel.pack(fmt, dict(params), layer, torch.bfloat16), bias)
    packed = portable.pack(fmt, dict(params), layer, torch.float32)
    wanted = portable.apply(x.float(), packed, None if bias is None else bias.float())
    assert (found.shape, found.dtype) == (wanted.shape, torch.bfloat16)
    torch.testing.assert_close(found.float(), wanted, rtol=2**-8, atol=2**-8 * float(wanted.abs().max()))


@pytest.mark.parametrize(
    ("fmt", "layer", "device", "reason"),
    [
        (Fp8Format(None, (32,), 64), LinearSpec("up", 64, (32,)), H200, "stay as they are"),
        (RoundedFp8(64), LinearSpec("up", 64, (32,)), H200, "stay as they are"),
        (Fp8Format((128, 128), (32,), 64, inputs=Rounding("token")), LinearSpec("up", 64, (32,)), H200, "blocks"),
        (Fp8Format(None, (32,), 64, inputs=Rounding("group", 16)), LinearSpec("up", 64, (32,)), H200, "blocks"),
        (Fp8Format(None, (33,), 64, inputs=Rounding("token")), LinearSpec("up", 64, (33,)), H200, "33 x 64"),
        (
            Fp8Format(None, (32,), 64, inputs=Rounding("token")),
            LinearSpec("up", 64, (32,)),
            DeviceInfo(platform="cuda", device_type="cuda", capability=(8, 0)),
            "the device has 8.0",
        ),
    ],
)
def test_products_of_float8_that_are_refused(
    fmt: Fp8Format | RoundedFp8, layer: LinearSpec, device: DeviceInfo, reason: str
) -> None:
    assert reason in str(Fp8ScaledMM().can_run(fmt, layer, device))


def test_weights_that_are_not_numbers_are_refused() -> None:
    weight = torch.ones(4, 4)
    weight[1, 2] = float("nan")
    params = {"weight": weight.to(torch.float8_e4m3fn), "weight_scale": torch.ones(1)}
    with pytest.raises(CheckpointError, match="NaN"):
        Fp8Torch().pack(Fp8Format(None, (4,), 4), params, LinearSpec("layer.x", 4, (4,)), torch.float32)


SIZES = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 32,
}


@pytest.fixture(scope="module", params=["block", "powers", "tensor"])
def checkpoints(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """(quantized, dequantized): the first made by the producer's quantize operation, the second by its inverse."""
    fp8 = pytest.importorskip("transformers.integrations.finegrained_fp8")
    from transformers import FineGrainedFP8Config

    block = None if request.param == "tensor" else (64, 64)
    powers = {"scale_fmt": "ue8m0"} if request.param == "powers" else {}  # scales are float8_e8m0fnu
    quantizer = SimpleNamespace(quantization_config=FineGrainedFP8Config(weight_block_size=block, **powers))
    plain = tiny_checkpoint("llama", tmp_path_factory.mktemp("plain"), **SIZES)
    quantized = tmp_path_factory.mktemp("fp8")
    stored, back = {}, {}
    for name, tensor in load_file(plain / "model.safetensors").items():
        if "_proj.weight" not in name:
            stored[name] = back[name] = tensor
            continue
        made = fp8.Fp8Quantize(quantizer)._quantize_one(name, tensor)
        scale_name = name + "_scale_inv"
        if block is None:
            made[scale_name] = made[scale_name].reshape(())  # a number, as the producer's module holds it
            stored[name.removesuffix("weight") + "activation_scale"] = torch.tensor(1.0)
        stored |= made
        scale = made[scale_name].reshape(1, 1) if block is None else made[scale_name]
        back[name] = fp8.Fp8Dequantize(quantizer)._dequantize_one(made[name], scale, torch.float32)
    config = json.loads((plain / "config.json").read_text())
    save_file(back, plain / "model.safetensors", {"format": "pt"})
    save_file(stored, quantized / "model.safetensors", {"format": "pt"})
    quant = json.loads(json.dumps(quantizer.quantization_config.to_dict()))
    (quantized / "config.json").write_text(json.dumps(config | {"quantization_config": quant}))
    return quantized, plain


def load(directory: Path, dtype: str = "float32", kernel: str = KERNEL):
    target = "lmkit_model_llama.arch:Llama"
    pytest.importorskip("lmkit_model_llama")
    chosen = (choice("quantization", TARGET), choice("op", kernel, "linear:fp8"))
    return load_tiny(directory, target, dtype, choices=chosen)


def test_producers_checkpoint(checkpoints: tuple[Path, Path]) -> None:
    """Logits equal those of transformers over the dequantized weights; weights stay in float8."""
    quantized, plain = checkpoints
    ids = prompt(97)
    with torch.no_grad():
        expected = reference(plain, "float32")(torch.tensor([ids])).logits[0]
    loaded = load(quantized)
    assert deviation(ModelDriver(loaded, "float32").run(0, ids, 7), expected) < 1e-4
    packed = loaded.model.layers[0].attn.qkv.packed
    assert isinstance(packed, Fp8Weight)
    assert packed.weight.dtype == torch.float8_e4m3fn
    dense = load(quantized, kernel="lmkit_layers.linear:ReferenceLinear")
    assert deviation(ModelDriver(dense, "float32").run(0, ids, 7), expected) < 1e-4
    assert loaded.weight_bytes < dense.weight_bytes


def test_a_missing_scale_is_named(checkpoints: tuple[Path, Path], tmp_path: Path) -> None:
    quantized, _ = checkpoints
    (tmp_path / "config.json").write_bytes((quantized / "config.json").read_bytes())
    tensors = load_file(quantized / "model.safetensors")
    victim = "model.layers.1.mlp.up_proj.weight_scale_inv"
    del tensors[victim]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(WeightMismatch, match=r"up_proj\.weight_scale_inv"):
        load(tmp_path)


def test_powers_of_two_are_read_from_one_byte(checkpoints: tuple[Path, Path], tmp_path: Path) -> None:
    """What says no number is refused with its layer."""
    quantized, _ = checkpoints
    tensors = load_file(quantized / "model.safetensors")
    victim = "model.layers.1.mlp.down_proj.weight_scale_inv"
    if tensors[victim].dtype != torch.float8_e8m0fnu:
        pytest.skip("other scales")
    assert load(quantized).model.layers[1].mlp.down.packed.scales.dtype == torch.float32
    tensors[victim] = torch.full(tensors[victim].shape, 255, dtype=torch.uint8).view(torch.float8_e8m0fnu)
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_bytes((quantized / "config.json").read_bytes())
    with pytest.raises(CheckpointError, match=r"layers\.1\.mlp\.down: scales"):
        load(tmp_path)


def test_slow_kernels_are_a_warning(checkpoints: tuple[Path, Path]) -> None:
    """One line for all layers, which names the kernel; plain weights have none."""
    quantized, plain = checkpoints
    (warning,) = load(quantized, kernel="lmkit_quantization_fp8.kernel:Fp8Torch").warnings
    assert "more: runs on fp8_torch: it widens float8 weights in every step" in warning
    assert load_tiny(plain, "lmkit_model_llama.arch:Llama", "float32").warnings == ()


def test_without_the_scheme_a_quantized_checkpoint_is_refused(checkpoints: tuple[Path, Path]) -> None:
    with pytest.raises(UnsupportedModel, match="quantization_config"):
        load_tiny(checkpoints[0], "lmkit_model_llama.arch:Llama", "float32")
