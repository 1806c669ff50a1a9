"""Mistakes planted in what lies around the kernels: comparison with the formats' own numbers finds each."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

import pytest
import torch
from lmkit.api import LinearSpec
from lmkit_layers.linear import PLAIN
from lmkit_layouts import Fp8Format, GptqWords, Rounding
from lmkit_op_cutlass import codes, linear

sys.path.insert(0, str(Path(__file__).parent))
from plain_kernels import compare, noise, plain, stored

FAULTS = {  # the module, and what becomes what in it
    "no bias": (linear, "out.view(-1, len(weight.weight)), bias)", "out.view(-1, len(weight.weight)), None)"),
    "no copy to where TMA reads": (linear, "ALIGNED == 0 else x.clone()", "ALIGNED == 0 else x"),
    "scales of x by token first": (linear, "scales.squeeze(-1).t()", "scales.squeeze(-1)"),
    "scales of weights by row first": (linear, ".float().t().contiguous()", ".float().contiguous()"),
    "one scale for all tokens": (linear, "scales.expand(len(codes), 1)", "scales.flatten()[:1].expand(len(codes), 1)"),
    "blocks as rows": (linear, "bias, weight.by, both", 'bias, "rows", both'),
    "the stored scale forgotten": (linear, "x.shape[-1]), weight.input_scale)", "x.shape[-1]))"),
    "columns in the file's order": (linear, "x[..., weight.order]", "x"),
    "groups twice as long": (linear, "group=weight.group)", "group=2 * weight.group)"),
    "codes of a pair side by side": (codes, "value // 2 + 4 * (value % 2)", "value"),
    "rows below first": (codes, "4 * nibble(value)", "4 * nibble(value ^ 2)"),
    "parts as rows of pieces": (
        codes,
        "(len(codes) // PIECE, PIECE, -1, WORDS, 16)",
        "(len(codes) // PIECE, -1, PIECE, WORDS, 16).transpose(1, 2)",
    ),
    "scales above, zeros below": (codes, "above | below", "(above >> 16 & 0xFFFF) | below << 16"),
    "zeros less one": (codes, "zeros.float() + BASE", "zeros.float() - 1 + BASE"),
    "factors by row first": (codes, "words = (above | below).t()", "words = (above | below).reshape(-1, len(scales))"),
}


@pytest.fixture
def forgotten() -> Iterator[None]:
    yield
    sys.modules.pop("cutlass_mutant", None)


def mutant(module: ModuleType, old: str, new: str, folder: Path) -> ModuleType:
    source = Path(str(module.__file__)).read_text(encoding="utf-8")
    assert old in source, f"{module.__name__} has no {old!r} any more"
    (folder / "mutant.py").write_text(source.replace(old, new), encoding="utf-8")
    spec = spec_from_file_location("cutlass_mutant", folder / "mutant.py")
    assert spec is not None
    assert spec.loader is not None
    made = module_from_spec(spec)
    sys.modules["cutlass_mutant"] = made  # dataclasses look their module up
    spec.loader.exec_module(made)
    return made


def scenario(operators: ModuleType) -> None:
    """Each operator once, with all that it does; raises when something is wrong."""
    layer, wide = LinearSpec("up", 256, (100, 60)), noise(0, 7, 300).bfloat16()
    x, bias = wide[:, 3:259], noise(1, 160).bfloat16()
    compare(operators.CutlassLinear(), PLAIN, layer, {"weight": noise(2, 160, 256).bfloat16()}, x, x, bias)
    flat = wide.flatten()[1 : 1 + 2 * 256].view(2, 256)
    compare(operators.CutlassLinear(), PLAIN, layer, {"weight": noise(2, 160, 256).bfloat16()}, flat, flat, bias)
    for inputs in (Rounding("token"), Rounding("stored"), Rounding("group", 128)):
        block = (128, 128) if inputs.group else None
        fmt = Fp8Format(block, layer.out_features, 256, rows=not block, inputs=inputs)
        params = stored(fmt, layer, "bfloat16")
        if inputs.kind == "stored":
            params["input_scale"] = torch.tensor([0.01, 0.02])
        compare(operators.CutlassFp8(), fmt, layer, params, x, inputs.apply(x.float(), 0.02), bias)
    layer = LinearSpec("up", 256, (96, 64))
    for group in (32, 128):
        ints = GptqWords(stored_bits=4, group=group, parts=layer.out_features, width=256, ordered=True, version=2)
        params = stored(ints, layer, "bfloat16")
        params["g_idx"] = (torch.arange(256, dtype=torch.int32) // group).flip(0)
        compare(operators.CutlassInt4(), ints, layer, params, x, x, bias)


def test_without_faults() -> None:
    with plain():
        scenario(linear)


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.usefixtures("forgotten")
def test_faults_are_found(fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module, old, new = FAULTS[fault]
    made = mutant(module, old, new, tmp_path)
    if module is codes:
        monkeypatch.setattr(linear, "fragments", made.fragments)
        monkeypatch.setattr(linear, "factors", made.factors)
    with plain(), pytest.raises((AssertionError, RuntimeError)):
        scenario(made if module is linear else linear)
