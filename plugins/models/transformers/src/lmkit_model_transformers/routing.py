"""Attention of the library's models, sent to whoever wants it."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

NAME = "lmkit"  # of our attention in the library's registry, for which it makes no masks
ASKING = "lmkit_asking"  # the same, with a Mask that says what the code wants


class Mask:
    """What the library's code wants a token to see: `sees(batch, head, query, key)` of positions."""

    def __init__(self, mask_function: Any, **_: Any) -> None:
        self.sees = mask_function

    def __getattr__(self, name: str) -> Any:
        raise TypeError("it computes with its mask")

    def __getitem__(self, index: Any) -> Any:
        raise TypeError("it computes with its mask")


class Route:
    """Where the calls of one module go: `call(name, q, k, v, mask, kwargs)` -> [tokens, heads, v_dim]."""

    def __init__(self, name: str, module: nn.Module, call: Any) -> None:
        self.name, self.call = name, call
        self.causal = getattr(module, "is_causal", True)


def connect(body: nn.Module, call: Any) -> None:
    """Whatever module of `body` attends calls `call` from now on."""
    for name, module in body.named_modules():
        object.__setattr__(module, "lmkit_route", Route(name, module, call))


def _attend(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, **kwargs: Any) -> Any:
    """[1, heads, tokens, dim] each -> [1, tokens, heads, v_dim]."""
    q, k, v = (t[0].transpose(0, 1) for t in (query, key, value))
    route: Any = module.lmkit_route
    return route.call(route.name, q, k, v, mask, {"is_causal": route.causal, **kwargs})[None], None


for name in (NAME, ASKING):
    ALL_ATTENTION_FUNCTIONS.register(name, _attend)
ALL_MASK_ATTENTION_FUNCTIONS.register(ASKING, Mask)
