"""bitsandbytes: the kit, files of transformers with bitsandbytes, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from lmkit import memory
from lmkit.api import CannotSplit, CheckpointError, LinearSpec, SelectionError, UnsupportedModel
from lmkit.config import EngineConfig, ModelConfig, from_options
from lmkit.plugins.resolve import resolve
from lmkit_quantization_bitsandbytes.codes import table
from lmkit_quantization_bitsandbytes.formats import TableFormat
from lmkit_quantization_bitsandbytes.scheme import BitsandbytesScheme, Nf4Scheme
from lmkit_testing import QuantizationConformance
from lmkit_testing.produced import INTEGER, REFERENCE, check, folders, load
from safetensors.torch import load_file

SCHEME = "lmkit_quantization_bitsandbytes.scheme:BitsandbytesScheme"
FOUR: dict[str, Any] = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
EIGHT: dict[str, Any] = {"quant_method": "bitsandbytes", "load_in_8bit": True}
WEIGHT = "model.layers.0.mlp.down_proj"


class TestFourBits(QuantizationConformance):
    plugin = "quantization:bitsandbytes"
    configs = {"nf4": FOUR, "fp4": FOUR | {"bnb_4bit_quant_type": "fp4"}}
    kernels = ("linear_integer_native", "linear_reference")
    tolerance = {"float32": 1e-2, "bfloat16": 2e-2}  # tables of 8 bits


class TestEightBits(QuantizationConformance):
    plugin = "quantization:bitsandbytes"
    configs = {"int8": EIGHT}
    kernels = ("linear_integer_native", "linear_reference")
    tolerance = {"float32": 1e-4, "bfloat16": 2e-2}


class TestRounded(QuantizationConformance):
    plugin = "quantization:nf4"
    configs = {"default": {}}
    kernels = ("linear_integer_native", "linear_reference")
    tolerance = {"float32": 1e-2, "bfloat16": 2e-2}


@pytest.mark.parametrize("folder", folders(__file__), ids=lambda folder: folder.name)
def test_producers_checkpoint(folder: Path) -> None:
    """Weights of 4 bits are the producer's, bit by bit; scales of 8 bits are rounded to float16."""
    check(folder, SCHEME, REFERENCE, 2e-3 if folder.name == "int8" else 2e-5)


@pytest.mark.parametrize("name", ["nf4", "fp4", "nf4_nested", "nf4_bfloat16", "int8"])
def test_weights_of_the_producer_run_natively(name: str) -> None:
    (folder,) = folders(__file__, name)
    check(folder, SCHEME, INTEGER, 2e-3 if name == "int8" else 5e-2)


def test_columns_that_no_kernel_has_are_dequantized() -> None:
    (folder,) = folders(__file__, "nf4_odd")
    with pytest.raises(SelectionError, match="groups of 16"):
        check(folder, SCHEME, INTEGER, 5e-2)
    check(folder, SCHEME, REFERENCE, 2e-5)


@pytest.mark.parametrize("name", ["nf4", "fp4"])
def test_tables_of_integers_are_near(name: str) -> None:
    """Each value within half a step of 8 bits of what it stands for, and the largest exactly."""
    fmt = TableFormat(name, 64, 64)
    given = {
        "weight": torch.arange(256, dtype=torch.uint8).view(8, 32),
        "weight_absmax": torch.full((8, 1), 127 * 126.0),
    }
    found, exact = fmt.integers(given), fmt.dequantize(given, torch.float32)
    assert found.table is not None
    values = (found.table[found.codes.long()].float() - found.zeros) * found.scales
    assert (values - exact).abs().max() <= 0.5 * found.scales.max()
    assert torch.equal(values.abs().amax(), exact.abs().amax())


def test_scales_that_are_no_float16_are_refused() -> None:
    given = {"weight": torch.zeros(1, 32, dtype=torch.uint8), "weight_absmax": torch.full((1, 1), 1e8)}
    with pytest.raises(CheckpointError, match="linear_reference"):
        TableFormat("nf4", 64, 64).integers(given)


