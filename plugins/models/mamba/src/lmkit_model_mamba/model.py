"""Which block stands in the layers."""

from __future__ import annotations

from lmkit_decoders import Decoder, Mamba, Mamba2


class MambaModel(Decoder):
    mixer = Mamba


class Mamba2Model(Decoder):
    mixer = Mamba2
