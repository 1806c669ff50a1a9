"""Checkpoints with tekken.json and no tokenizer.json get their tokenizer here."""

from __future__ import annotations

from collections.abc import Iterable

from lmkit.api import Tier, TokenizerSpec, hookimpl


@hookimpl
def lmkit_tokenizers() -> Iterable[TokenizerSpec]:
    yield TokenizerSpec(
        name="mistral",
        summary="tekken.json, by mistral-common",
        target="lmkit_tokenizer_mistral.tekken:open_tekken",
        tier=Tier.REFERENCE,  # a tokenizer.json beside it comes first
        stability="stable",
        requires=("mistral-common>=1.8",),
        files=("tekken.json",),
    )
