"""Modules of pooling models: a decoder with another head, and what follows a head."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from lmkit.api import BuildContext, DenseInfo, LinearSpec, Model, StepInputs
from torch import Tensor, nn
from torch.nn import functional as F

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "tanh": torch.tanh,
    "relu": F.relu,
    "gelu": F.gelu,
    "silu": F.silu,
}


class PooledDecoder(nn.Module):
    """Layers of `decoder` (its language-model head is dropped), then `specs` with ReLUs between, or nothing."""

    def __init__(self, decoder: Model, specs: Sequence[LinearSpec], ctx: BuildContext) -> None:
        super().__init__()
        decoder.lm_head = None  # type: ignore[attr-defined]
        self.decoder = decoder
        modules: list[nn.Module] = []
        for spec in specs:
            modules += [*([nn.ReLU()] if modules else []), ctx.linear(spec)]
        self.score = nn.Sequential(*modules)

    def forward(self, x: StepInputs) -> Tensor:
        return self.decoder.forward(x)

    def logits(self, hidden: Tensor) -> Tensor:
        return self.score(hidden)


class Dense(nn.Module):
    """act(linear(x)): a Dense module of sentence-transformers."""

    def __init__(self, info: DenseInfo, dtype: torch.dtype) -> None:
        super().__init__()
        self.info = info
        self.linear = nn.Linear(info.in_features, info.out_features, info.bias, dtype=dtype)
        self.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        act = ACTIVATIONS.get(self.info.activation)
        return self.linear(x) if act is None else act(self.linear(x))
