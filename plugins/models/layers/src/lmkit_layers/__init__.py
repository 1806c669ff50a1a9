"""Modules that models are built of: linears, experts, norms, rotary positions, attention, embeddings.

A model plugin gets them from its BuildContext. Names are imported on first use, so that importing this package costs
nothing; the modules import torch. What decoders are composed of is a library of its own, `lmkit_decoders`.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

_HOME = {
    "Builder": "build",
    "PLAIN": "linear",
    "Linear": "linear",
    "PlainFormat": "linear",
    "ReferenceLinear": "linear",
    "Attention": "attention",
    "DraftProposer": "drafts",
    "Embedding": "embedding",
    "Latent": "latent",
    "LayerNorm": "norm",
    "Norm": "norm",
    "RMSNorm": "norm",
    "Rotary": "rotary",
    "TorchRowOps": "rowwise",
    "activation": "activations",
    "Router": "experts",
    "LinearExperts": "experts",
    "Experts": "experts",
    "Mixture": "experts",
}

__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    try:
        module = _HOME[name]
    except KeyError:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}") from None
    return getattr(import_module(f"{__name__}.{module}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME})
