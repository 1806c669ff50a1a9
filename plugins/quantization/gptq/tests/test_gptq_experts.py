"""A mixture in GPTQ's words: vLLM's `moe_wna16` is what it runs the experts of such checkpoints with."""

from __future__ import annotations

from pathlib import Path

import pytest
from lmkit_testing.produced import check_experts, fours, words
from torch import Tensor

CONFIG = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": False}


def store(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    codes, zeros, scales, worth = fours(weight, 32)
    tensors = {
        "qweight": words(codes).T.contiguous(), "qzeros": words(zeros.T - 1), "scales": scales.T.contiguous(),
    }  # fmt: skip
    return tensors, worth


def test_native_experts_run_them(tmp_path: Path) -> None:
    pytest.importorskip("lmkit_model_qwen")
    pytest.importorskip("lmkit_platform_cpu")
    check_experts(tmp_path, "lmkit_quantization_gptq.scheme:GptqScheme", CONFIG, store)
