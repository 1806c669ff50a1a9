"""StarCoder2 as data: layer norms, biases everywhere, an MLP without gate. Torch-free."""

from __future__ import annotations

from lmkit_decoders import ConfigReader, DecoderArchitecture, DecoderConfig, tensor_names, usual_config


def starcoder2(r: ConfigReader) -> DecoderConfig:
    bias = r.flag("use_bias", True)
    return usual_config(
        r,
        max_positions=4096,
        num_kv_heads=r.integer("num_key_value_heads", 2),
        windows=(r.optional("sliding_window"),) * r.layers(),
        norm="layer",
        norm_eps=r.number("norm_epsilon", 1e-5),
        activation=r.activation("hidden_act", "gelu_pytorch_tanh"),
        gated=False,
        tie=r.flag("tie_word_embeddings", True),
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=bias,
        names=tensor_names(up=".mlp.c_fc", down=".mlp.c_proj"),
    )


class Starcoder2(DecoderArchitecture):
    configs = {"Starcoder2ForCausalLM": starcoder2}
