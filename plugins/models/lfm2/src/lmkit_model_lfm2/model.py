"""The gated short convolution of LFM2 (https://arxiv.org/abs/2511.23404)."""

from __future__ import annotations

from lmkit.api import BuildContext, LinearSpec, StepInputs
from lmkit_decoders import Conv1d, Decoder, DecoderConfig
from torch import Tensor, nn


class ShortConv(nn.Module):
    """hidden [T, D] -> out(c * conv(b * x)), where b, c and x come out of one projection."""

    def __init__(self, cfg: DecoderConfig, layer: int, specs: dict[str, LinearSpec], ctx: BuildContext) -> None:
        super().__init__()
        assert cfg.mixer is not None
        given, self.layer = cfg.mixer.options, layer
        self.in_proj = ctx.linear(specs[f"layers.{layer}.attn.in_proj"])
        self.conv = Conv1d(cfg.hidden_size, given["width"], ctx, given["bias"])
        self.out_proj = ctx.linear(specs[f"layers.{layer}.attn.out_proj"])

    def forward(self, h: Tensor, angles: object, x: StepInputs) -> Tensor:
        assert x.state is not None
        b, c, y = self.in_proj(h).chunk(3, dim=-1)
        return self.out_proj(c * self.conv(b * y, x.state.tensors[self.layer]["conv"], x))


class Lfm2Model(Decoder):
    mixer = ShortConv
