"""bitsandbytes: the kit, files of transformers with bitsandbytes, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
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
    kernels = ("linear_reference",)


class TestEightBits(QuantizationConformance):
    plugin = "quantization:bitsandbytes"
    configs = {"int8": EIGHT}
    kernels = ("linear_integer_native", "linear_reference")
    tolerance = {"float32": 1e-4, "bfloat16": 2e-2}


class TestRounded(QuantizationConformance):
    plugin = "quantization:nf4"
    configs = {"default": {}}
    kernels = ("linear_reference",)


@pytest.mark.parametrize("folder", folders(__file__), ids=lambda folder: folder.name)
def test_producers_checkpoint(folder: Path) -> None:
    """Weights of 4 bits are the producer's, bit by bit; scales of 8 bits are rounded to float16."""
    check(folder, SCHEME, REFERENCE, 2e-3 if folder.name == "int8" else 2e-5)


def test_integers_of_the_producer_run_natively() -> None:
    (folder,) = folders(__file__, "int8")
    check(folder, SCHEME, INTEGER, 2e-3)


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