@pytest.mark.parametrize("folder", folders(__file__), ids=lambda folder: folder.name)
def test_weights_of_the_producer_bit_by_bit(folder: Path) -> None:
    down = load(folder, SCHEME, REFERENCE).model.layers[0].mlp.down
    expected = load_file(folder / "expected.safetensors")[WEIGHT]
    if folder.name == "int8":
        torch.testing.assert_close(down.packed.weight, expected, rtol=2**-11, atol=0)
    else:
        assert torch.equal(down.packed.weight, expected)


@pytest.mark.parametrize(("name", "quantized"), [("nf4", False), ("fp4", True)])
def test_the_output_head_is_as_the_producer_left_it(name: str, quantized: bool) -> None:
    head = load(*folders(__file__, name), SCHEME, REFERENCE).model.lm_head
    assert (head.format.name == name) == quantized


def test_what_the_producer_skipped_is_plain() -> None:
    layer = load(*folders(__file__, "nf4_bfloat16"), SCHEME, REFERENCE).model.layers[0]
    assert [layer.attn.o.format.name, layer.mlp.down.format.name] == ["plain", "nf4"]


def test_rounding_is_the_producers() -> None:
    """`--quantization nf4` makes of a weight what bitsandbytes does, bit by bit."""
    (folder,) = folders(__file__, "nf4")
    tensors = load_file(folder / "expected.safetensors")
    fmt = Nf4Scheme().for_layer(LinearSpec("down", 128, (64,)))
    assert fmt is not None
    assert torch.equal(fmt.dequantize({"weight": tensors["plain"]}, torch.float32), tensors[WEIGHT])


def test_rounds_to_nearest() -> None:
    """Rows that do not fill their last block, and one of zeros."""
    weight = torch.randn(7, 100, generator=torch.Generator().manual_seed(0))
    weight[3] = 0
    fmt = Nf4Scheme().for_layer(LinearSpec("layer", 100, (7,)))
    assert fmt is not None
    found = fmt.dequantize({"weight": weight}, torch.float32)
    largest = torch.stack([weight[:, :64].abs().amax(1), weight[:, 64:].abs().amax(1)], 1)
    choices = table("nf4") * largest.repeat_interleave(64, 1)[:, :100, None]
    nearest = (choices - weight[..., None]).abs().amin(-1)
    torch.testing.assert_close((found - weight).abs(), nearest)
    assert not found[3].any()


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ({"load_in_4bit": False}, "load_in_4bit"),
        ({"load_in_8bit": True}, "load_in_4bit"),
        ({"load_in_4bit": 1}, "load_in_4bit"),
        ({"bnb_4bit_quant_type": "af4"}, "bnb_4bit_quant_type"),
        ({"bnb_4bit_quant_storage": "int64"}, "bnb_4bit_quant_storage"),
        ({"bnb_4bit_compute_dtype": "int8"}, "bnb_4bit_compute_dtype"),
        ({"bnb_4bit_use_double_quant": "yes"}, "bnb_4bit_use_double_quant"),
        ({"llm_int8_has_fp16_weight": True}, "llm_int8_has_fp16_weight"),
        ({"llm_int8_threshold": "6"}, "llm_int8_threshold"),
        ({"llm_int8_skip_modules": "lm_head"}, "llm_int8_skip_modules"),
        ({"llm_int8_skip_modules": ["layers.(0|1)"]}, "llm_int8_skip_modules"),
        ({"x" * 10_000: 1}, "x" * 200),
    ],
)
def test_values_not_understood_are_refused(change: dict[str, object], key: str) -> None:
    with pytest.raises(UnsupportedModel) as failure:
        BitsandbytesScheme.parse(FOUR | change)
    assert failure.value.key == f"quantization_config.{key}"
    assert len(str(failure.value)) < 1000


HOSTILE = (None, True, False, -1, 2**70, float("nan"), "", "x" * 10_000, [], [[]], ["x"] * 10_001, {}, {"x": 1})


