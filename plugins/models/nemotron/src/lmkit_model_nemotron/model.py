"""Which block stands in layers without attention."""

from __future__ import annotations

from lmkit_decoders import Decoder, Mamba2


class NemotronHModel(Decoder):
    mixer = Mamba2
