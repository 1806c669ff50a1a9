"""The cases of `lmkit bench kernels` that are made from a model's description."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from lmkit.api import DeviceInfo, LinearSpec
from lmkit_bench import kernels
from lmkit_layers import Builder, ReferenceLinear

EXPERTS, TOP_K, HIDDEN, MIDDLE = 4, 2, 8, 6


def test_experts_count_the_weights_that_are_chosen(monkeypatch: Any) -> None:
    monkeypatch.setattr(kernels, "ROTATED_BYTES", 1 << 14)
    up = LinearSpec("up", HIDDEN, (MIDDLE,) * 2 * EXPERTS, True, "none", tuple("abcdefgh"), (), EXPERTS)
    down = LinearSpec("down", MIDDLE, (HIDDEN,) * EXPERTS, True, "none", tuple("abcd"), (), EXPERTS)
    config = {"moe": {"top_k": TOP_K, "activation": ""}, "activation": "relu"}
    info: Any = SimpleNamespace(linears=(LinearSpec("q", 8, (8,)), up, down), kv_groups=list, config=config)
    device = DeviceInfo("cpu", "cpu")
    builder = Builder(info, torch.float32, device, None, {"linear:plain": [ReferenceLinear()]})
    cases = {case.name: case for case in kernels.experts_cases(builder, lambda name: True)}
    assert list(cases) == [f"moe_linear plain {rows}x8->6 2/4" for rows in kernels.ROWS]
    expert = 3 * HIDDEN * MIDDLE * 4
    one, many = cases["moe_linear plain 1x8->6 2/4"], cases["moe_linear plain 512x8->6 2/4"]
    assert one.bytes == TOP_K * expert + 2 * HIDDEN * 4
    assert many.bytes == EXPERTS * expert + 512 * 2 * HIDDEN * 4
    assert many.flops == 512 * TOP_K * 2 * 3 * HIDDEN * MIDDLE
    for case in cases.values():
        case.run()
    assert not list(kernels.experts_cases(builder, lambda name: False))
    info.linears = info.linears[:1]
    assert not list(kernels.experts_cases(builder, lambda name: True))
