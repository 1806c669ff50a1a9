"""A model of transformers without weights, split into its body and what makes logits of hidden states."""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from lmkit.api import UnknownArchitecture, UnsupportedModel
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.modeling_outputs import BaseModelOutputWithPastAndCrossAttentions
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from lmkit_model_transformers.building import buffers_as_parameters, built, keep_precision, refuse, source_of
from lmkit_model_transformers.routing import ASKING, NAME
from lmkit_model_transformers.stored import Stored, stored_weights


def make_config(text: str) -> tuple[Any, Any]:
    """The library's class of the model and its configuration. Raises UnsupportedModel; runs nothing of a checkpoint."""
    data = json.loads(text)
    architecture = _named(data)
    kind: Any = getattr(transformers, architecture, None)
    own = getattr(getattr(kind, "config_class", None), "is_encoder_decoder", False)
    if data.get("is_encoder_decoder", own):
        raise refuse(architecture, "it has an encoder beside its decoder, and cross attention is not implemented")
    known = architecture in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values() or architecture.endswith("ForCausalLM")
    if not known or architecture.endswith("ForConditionalGeneration") or not isinstance(kind, type):
        remote = " (its code comes with the checkpoint, and such code is never run)" if data.get("auto_map") else ""
        error = UnsupportedModel if isinstance(kind, type) else UnknownArchitecture
        raise refuse(architecture, f"transformers {transformers.__version__} has no such language model{remote}", error)
    if data.get("quantization_config"):
        raise UnsupportedModel(
            "quantization_config", "present", fix="the transformers fallback runs plain weights only"
        )
    try:
        config = getattr(kind, "config_class").from_dict(data)  # noqa: B009  (unknown to type checkers)
    except Exception as e:
        raise refuse(architecture, f"its configuration is not understood ({type(e).__name__}: {e!s:.200})") from e
    rope = getattr(config, "rope_parameters", None)
    for each in (rope, *rope.values()) if isinstance(rope, dict) else ():
        if isinstance(each, dict) and each.get("rope_type") == "dynamic":
            each["rope_type"] = "default"  # as within the length that is served
    return kind, config


def _named(data: Mapping[str, Any]) -> str:
    """The architecture that a configuration names, or else the language model of its model_type."""
    names = data.get("architectures")
    if isinstance(names, list) and names and isinstance(names[0], str):
        return names[0]
    kind = data.get("model_type")
    name: Any = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(kind, "") if isinstance(kind, str) else ""
    return str(name[0] if isinstance(name, tuple) else name)


class Skeleton:
    """`body`: hidden states of tokens. `whole`: the model with `recall` in place of its body.

    `weights` says where a checkpoint stores the parameters of both; `first_position` is what the body calls 0.
    """

    def __init__(self, text: str, dtype: torch.dtype, attention: str = NAME) -> None:
        kind, self.config = make_config(text)
        self.architecture = kind.__name__
        if getattr(kind, "_is_stateful", False):
            raise refuse(self.architecture, "it keeps a state of its own beside keys and values")
        if not kind._supports_attention_backend and "ALL_ATTENTION_FUNCTIONS" not in source_of(kind):
            raise refuse(self.architecture, "its attention does not go through the library's attention interface")
        self.config._attn_implementation = attention
        if attention == ASKING:
            self.config._experts_implementation = "batched_mm"  # runs without values
        self.config.use_cache = False
        whole = built(kind, self.config, dtype)
        buffers_as_parameters(whole)
        keep_precision(whole, dtype)
        whole.requires_grad_(False)
        whole.eval()
        prefix = whole.base_model_prefix
        body = getattr(whole, prefix, None)
        if not isinstance(body, nn.Module):
            raise refuse(self.architecture, "its layers and its head are not kept apart")
        if "position_ids" not in inspect.signature(body.forward).parameters:
            raise refuse(self.architecture, "its layers count positions themselves (they take no position_ids)")
        self.num_parameters = sum(p.numel() for p in whole.parameters())
        embedding, head = whole.get_input_embeddings(), whole.get_output_embeddings()
        if not isinstance(embedding, nn.Embedding) or not isinstance(head, nn.Linear):
            raise refuse(self.architecture, "its embedding or its head is not a plain one")
        self.first_position = self._first_position(body)
        self.vocab_size = head.out_features
        self.tied = head.weight is embedding.weight
        self.ignored: tuple[str, ...] = ()
        if self.tied:
            bias, name = head.bias, next(name for name, module in whole.named_modules() if module is head)
            shared = next((m for m in whole.modules() if m is not head and _bias(m) is bias is not None), None)
            self.ignored = (f"{name}.weight", *([f"{name}.bias"] if shared is not None else []))
            whole.set_output_embeddings(TiedHead(embedding, bias, shared))
            if shared is not None:  # which setting the head may have taken away
                shared.register_parameter("bias", bias)
        names = [name for name, _ in whole.named_parameters(remove_duplicate=False)]
        if len(names) != len(dict(whole.named_parameters())):
            raise refuse(self.architecture, "its layers share weights")
        try:
            self.weights: Stored = stored_weights(whole, prefix)
        except Exception as e:
            raise refuse(self.architecture, f"where checkpoints store its weights is not known ({e!s:.200})") from e
        self.recall = Recall()
        setattr(whole, prefix, self.recall)
        self.body, self.whole = body, whole

    def _first_position(self, body: nn.Module) -> int:
        """Models that count positions from behind a padding token: where they begin, in texts without that token."""
        for name, module in body.named_modules():
            if "position" not in name or getattr(module, "padding_idx", None) is None:
                continue
            owner: Any = body.get_submodule(name.rpartition(".")[0])
            count = getattr(owner, "create_position_ids_from_input_ids", None)
            if count is None:
                raise refuse(self.architecture, "it counts positions from its padding token")
            padding = int(owner.padding_idx)
            return int(count(torch.full((1, 1), padding + 1, device="cpu"), padding))
        return 0


class TiedHead(nn.Module):
    """x @ embedding.T: the embedding is not a child, so its weight is loaded once; so is a bias that `shared` has."""

    def __init__(self, embedding: nn.Embedding, bias: nn.Parameter | None, shared: nn.Module | None) -> None:
        super().__init__()
        self.owner, self.shared = (embedding,), (shared,)
        self.bias = bias if shared is None else None

    def forward(self, x: Tensor) -> Tensor:
        bias = self.bias if self.shared[0] is None else _bias(self.shared[0])
        return F.linear(x, self.owner[0].weight, bias)


def _bias(module: nn.Module) -> nn.Parameter | None:
    return module._parameters.get("bias")


@dataclass
class Recalled(BaseModelOutputWithPastAndCrossAttentions):
    router_logits: Any = None


class Recall(nn.Module):
    """Stands for a body that has run: gives the hidden states it was told."""

    hidden: Tensor

    def forward(self, *args: Any, **kwargs: Any) -> Recalled:
        return Recalled(last_hidden_state=self.hidden)
