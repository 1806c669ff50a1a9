"""EAGLE heads as modules."""

from __future__ import annotations

from typing import cast

from lmkit.api import BuildContext, ModelInfo
from lmkit_decoders import DecoderLayer, HeadDecoder, Sum


class EagleHead(HeadDecoder):
    """EAGLE-1. Its hidden states stand for the model's after the last norm."""

    def __init__(self, info: ModelInfo, ctx: BuildContext) -> None:
        super().__init__(info, ctx)
        self.norm = Sum(info.hidden_size, ctx)
        cast("DecoderLayer", self.layers[0]).attn_norm = Sum(info.hidden_size, ctx)
