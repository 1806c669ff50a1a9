"""Linears whose weights are packed once, as tiles of rows that fit into the device's fast memory."""

from dataclasses import dataclass

import torch
from lmkit.api import BenchmarkCase

ROWS = 64  # of a tile


@dataclass
class Tiles:
    """Contract: lmkit.api.PackedWeight. A weight [out, in] as tiles [tiles, in, ROWS], the last filled with zeros."""

    tiles: torch.Tensor
    rows: int  # of the weight

    @property
    def nbytes(self):
        return self.tiles.nbytes


class NpuLinear:
    """Contract: lmkit.api.LinearKernel."""

    name = "linear_npu"

    def can_run(self, fmt, layer, device):
        return None

    def pack(self, fmt, params, layer, dtype):
        """`fmt.dequantize` gives the weight of any format; `params` are ours, and are let go."""
        weight = fmt.dequantize(params, dtype)
        params.clear()
        padded = torch.nn.functional.pad(weight, (0, 0, 0, -len(weight) % ROWS))
        return Tiles(padded.unflatten(0, (-1, ROWS)).transpose(1, 2).contiguous(), len(weight))

    def apply(self, x, weight, bias):
        """x [..., in] -> [..., out]."""
        flat = x.reshape(-1, x.shape[-1])
        y = (flat @ weight.tiles).transpose(0, 1).flatten(1)[:, : weight.rows].reshape(*x.shape[:-1], weight.rows)
        return y if bias is None else y + bias


def cases():
    """What `lmkit bench kernels` measures."""
    tiles = Tiles(torch.randn(8, 512, ROWS), 8 * ROWS)
    x = torch.randn(1, 512)
    run = lambda: NpuLinear().apply(x, tiles, None)  # noqa: E731
    yield BenchmarkCase(name="tiles 1x512x512", run=run, bytes=tiles.nbytes, flops=2 * 512 * 512)
