"""Row-wise operators in plain torch: the reference, and what runs where no faster ones are installed."""

from __future__ import annotations

import numpy as np
import torch
from lmkit.api import DeviceInfo, DrawParams, Routing
from torch import Tensor
from torch.nn import functional as F

from lmkit_layers import truncate, vocabulary
from lmkit_layers.activations import activation
from lmkit_layers.routing import choose


class TorchRowOps:
    """The contract of each operator stands in `lmkit.api.RowOps`."""

    name = "rowwise_torch"

    def can_run(self, dtype: str, device: DeviceInfo) -> str | None:
        return None

    def embed(self, ids: Tensor, weight: Tensor) -> Tensor:
        return F.embedding(ids, weight)

    def rms_norm(
        self, x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None, out: Tensor | None = None
    ) -> Tensor:
        if residual is not None:
            x = residual.add_(x)
        if weight.dtype == x.dtype:
            y = F.rms_norm(x, weight.shape, weight, eps)
        else:
            y = F.rms_norm(x.float(), weight.shape, weight, eps).to(x.dtype)
        return y if out is None else out.copy_(y)

    def layer_norm(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, residual: Tensor | None = None
    ) -> Tensor:
        if residual is not None:
            x = residual.add_(x)
        if weight.dtype == x.dtype:
            return F.layer_norm(x, weight.shape, weight, bias, eps)
        return F.layer_norm(x.float(), weight.shape, weight, bias, eps).to(x.dtype)

    def activate(self, x: Tensor, name: str) -> Tensor:
        return activation(name)(x)

    def gate(self, x: Tensor, name: str) -> Tensor:
        gate, up = x.chunk(2, dim=-1)
        if name == "swiglu_clamped":
            gate, up = gate.clamp(max=7), up.clamp(-7, 7)
            return gate * (gate * 1.702).sigmoid() * (up + 1)
        return activation(name)(gate) * up

    def add(self, x: Tensor, y: Tensor, h: Tensor, gate: Tensor | None = None) -> Tensor:
        return x.add_(y if gate is None else y * F.linear(h, gate).sigmoid())

    def angles(self, positions: Tensor, inv_freq: Tensor, magnitude: float) -> tuple[Tensor, Tensor]:
        angles = positions[:, None].float() * inv_freq
        return angles.cos() * magnitude, angles.sin() * magnitude

    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False) -> None:
        pairs = cos.shape[-1]
        cos, sin = cos[:, None], sin[:, None]
        if interleaved:
            a, b = x[..., 0 : 2 * pairs : 2], x[..., 1 : 2 * pairs : 2]
        else:
            a, b = x[..., :pairs], x[..., pairs : 2 * pairs]
        left, right = a.float(), b.float()
        turned = left * cos - right * sin  # `left` may be `a` itself
        b.copy_(right * cos + left * sin)
        a.copy_(turned)

    def route(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, correction: Tensor | None, routing: Routing
    ) -> tuple[Tensor, Tensor]:
        dtype = torch.float32 if routing.float32 else x.dtype
        logits = F.linear(x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)).float()
        ids, weights = choose(logits, correction, routing)
        return ids, weights.to(x.dtype)

    def mask(self, x: Tensor, rows: Tensor | None, bits: Tensor) -> None:
        size = x.shape[1]
        if bits.device.type == "cpu":  # four times as fast as torch's shifts
            banned = torch.from_numpy(np.unpackbits(bits.numpy(), axis=1, count=size, bitorder="little") == 0)
        else:
            shifts = torch.arange(8, dtype=torch.uint8, device=bits.device)
            banned = ((bits[..., None] >> shifts) & 1).flatten(1)[:, :size] == 0
            banned = F.pad(banned, (0, size - banned.shape[1]), "constant", True)
        if rows is None:
            x.masked_fill_(banned, -torch.inf)
        else:
            x[rows] = x[rows].masked_fill_(banned, -torch.inf)

    def argmax(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return vocabulary.argmax(x)

    def draw(self, x: Tensor, params: DrawParams) -> tuple[Tensor, Tensor]:
        weights, largest = truncate.weigh(x, params)
        return vocabulary.draw(weights, params.share), largest
