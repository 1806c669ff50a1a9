"""Phi (attention and MLP side by side, layer norms) and Phi-3 to Phi-4 (fused projections, longrope). Torch-free."""

from __future__ import annotations

from lmkit_decoders import ConfigReader, DecoderArchitecture, DecoderConfig, tensor_names, usual_config


def phi(r: ConfigReader) -> DecoderConfig:
    return usual_config(
        r,
        max_positions=2048,
        rope=r.rope(default_partial=0.5),
        wiring="parallel",
        norm="layer",
        norm_eps=r.number("layer_norm_eps", 1e-5),
        activation=r.activation("hidden_act", "gelu_new"),
        gated=False,
        qkv_bias=True,
        o_bias=True,
        mlp_bias=True,
        head_bias=True,
        qk_norm="head" if r.flag("qk_layernorm", False) else "",
        names=tensor_names(
            norm="model.final_layernorm",
            mlp_norm="",
            o=".self_attn.dense",
            q_norm=".self_attn.q_layernorm",
            k_norm=".self_attn.k_layernorm",
            up=".mlp.fc1",
            down=".mlp.fc2",
        ),
    )


def phi3(r: ConfigReader) -> DecoderConfig:
    return usual_config(
        r,
        max_positions=4096,
        rope=r.rope(default_partial=1.0),
        norm_eps=r.number("rms_norm_eps", 1e-5),
        windows=(r.optional("sliding_window"),) * r.layers(),
        names=tensor_names(qkv=".self_attn.qkv_proj", gate_up=".mlp.gate_up_proj"),
    )


class Phi(DecoderArchitecture):
    configs = {"PhiForCausalLM": phi, "Phi3ForCausalLM": phi3}
