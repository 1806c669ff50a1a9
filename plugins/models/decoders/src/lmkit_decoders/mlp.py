"""Feed-forward blocks."""

from __future__ import annotations

from lmkit.api import BuildContext, LinearSpec
from torch import Tensor, nn

from lmkit_decoders.describe import DecoderConfig

Specs = dict[str, LinearSpec]


class GatedMLP(nn.Module):
    """down(act(gate(x)) * up(x)). `path` is where its linears are in `specs`: "layers.0.mlp"."""

    def __init__(self, cfg: DecoderConfig, path: str, specs: Specs, ctx: BuildContext) -> None:
        super().__init__()
        self.gate_up = ctx.linear(specs[f"{path}.gate_up"])
        self.down = ctx.linear(specs[f"{path}.down"])
        self.act, self.rows = cfg.activation, ctx.rows

    def forward(self, h: Tensor) -> Tensor:
        return self.down(self.rows.gate(self.gate_up(h), self.act))


class MLP(nn.Module):
    """down(act(up(x)))."""

    def __init__(self, cfg: DecoderConfig, path: str, specs: Specs, ctx: BuildContext) -> None:
        super().__init__()
        self.up = ctx.linear(specs[f"{path}.up"])
        self.down = ctx.linear(specs[f"{path}.down"])
        self.act, self.rows = cfg.activation, ctx.rows

    def forward(self, h: Tensor) -> Tensor:
        return self.down(self.activate(self.up(h)))

    def activate(self, x: Tensor) -> Tensor:
        return self.rows.activate(x, self.act)
