"""Which block stands in layers without attention."""

from __future__ import annotations

from lmkit_decoders import Decoder, Mamba2


class Hybrid(Decoder):
    mixer = Mamba2
