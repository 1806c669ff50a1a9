"""8 bits, rounded while loading: the formats, the kernel, and a model that still says what it said."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from lmkit.api import LinearSpec, UnsupportedModel
from lmkit_quantization_int8.scheme import ExpertsInt8Scheme, Int8Scheme, W8A8Scheme
from lmkit_testing import QuantizationConformance
from lmkit_testing.checkpoints import tiny_checkpoint
from lmkit_testing.model import choice, drift, load_tiny, prompt, reference
from lmkit_testing.steps import ModelDriver


class TestInt8(QuantizationConformance):
    plugin = "quantization:int8"
    configs = {"rows": {}, "groups": {"group_size": 32}}
    kernels = ("linear_integer_native",)
    tolerance = {"float32": 1e-4, "bfloat16": 2e-2}


class TestW8A8(QuantizationConformance):
    plugin = "quantization:w8a8"
    configs = {"default": {}}
    kernels = ("linear_integer_native",)
    tolerance = {"float32": 3e-2, "bfloat16": 4e-2}


class TestExpertsInt8(QuantizationConformance):
    plugin = "quantization:experts_int8"
    configs = {"default": {}}
    kernels = ("linear_integer_native",)
    layers = (LinearSpec("layers.0.mlp.experts.down", 128, (96, 96), parts=("0", "1"), experts=2),)
    tolerance = {"float32": 1e-4, "bfloat16": 2e-2}


@pytest.mark.parametrize("kernel", ["linear", "moe"])
def test_experts_alone_are_rounded(tmp_path: Path, kernel: str) -> None:
    pytest.importorskip("lmkit_model_qwen")
    pytest.importorskip("lmkit_platform_cpu")
    sizes = {"hidden_size": 64, "moe_intermediate_size": 64, "num_experts": 4, "num_experts_per_tok": 2, "head_dim": 16}
    folder = tiny_checkpoint("Qwen3MoeForCausalLM", tmp_path, **sizes)
    kernels = {"linear:int8": "lmkit_platform_cpu.integer:IntegerLinear"}
    if kernel == "moe":
        kernels["moe:int8"] = "lmkit_platform_cpu.experts:NativeExperts"
    chosen = [choice("op", target, component) for component, target in kernels.items()]
    scheme = choice("quantization", "lmkit_quantization_int8.scheme:ExpertsInt8Scheme")
    loaded = load_tiny(folder, "lmkit_model_qwen.arch:Qwen", "float32", choices=(scheme, *chosen))
    formats = {name: m.format.name for name, m in loaded.model.named_modules() if hasattr(m, "format")}
    assert {name for name, fmt in formats.items() if fmt == "int8"} == {
        f"layers.{i}.mlp.experts.{part}" for i in range(2) for part in ("up", "down")
    }
    with torch.no_grad():
        expected = reference(folder, "float32")(torch.tensor([prompt(97)])).logits[0]
    assert drift(ModelDriver(loaded, "float32").run(0, prompt(97), 7), expected) < 2e-2


@pytest.mark.parametrize("group", [0, 32])
def test_rounds_to_nearest(group: int) -> None:
    layer = LinearSpec("layer", 100, (7,))
    weight = torch.randn(7, 100)
    weight[3] = 0
    fmt = Int8Scheme(group).for_layer(layer)
    found = fmt.dequantize({"weight": weight}, torch.float32)
    steps = fmt.integers({"weight": weight}).scales.repeat_interleave(group or 100, 1)[:, :100]
    assert ((found - weight).abs() <= steps * 0.51).all()
    assert not found[3].any()


def test_options_are_checked() -> None:
    with pytest.raises(ValueError, match="48"):
        Int8Scheme.parse({"group_size": 48})
    for scheme in (W8A8Scheme, ExpertsInt8Scheme):
        with pytest.raises(UnsupportedModel, match="bits"):
            scheme.parse({"bits": 4})
