"""Qwen2 and Qwen3 (dense) as data. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from lmkit.api import Architecture, ModelInfo, UnsupportedModel, WeightRule
from lmkit.layers.describe import ConfigReader, DecoderConfig, decoder_info, decoder_weights, rope_length

if TYPE_CHECKING:
    from lmkit.api import BuildContext, Model


class QwenArchitecture(Architecture):
    names = ("Qwen2ForCausalLM", "Qwen3ForCausalLM")

    def describe(self, config: Mapping[str, object]) -> ModelInfo:
        r = ConfigReader(config)
        name = r.architecture(self.names)
        qwen3 = name == "Qwen3ForCausalLM"
        heads, hidden = r.integer("num_attention_heads", 32), r.integer("hidden_size")
        attention_bias = qwen3 and r.flag("attention_bias", False)
        rope = r.rope()
        cfg = DecoderConfig(
            vocab_size=r.integer("vocab_size"),
            hidden_size=hidden,
            intermediate_size=r.integer("intermediate_size"),
            num_q_heads=heads,
            num_kv_heads=r.integer("num_key_value_heads", heads),
            head_dim=r.integer("head_dim", 128 if qwen3 else hidden // heads),
            windows=_windows(config, r),
            max_length=rope_length(r.integer("max_position_embeddings", 32768), rope),
            norm_eps=r.number("rms_norm_eps", 1e-6),
            activation=r.one_of("hidden_act", ("silu",), "silu"),
            rope=rope,
            tie=r.flag("tie_word_embeddings", False),
            qkv_bias=attention_bias if qwen3 else True,
            o_bias=attention_bias,
            qk_norm=qwen3,
        )
        return decoder_info(name, r, cfg)

    def build(self, info: ModelInfo, ctx: BuildContext) -> Model:
        from lmkit_model_qwen.model import Qwen2, Qwen3

        return (Qwen3 if info.architecture == "Qwen3ForCausalLM" else Qwen2)(info, ctx)

    def weights(self, info: ModelInfo) -> list[WeightRule]:
        rules = decoder_weights(info)
        if info.config["qk_norm"]:
            rules += [
                WeightRule(f"model.layers.{{i}}.self_attn.{p}_norm.weight", f"layers.{{i}}.attn.{p}_norm.weight")
                for p in "qk"
            ]
        return rules


def _windows(config: Mapping[str, object], r: ConfigReader) -> tuple[int | None, ...]:
    """Sliding window of each layer: `layer_types` where given, else layers from `max_window_layers` on."""
    num_layers = r.layers()
    if not r.flag("use_sliding_window", False) or config.get("sliding_window") is None:
        window = None
    else:
        window = r.integer("sliding_window")
    types = config.get("layer_types")
    if types is None:
        first = config.get("max_window_layers", 28)
        if isinstance(first, bool) or not isinstance(first, int) or first < 0:
            raise UnsupportedModel("max_window_layers", first, "a number of layers")
        types = ["sliding_attention" if window and i >= first else "full_attention" for i in range(num_layers)]
    known = ("full_attention", "sliding_attention")
    if not isinstance(types, list) or len(types) != num_layers or any(t not in known for t in types):
        raise UnsupportedModel("layer_types", types, f"{num_layers} of {', '.join(known)}")
    if "sliding_attention" in types and window is None:
        raise UnsupportedModel(
            "sliding_window", config.get("sliding_window"), "a number: layer_types has sliding layers"
        )
    return tuple(window if t == "sliding_attention" else None for t in types)
