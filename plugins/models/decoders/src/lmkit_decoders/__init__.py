"""What families of decoders are composed of: reading a configuration, describing a model, and its blocks.

`describe`, `family`, `reader`, `mixers` and `multimodal` are torch-free (for an architecture's module); the blocks
import torch. Names are imported on first use, so that importing this package costs nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

_HOME = {
    "ConfigReader": "reader",
    "rope_length": "reader",
    "DecoderConfig": "describe",
    "decoder_config": "describe",
    "decoder_info": "describe",
    "decoder_weights": "weights",
    "OneTensor": "places",
    "Place": "places",
    "tensor_names": "describe",
    "usual_config": "describe",
    "DecoderArchitecture": "family",
    "EXPERTS": "family",
    "EACH_EXPERT": "family",
    "each_expert": "family",
    "corrected_moe": "family",
    "split_per_group": "family",
    "split_per_head": "family",
    "stacked": "family",
    "transposed": "family",
    "Decoder": "decoder",
    "DecoderLayer": "decoder",
    "GatedMLP": "mlp",
    "MLP": "mlp",
    "MoE": "moe",
    "MoEConfig": "describe",
    "LatentConfig": "describe",
    "LatentAttention": "mla",
    "latent_config": "family",
    "LATENT": "family",
    "MixerConfig": "describe",
    "delta_mixer": "family",
    "DELTA": "family",
    "GatedDeltaNet": "delta",
    "Conv1d": "delta",
    "mamba_mixer": "mixers",
    "mamba2_mixer": "mixers",
    "hybrid_mamba2": "mixers",
    "time_step_limits": "mixers",
    "mamba_names": "mixers",
    "negative_exp": "mixers",
    "MAMBA": "mixers",
    "Mamba": "mamba",
    "Mamba2": "mamba",
    "TorchRecurrentOps": "recurrent",
    "selective_scan": "selective",
    "ssd": "selective",
    "causal_conv1d": "linear_attention",
    "gated_delta_rule": "linear_attention",
    "lightning_attention": "linear_attention",
    "rg_lru": "linear_attention",
    "SelfAttention": "decoder",
    "Chain": "drafts",
    "FurtherLayer": "further",
    "HiddenChain": "drafts",
    "HeadDecoder": "drafts",
    "Sum": "drafts",
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
