"""A rank that has some of the layers: the model is built whole, checked whole, and then left with its own."""

from __future__ import annotations

from collections.abc import Callable

from lmkit.api import ConfigError, ModelInfo
from torch import nn


def keeper(model: nn.Module, info: ModelInfo, layers: range) -> Callable[..., None]:
    """What takes layers off a model. Raises ConfigError where these need more of others than their hidden states."""
    keeper: Callable[..., None] | None = getattr(model, "keep", None)
    if keeper is None:
        what = f"layers of {info.architecture} cannot be split over ranks that follow each other"
        raise ConfigError(what, fix="--pp 1")
    for layer in info.layers:
        if layer.kv_of is not None and (layer.index in layers) != (layer.kv_of in layers):
            what = f"layer {layer.index} reads the keys and values of layer {layer.kv_of}, which another rank has"
            raise ConfigError(what, fix="--pp 1")
    return keeper
