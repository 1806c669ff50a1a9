"""The operators of recurrent layers in plain torch: the reference, and what runs where no faster ones are installed."""

from __future__ import annotations

from typing import cast

from lmkit.api import BuildContext, DeviceInfo, StateBatch
from torch import Tensor

from lmkit_decoders import linear_attention, selective


class TorchRecurrentOps:
    """Each takes the packed tokens of a step and a layer's state [slots, ...], which it renews in place for the rows of
    the step; the host waits for no device. Shapes, dtypes and sources stand at the functions that are called. An
    implementation subclasses this and replaces what it does better (`BuildContext.recurrent`)."""

    name = "recurrent_torch"

    def can_run(self, dtype: str, device: DeviceInfo) -> str | None:
        return None

    def causal_conv1d(self, x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor, rows: StateBatch) -> Tensor:
        return linear_attention.causal_conv1d(x, weight, bias, state, rows)

    def selective_scan(
        self, x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, skip: Tensor, state: Tensor, rows: StateBatch
    ) -> Tensor:
        return selective.selective_scan(x, dt, a, b, c, skip, state, rows)

    def ssd(
        self, x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, skip: Tensor, state: Tensor, rows: StateBatch
    ) -> Tensor:
        return selective.ssd(x, dt, a, b, c, skip, state, rows)

    def gated_delta_rule(
        self, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, state: Tensor, rows: StateBatch
    ) -> Tensor:
        return linear_attention.gated_delta_rule(q, k, v, decay, beta, state, rows)


def recurrent_ops(ctx: BuildContext) -> TorchRecurrentOps:
    """Those that a model is built with."""
    return cast("TorchRecurrentOps", ctx.recurrent) or TorchRecurrentOps()
