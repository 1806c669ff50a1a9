"""A mixture in AWQ's words: vLLM's `moe_wna16` is what it runs the experts of such checkpoints with."""

from __future__ import annotations

from pathlib import Path

import pytest
from lmkit_testing.produced import check_experts, fours, words
from torch import Tensor

CONFIG = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}
COLUMNS = [0, 2, 4, 6, 1, 3, 5, 7]  # of a word, from its lowest bits on


def interleaved(codes: Tensor) -> Tensor:
    """int32 [k, n / 8] of codes [n, k]."""
    return words(codes.T.unflatten(1, (-1, 8))[..., COLUMNS].flatten(1))


def store(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    codes, zeros, scales, worth = fours(weight, 32)
    tensors = {"qweight": interleaved(codes), "qzeros": interleaved(zeros), "scales": scales.T.contiguous()}
    return tensors, worth


def test_native_experts_run_them(tmp_path: Path) -> None:
    pytest.importorskip("lmkit_model_qwen")
    pytest.importorskip("lmkit_platform_cpu")
    check_experts(tmp_path, "lmkit_quantization_awq.scheme:AwqScheme", CONFIG, store)