@pytest.mark.parametrize("name", ["nf4_bfloat16", "int8"])
def test_whatever_stands_anywhere_is_understood_or_refused(name: str) -> None:
    """Every value of a real configuration, replaced by others, one at a time: the refusal names it, in few words."""
    (folder,) = folders(__file__, name)
    given = json.loads((folder / "config.json").read_text())["quantization_config"]
    refused: dict[str, UnsupportedModel] = {}
    for key, value in ((key, value) for key in given for value in HOSTILE):
        try:
            fmt = BitsandbytesScheme.parse(given | {key: value}).for_layer(LinearSpec("up", 64, (64,)))
            assert fmt is None or fmt.params(LinearSpec("up", 64, (64,)), "float32")
        except UnsupportedModel as refusal:
            refused[f"{key} {str(value)[:20]}"] = refusal
    assert len(refused) > 60
    for refusal in refused.values():
        assert refusal.key.startswith("quantization_config.")
        assert len(str(refusal)) < 1000


def test_online_has_no_options() -> None:
    with pytest.raises(UnsupportedModel, match="group_size"):
        Nf4Scheme.parse({"group_size": 64})


@pytest.mark.parametrize(
    ("entries", "name", "quantized"),
    [
        (None, "model.layers.0.mlp.up_proj", True),
        (None, "lm_head", False),
        ([], "lm_head", True),
        (["lm_head"], "lm_head", False),
        (["lm_head"], "model.layers.0.mlp.up_proj", True),
        (["model.layers.1"], "model.layers.10.mlp.up_proj", True),
        (["model.layers.1"], "model.layers.1.mlp.up_proj", False),
        (["mlp"], "model.layers.1.mlp.up_proj", False),
        (["up_proj"], "model.layers.1.mlp.up_proj", False),
        (["mlp.gate"], "model.layers.1.mlp.gate_proj", True),
    ],
)
def test_modules_that_are_skipped(entries: list[str] | None, name: str, quantized: bool) -> None:
    scheme = BitsandbytesScheme.parse(FOUR | {"llm_int8_skip_modules": entries})
    own = "lm_head" if name == "lm_head" else "layers.0.up"
    assert (scheme.for_layer(LinearSpec(own, 64, (64,), sources=(name,))) is not None) == quantized


def test_merged_layers_are_stored_alike() -> None:
    scheme = BitsandbytesScheme.parse(FOUR | {"llm_int8_skip_modules": ["m.k"]})
    with pytest.raises(UnsupportedModel, match="llm_int8_skip_modules"):
        scheme.for_layer(LinearSpec("qkv", 64, (64, 64), parts=("q", "k"), sources=("m.q", "m.k")))


def test_sizes_that_do_not_divide_are_named() -> None:
    layer = LinearSpec("layers.1.up", 65, (64,))
    with pytest.raises(UnsupportedModel, match=r"columns of layers\.1\.up"):
        TableFormat("nf4", 65, 1).params(layer, "float32")
    for fmt in (TableFormat("nf4", 192, 64), Nf4Scheme().for_layer(LinearSpec("o", 192, (64,)))):
        assert fmt is not None
        with pytest.raises(CannotSplit, match="two ranks"):
            fmt.params(LinearSpec("o", 96, (64,)), "float32")


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_plans_know_what_is_dequantized(dtype: str) -> None:
    """Weights of 4 bits take the type of activations in memory where they are dequantized, and 4.5 bits natively."""
    native = pytest.importorskip("lmkit_platform_cpu.native").load()
    (folder,) = folders(__file__, "nf4")
    plain = {"bfloat16": 2, "float32": 4}[dtype]
    for op, least, most in (("linear_reference", 0.97, 1.03), ("auto", 0.0, 0.5 if native else 1.03)):
        resolved, checkpoint, info = resolve(from_options({"model": str(folder), "dtype": dtype, "op": op}))
        held = memory.weight_bytes(info, checkpoint, resolved)
        assert least <= held / plain / info.num_parameters <= most  # the head is packed


@pytest.mark.parametrize(("name", "component"), [("nf4_nested", "linear:nf4"), ("int8", "linear:int8")])
def test_the_resolver_takes_it_as_it_is(name: str, component: str) -> None:
    """Nobody names the format: the checkpoint does."""
    (folder,) = folders(__file__, name)
    resolved, _, _ = resolve(EngineConfig(model=ModelConfig(model=str(folder))))
    chosen, first = resolved.choice("quantization"), resolved.choice("op", component)
    assert chosen is not None
    assert (chosen.name, "quant_method=bitsandbytes" in chosen.why) == ("bitsandbytes", True)
    assert first is not None
    assert first.name in ("linear_integer_native", "linear_reference")
