"""Apertus as data. Torch-free."""

from __future__ import annotations

from lmkit_decoders import ConfigReader, DecoderArchitecture, DecoderConfig, tensor_names, usual_config

STRETCHED = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def apertus(r: ConfigReader) -> DecoderConfig:
    r.one_of("hidden_act", ("xielu",), "xielu")
    bias = r.flag("attention_bias", False)
    return usual_config(
        r,
        max_positions=65536,
        rope=r.rope(12e6, missing=STRETCHED),
        norm_eps=r.number("rms_norm_eps", 1e-5),
        activation="xielu",
        gated=False,
        qk_norm="head",
        qkv_bias=bias,
        o_bias=bias,
        names=tensor_names(attn_norm=".attention_layernorm", mlp_norm=".feedforward_layernorm", act_fn=".mlp.act_fn"),
    )


class Apertus(DecoderArchitecture):
    configs = {"ApertusForCausalLM": apertus}
    models = {"ApertusForCausalLM": "lmkit_model_apertus.model:Apertus"}
    targets = {"act_fn": "layers.{i}.mlp"}
    ignored = ("model.layers.{i}.mlp.act_fn.beta", "model.layers.{i}.mlp.act_fn.eps")

    def extra_parameters(self, name: str, cfg: DecoderConfig) -> int:
        return 2 * len(cfg.windows)
