"""Mixtures whose experts stay in 4 bits: each that has tokens runs by itself, a slice of its rows at a time."""

from __future__ import annotations

from dataclasses import replace

import torch
from lmkit.api import LinearSpec, QuantFormat
from lmkit_layers.experts import LinearExperts, PackedExperts, one_expert
from lmkit_layouts import Fp4Format
from torch import Tensor

from lmkit_quantization_mxfp4.kernel import Fp4Torch


class Fp4Experts(LinearExperts):
    name = "moe_fp4_torch"

    def __init__(self) -> None:
        super().__init__(Fp4Torch())

    def pack(self, fmt: QuantFormat, params: dict[str, Tensor], layer: LinearSpec, dtype: torch.dtype) -> PackedExperts:
        assert isinstance(fmt, Fp4Format)
        one = replace(fmt, parts=one_expert(layer).out_features)
        return LinearExperts(self.kernel, one).pack(fmt, params, layer, dtype)
