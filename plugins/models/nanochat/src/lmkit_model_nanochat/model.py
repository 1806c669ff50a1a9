"""nanochat: what is code and not data."""

from __future__ import annotations

from lmkit_decoders import Decoder, SelfAttention
from lmkit_decoders.decoder import Angles
from torch import Tensor


class NanoChatAttention(SelfAttention):
    """Turns the other way round."""

    def rotate(self, qk: Tensor, angles: Angles) -> None:
        cos, sin = angles
        self.rows.rotate(qk, cos, -sin)


class NanoChat(Decoder):
    attention = NanoChatAttention
