"""Activations of MLPs."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from lmkit.api import UnsupportedModel
from torch import Tensor
from torch.nn import functional as F

tanh_gelu = partial(F.gelu, approximate="tanh")

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_pytorch_tanh": tanh_gelu,
    "gelu_new": tanh_gelu,
    "gelu_fast": tanh_gelu,
    "relu": F.relu,
    "relu2": lambda x: F.relu(x).square(),
}


def activation(name: str) -> Callable[[Tensor], Tensor]:
    """The function named as in configurations. Raises UnsupportedModel."""
    try:
        return ACTIVATIONS[name]
    except KeyError:
        raise UnsupportedModel("hidden_act", name, ", ".join(ACTIVATIONS)) from None
