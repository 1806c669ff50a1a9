"""EAGLE heads as data, in the layout of the published checkpoints. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from lmkit.api import LinearSpec, UnsupportedModel
from lmkit_decoders import ConfigReader, DecoderArchitecture, DecoderConfig, tensor_names, usual_config


def eagle(r: ConfigReader) -> DecoderConfig:
    """EAGLE-1: layers of a Llama behind a projection, of which the first has no norm before attention."""
    target = ConfigReader(cast("Mapping[str, object]", r.config.get("lmkit_target", {})))
    size, wanted = r.integer("hidden_size"), target.integer("hidden_size")
    if size != wanted:
        raise UnsupportedModel("hidden_size of the head", size, f"{wanted}, that of the model")
    bias = r.flag("attention_bias", False)
    names = tensor_names("layers.{i}", embed="embed_tokens", fc="fc")
    return usual_config(r, max_length=target.integer("max_length"), tie=True, qkv_bias=bias, o_bias=bias, names=names)


class EagleArchitecture(DecoderArchitecture):
    configs = {"EagleForCausalLM": eagle}
    models = {"EagleForCausalLM": "lmkit_proposer_eagle.model:EagleHead"}
    options = {"EagleForCausalLM": lambda r: {"bias": r.flag("bias", True)}}
    targets = {"fc": "fc"}
    ignored = ("embed_tokens.{any}", "lm_head.{any}")  # those of the model

    def extra_linears(self, cfg: DecoderConfig, options: Any) -> list[LinearSpec]:
        return [LinearSpec("fc", 2 * cfg.hidden_size, (cfg.hidden_size,), options["bias"], "none", (), ("fc",))]

    def extra_parameters(self, name: str, cfg: DecoderConfig) -> int:
        """The projection; the embedding is not here."""
        return (2 * cfg.hidden_size - cfg.vocab_size) * cfg.hidden_size
