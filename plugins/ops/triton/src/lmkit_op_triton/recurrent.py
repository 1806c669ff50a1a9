"""TritonRecurrentOps: linear recurrences on a GPU, whole steps in one launch or two. None waits for the device."""

from __future__ import annotations

import torch
import triton
from lmkit.api import DeviceInfo, StateBatch
from lmkit_decoders.recurrent import TorchRecurrentOps
from torch import Tensor

from lmkit_op_triton import recurrent_kernels as kernels
from lmkit_op_triton.rowops import refusal_of_device

CONV = 512  # channels of a program
HELD = 2048  # entries of the state in a program, which goes from token to token: 16 of a thread's registers
LARGEST = 512  # of the axis of a state that a program holds whole


class TritonRecurrentOps(TorchRecurrentOps):
    """Contract of each operator: TorchRecurrentOps, whose is what these kernels do not take."""

    name = "recurrent_triton"

    def can_run(self, dtype: str, device: DeviceInfo) -> str | None:
        return refusal_of_device(device)

    def causal_conv1d(self, x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor, rows: StateBatch) -> Tensor:
        x, weight = _lines(x), weight.contiguous()
        num, channels = len(rows.slots), x.shape[1]
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        width, blocks = weight.shape[1], triton.cdiv(channels, CONV)
        if len(x):
            kernels.conv[(len(x), blocks)](
                x, weight, weight if bias is None else bias, state, rows.slots, rows.query_start, out, num, channels,
                x.stride(0), state.stride(0), width, bias is not None, triton.next_power_of_2(num), CONV, num_warps=4,
            )  # fmt: skip
            kernels.conv_state[(num, blocks)](
                x, state, rows.slots, rows.query_start, channels, x.stride(0), state.stride(0), width,
                triton.next_power_of_2(max(width - 1, 1)), CONV, num_warps=4,
            )  # fmt: skip
        return out

    def selective_scan(
        self, x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, skip: Tensor, state: Tensor, rows: StateBatch
    ) -> Tensor:
        channels, size = a.shape
        held = triton.next_power_of_2(size)
        if held > LARGEST:
            return super().selective_scan(x, dt, a, b, c, skip, state, rows)
        x, dt, b, c = map(_lines, (x, dt, b, c))
        out, block = torch.empty(x.shape, dtype=x.dtype, device=x.device), _part(held, channels)
        if len(x):
            kernels.selective[(len(rows.slots), triton.cdiv(channels, block))](
                x, dt, a, b, c, skip, state, rows.slots, rows.query_start, out, channels, size,
                x.stride(0), dt.stride(0), b.stride(0), c.stride(0), state.stride(0), block, held, num_warps=4,
            )  # fmt: skip
        return out

    def ssd(
        self, x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, skip: Tensor, state: Tensor, rows: StateBatch
    ) -> Tensor:
        heads, width = x.shape[1:]
        share, size, held = heads // b.shape[1], b.shape[2], triton.next_power_of_2(b.shape[2])
        if held > LARGEST:
            return super().ssd(x, dt, a, b, c, skip, state, rows)
        x, dt, b, c = map(_lines, (x, dt, b, c))
        out, part = torch.empty(x.shape, dtype=x.dtype, device=x.device), _part(held, width)
        if len(x):
            kernels.ssd[(len(rows.slots), heads, triton.cdiv(width, part))](
                x, dt, a, b, c, skip, state, rows.slots, rows.query_start, out, heads, share, size, width,
                x.stride(0), x.stride(1), dt.stride(0), b.stride(0), b.stride(1), c.stride(0), c.stride(1),
                state.stride(0), part, held, num_warps=4,
            )  # fmt: skip
        return out

    def gated_delta_rule(
        self, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, state: Tensor, rows: StateBatch
    ) -> Tensor:
        """Where each channel of the keys decays on its own, the reference."""
        heads, values = v.shape[1:]
        keys, held = q.shape[2], triton.next_power_of_2(q.shape[2])
        if decay.dim() == 3 or held > LARGEST:
            return super().gated_delta_rule(q, k, v, decay, beta, state, rows)
        q, k, v, decay, beta = map(_lines, (q, k, v, decay.float(), beta.float()))
        out, part = torch.empty(v.shape, dtype=v.dtype, device=v.device), _part(held, values)
        if len(v):
            kernels.delta[(len(rows.slots), heads, triton.cdiv(values, part))](
                q, k, v, decay, beta, state, rows.slots, rows.query_start, out, keys**-0.5, heads,
                heads // q.shape[1], keys, values, q.stride(0), q.stride(1), k.stride(0), k.stride(1),
                v.stride(0), v.stride(1), decay.stride(0), beta.stride(0), state.stride(0), held, part, num_warps=4,
            )  # fmt: skip
        return out


def _part(held: int, size: int) -> int:
    """Entries of the other axis, of `size`, in a program that holds `held` of the one that is summed over."""
    return min(max(1, HELD // held), triton.next_power_of_2(size))


def _lines(x: Tensor) -> Tensor:
    """Entries of the last axis are neighbours."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()
