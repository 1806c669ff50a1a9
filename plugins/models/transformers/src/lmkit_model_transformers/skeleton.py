"""A model of transformers without weights, split into its body and what makes logits of hidden states."""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import transformers
from lmkit.api import UnsupportedModel
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.modeling_outputs import BaseModelOutputWithPastAndCrossAttentions
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

NAME = "lmkit"  # of our attention in the library's registry


def refuse(architecture: str, reason: str) -> UnsupportedModel:
    return UnsupportedModel("architectures", architecture, fix=f"the transformers fallback cannot serve it: {reason}")


def make_config(text: str) -> tuple[Any, Any]:
    """The library's class of the model and its configuration. Raises UnsupportedModel; runs nothing of a checkpoint."""
    data = json.loads(text)
    names = data.get("architectures")
    architecture = str(names[0]) if isinstance(names, list) and names else ""
    kind: Any = getattr(transformers, architecture, None)
    if not architecture.endswith("ForCausalLM") or not isinstance(kind, type):
        remote = " (its code comes with the checkpoint, and such code is never run)" if data.get("auto_map") else ""
        raise refuse(architecture, f"transformers {transformers.__version__} has no such language model{remote}")
    if data.get("quantization_config"):
        raise UnsupportedModel(
            "quantization_config", "present", fix="the transformers fallback runs plain weights only"
        )
    try:
        return kind, getattr(kind, "config_class").from_dict(data)  # noqa: B009  (unknown to type checkers)
    except Exception as e:
        raise refuse(architecture, f"its configuration is not understood ({type(e).__name__}: {e!s:.200})") from e


class Skeleton:
    """`body`: hidden states of tokens. `whole`: the model with `recall` in place of its body."""

    def __init__(self, text: str, dtype: torch.dtype) -> None:
        kind, self.config = make_config(text)
        self.architecture = kind.__name__
        if self.config.is_encoder_decoder:
            raise refuse(self.architecture, "it has an encoder")
        if not kind._supports_attention_backend:
            raise refuse(self.architecture, "its attention does not go through the library's attention interface")
        if getattr(kind, "_is_stateful", False):
            raise refuse(self.architecture, "it keeps a state of its own beside keys and values")
        self.config._attn_implementation = NAME
        self.config.use_cache = False
        with _parameters_on_meta():
            whole = kind._from_config(self.config, dtype=dtype)
        whole.requires_grad_(False)
        whole.eval()
        prefix = whole.base_model_prefix
        body = getattr(whole, prefix, None)
        if not isinstance(body, nn.Module) or "position_ids" not in inspect.signature(body.forward).parameters:
            raise refuse(self.architecture, "its layers do not take positions")
        self.num_parameters = sum(p.numel() for p in whole.parameters())
        embedding, head = whole.get_input_embeddings(), whole.get_output_embeddings()
        if not isinstance(embedding, nn.Embedding) or not isinstance(head, nn.Linear):
            raise refuse(self.architecture, "its embedding or its head is not a plain one")
        if any(
            isinstance(m, nn.Embedding) and m is not embedding and m.padding_idx is not None for m in body.modules()
        ):
            raise refuse(self.architecture, "it counts positions from its padding token")
        self.tied = head.weight is embedding.weight
        if self.tied:
            whole.set_output_embeddings(TiedHead(embedding, head.bias))
        names = [name for name, _ in whole.named_parameters(remove_duplicate=False)]
        if len(names) != len(dict(whole.named_parameters())):
            raise refuse(self.architecture, "its layers share weights")
        self.names, self.prefix = names, prefix
        self.recall = Recall()
        setattr(whole, prefix, self.recall)
        self.body, self.whole = body, whole


class TiedHead(nn.Module):
    """x @ embedding.T: the embedding is not a child, so its weight is loaded once."""

    def __init__(self, embedding: nn.Embedding, bias: nn.Parameter | None) -> None:
        super().__init__()
        self.owner = (embedding,)
        self.bias = bias

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.owner[0].weight, self.bias)


class Recall(nn.Module):
    """Stands for a body that has run: gives the hidden states it was told."""

    hidden: Tensor

    def forward(self, *args: Any, **kwargs: Any) -> BaseModelOutputWithPastAndCrossAttentions:
        return BaseModelOutputWithPastAndCrossAttentions(last_hidden_state=self.hidden)


class Route:
    """Where one attention module's calls go: `call(module, q, k, v, kwargs)` -> [tokens, heads, v_dim]."""

    def __init__(self, call: Any) -> None:
        self.call = call


def connect(body: nn.Module, call: Any) -> None:
    """Every attention module of `body` calls `call` from now on."""
    for module in body.modules():
        if isinstance(getattr(module, "layer_idx", None), int):
            object.__setattr__(module, "lmkit_route", Route(call))


def _attend(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, **kwargs: Any) -> Any:
    """[1, heads, tokens, dim] each -> [1, tokens, heads, v_dim]."""
    q, k, v = (t[0].transpose(0, 1) for t in (query, key, value))
    return module.lmkit_route.call(module, q, k, v, kwargs)[None], None  # type: ignore[union-attr,operator]


ALL_ATTENTION_FUNCTIONS.register(NAME, _attend)  # and no mask under this name: what a token sees is the backend's


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Parameters take no memory; buffers, which are computed and not loaded, are real."""
    register = nn.Module.register_parameter

    def on_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None and not parameter.is_meta:
            parameter = nn.Parameter(parameter.to("meta"), requires_grad=False)
        register(module, name, parameter)

    nn.Module.register_parameter = on_meta  # type: ignore[method-assign,assignment]
    try:
        with torch.device("cpu"):
            yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]
