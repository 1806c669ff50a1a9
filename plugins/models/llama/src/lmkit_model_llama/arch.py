"""Llama and Mistral as data. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from lmkit.api import Architecture, ModelInfo, WeightRule
from lmkit.layers.describe import ConfigReader, DecoderConfig, decoder_info, decoder_weights, rope_length

if TYPE_CHECKING:
    from lmkit.api import BuildContext, Model


class LlamaArchitecture(Architecture):
    names = ("LlamaForCausalLM", "MistralForCausalLM")

    def describe(self, config: Mapping[str, object]) -> ModelInfo:
        r = ConfigReader(config)
        name = r.architecture(self.names)
        mistral = name == "MistralForCausalLM"
        r.one_of("pretraining_tp", (1,), 1)  # other values slice the matmuls
        heads, hidden = r.integer("num_attention_heads"), r.integer("hidden_size")
        window = None
        if mistral and config.get("sliding_window") is not None:
            window = r.integer("sliding_window")
        attention_bias = False if mistral else r.flag("attention_bias", False)
        rope = r.rope()
        cfg = DecoderConfig(
            vocab_size=r.integer("vocab_size"),
            hidden_size=hidden,
            intermediate_size=r.integer("intermediate_size"),
            num_q_heads=heads,
            num_kv_heads=r.integer("num_key_value_heads", heads),
            head_dim=r.integer("head_dim", hidden // heads),
            windows=(window,) * r.layers(),
            max_length=rope_length(r.integer("max_position_embeddings", 2048), rope),
            norm_eps=r.number("rms_norm_eps", 1e-6),
            activation=r.one_of("hidden_act", ("silu",), "silu"),
            rope=rope,
            tie=r.flag("tie_word_embeddings", False),
            qkv_bias=attention_bias,
            o_bias=attention_bias,
            mlp_bias=False if mistral else r.flag("mlp_bias", False),
        )
        return decoder_info(name, r, cfg)

    def build(self, info: ModelInfo, ctx: BuildContext) -> Model:
        from lmkit.layers import Decoder

        return Decoder(info, ctx)

    def weights(self, info: ModelInfo) -> list[WeightRule]:
        return decoder_weights(info)
