"""TritonRowOps: the row-wise operators on a GPU. None waits for the device."""

from __future__ import annotations

import math

import numpy as np
import torch
import triton
from lmkit.api import DeviceInfo, DrawParams, Routing
from lmkit_layers.rowwise import TorchRowOps
from torch import Tensor
from torch.nn import functional as F

from lmkit_op_triton import kernels
from lmkit_op_triton.routing import choose

LARGEST = 16384  # entries of a row that one program holds in registers
BLOCK = 1024  # entries of a program where a row is cut
VOCABULARY = 4096  # the same, of logits
HEADS = 4  # of a program that turns them
ACTIVATIONS = {"silu", "gelu", "gelu_pytorch_tanh", "gelu_new", "gelu_fast", "relu", "relu2", "swiglu_clamped"}
CAPABILITY = (8, 0)


def warps(size: int) -> int:
    """For a program of `size` entries: 8 to 16 of them per thread."""
    return max(1, min(16, size // 512))


def refusal_of_device(device: DeviceInfo) -> str | None:
    """Why none of the kernels runs on it; None: they do."""
    if device.platform == "cuda" and device.capability is not None and device.capability < CAPABILITY:
        has = ".".join(map(str, device.capability))
        return f"Triton's kernels need compute capability 8.0, the device has {has}"
    return None


class TritonRowOps(TorchRowOps):
    """Contract of each operator: `lmkit.api.RowOps`. What is too large for a program is the reference's."""

    name = "rowwise_triton"

    def can_run(self, dtype: str, device: DeviceInfo) -> str | None:
        return refusal_of_device(device)

    def embed(self, ids: Tensor, weight: Tensor) -> Tensor:
        out = weight.new_empty(len(ids), weight.shape[1])
        if out.numel():
            grid = (len(ids), triton.cdiv(weight.shape[1], BLOCK))
            kernels.embed[grid](ids, weight, out, weight.shape[1], weight.stride(0), BLOCK, num_warps=2)
        return out

    def rms_norm(
        self, x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None, out: Tensor | None = None
    ) -> Tensor:
        if not _fits(x):
            return super().rms_norm(x, weight, eps, residual, out)
        return self._norm(x, weight, None, eps, residual, out, rms=True)

    def layer_norm(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, residual: Tensor | None = None
    ) -> Tensor:
        if not _fits(x):
            return super().layer_norm(x, weight, bias, eps, residual)
        return self._norm(x, weight, bias, eps, residual, None, rms=False)

    def _norm(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, residual: Tensor | None, out: Tensor | None,
        *, rms: bool,
    ) -> Tensor:  # fmt: skip
        size = x.shape[-1]
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device) if out is None else out
        rows, inner, (x_outer, x_inner), (out_outer, out_inner) = _rows(x, out)
        if rows:
            held = triton.next_power_of_2(size)
            kernels.norm[(rows,)](
                x, x if residual is None else residual, weight, weight if bias is None else bias, out,
                eps, inner, size, x_outer, x_inner, out_outer, out_inner,
                0 if residual is None else residual.stride(0),
                rms, residual is not None, bias is not None, held, num_warps=warps(held),
            )  # fmt: skip
        return out

    def activate(self, x: Tensor, name: str) -> Tensor:
        if name not in ACTIVATIONS or x.dim() != 2:
            return super().activate(x, name)
        return self._elementwise(kernels.activate, x, x.shape[1], name)

    def gate(self, x: Tensor, name: str) -> Tensor:
        if name not in ACTIVATIONS or x.dim() != 2:
            return super().gate(x, name)
        return self._elementwise(kernels.gate, x, x.shape[1] // 2, name)

    def _elementwise(self, kernel: object, x: Tensor, size: int, name: str) -> Tensor:
        out = x.new_empty(x.shape[0], size)
        if out.numel():
            grid = (x.shape[0], triton.cdiv(size, BLOCK))
            kernel[grid](x, out, size, x.stride(0), name, BLOCK, num_warps=4)  # type: ignore[index]
        return out

    def add(self, x: Tensor, y: Tensor, h: Tensor, gate: Tensor | None = None) -> Tensor:
        if x.dim() != 2 or not _fits(x) or not _fits(h):
            return super().add(x, y, h, gate)
        if x.numel():
            held = triton.next_power_of_2(x.shape[1])
            kernels.add[(len(x),)](
                x, y, h, h if gate is None else gate, x.shape[1], h.shape[1], x.stride(0), y.stride(0), h.stride(0),
                gate is not None, held, triton.next_power_of_2(h.shape[1]), num_warps=warps(held),
            )  # fmt: skip
        return x

    def angles(self, positions: Tensor, inv_freq: Tensor, magnitude: float) -> tuple[Tensor, Tensor]:
        shape = (len(positions), len(inv_freq))
        cos, sin = inv_freq.new_empty(shape), inv_freq.new_empty(shape)
        if cos.numel():
            held = triton.next_power_of_2(shape[1])
            kernels.angles[(shape[0],)](positions, inv_freq, cos, sin, magnitude, shape[1], held, num_warps=1)
        return cos, sin

    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False) -> None:
        tokens, heads = x.shape[:2]
        pairs = cos.shape[-1]
        if x.numel() and pairs:
            grid = (tokens, triton.cdiv(heads, HEADS))
            held = triton.next_power_of_2(pairs)
            kernels.rotate[grid](
                x, cos, sin, heads, pairs, x.stride(0), x.stride(1), interleaved, HEADS, held, num_warps=2
            )

    def route(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, correction: Tensor | None, routing: Routing
    ) -> tuple[Tensor, Tensor]:
        dtype = torch.float32 if routing.float32 else x.dtype
        logits = F.linear(x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype))
        return choose(logits, correction, routing, x.dtype)

    def mask(self, x: Tensor, rows: Tensor | None, bits: Tensor) -> None:
        num, size = len(bits), x.shape[1]
        if num:
            kernels.mask[(num, triton.cdiv(size, VOCABULARY))](
                x, bits if rows is None else rows, bits, size, bits.shape[1], x.stride(0), rows is not None, VOCABULARY,
                num_warps=8,
            )  # fmt: skip

    def argmax(self, x: Tensor) -> tuple[Tensor, Tensor]:
        rows, size = x.shape
        blocks = triton.cdiv(size, VOCABULARY)
        most = torch.empty((rows, blocks), dtype=torch.float32, device=x.device)
        where = torch.empty((rows, blocks), dtype=torch.int32, device=x.device)
        ids = torch.empty(rows, dtype=torch.int64, device=x.device)
        largest = torch.empty(rows, dtype=x.dtype, device=x.device)
        if rows:
            kernels.block_max[(rows, blocks)](x, most, where, size, x.stride(0), VOCABULARY, num_warps=8)
            held = triton.next_power_of_2(blocks)
            kernels.row_max[(rows,)](most, where, ids, largest, blocks, held, num_warps=1)
        return ids, largest

    def draw(self, x: Tensor, params: DrawParams) -> tuple[Tensor, Tensor]:
        rows, size = x.shape
        ids = torch.empty(rows, dtype=torch.int64, device=x.device)
        largest = torch.empty(rows, dtype=x.dtype, device=x.device)
        if rows:
            packed = _uploaded(params, x.device)
            kernels.draw[(rows,)](x, packed, ids, largest, rows, size, x.stride(0), VOCABULARY, num_warps=8)
        return ids, largest


def _fits(x: Tensor) -> bool:
    return x.dim() in (2, 3) and x.shape[-1] <= LARGEST


def _rows(x: Tensor, out: Tensor) -> tuple[int, int, tuple[int, int], tuple[int, int]]:
    """How many rows there are, how many within one of the first axis, and the strides of both axes in x and in out."""
    if x.dim() == 2:
        return x.shape[0], 1, (x.stride(0), 0), (out.stride(0), 0)
    return x.shape[0] * x.shape[1], x.shape[1], (x.stride(0), x.stride(1)), (out.stride(0), out.stride(1))


def _uploaded(params: DrawParams, device: torch.device) -> Tensor:
    """All parameters in one copy from pinned memory: [5, S] float64, as the kernel reads them."""
    scale = params.temperature * np.float32(math.log(2))
    packed = np.stack([scale, params.min_p, params.top_k, params.top_p, params.share]).astype(np.float64)
    host = torch.from_numpy(packed)
    return host if device.type == "cpu" else host.pin_memory().to(device, non_blocking=True)
