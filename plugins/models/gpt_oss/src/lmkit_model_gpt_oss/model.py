"""gpt-oss: routers with biases."""

from __future__ import annotations

from typing import Any

from lmkit_decoders import Decoder, MoE
from lmkit_layers import Router


class BiasedRouting(MoE):
    def make_router(self, moe: Any, hidden_size: int, ctx: Any) -> Router:
        return Router(moe, moe.num_experts, hidden_size, ctx.dtype, ctx.rows, bias=True)


class GptOss(Decoder):
    moe = BiasedRouting
