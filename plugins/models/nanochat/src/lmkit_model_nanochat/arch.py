"""nanochat as data. Torch-free."""

from __future__ import annotations

from lmkit_decoders import ConfigReader, DecoderArchitecture, DecoderConfig, tensor_names, usual_config


def nanochat(r: ConfigReader) -> DecoderConfig:
    bias = r.flag("attention_bias", False)
    return usual_config(
        r,
        max_positions=2048,
        norm="rms_plain",
        embed_norm=True,
        qk_norm="head",
        qk_norm_last=True,
        activation=r.activation("hidden_act", "relu2"),
        gated=False,
        logit_softcap=r.limit("final_logit_softcapping", 15.0),
        qkv_bias=bias,
        o_bias=bias,
        names=tensor_names(up=".mlp.fc1", down=".mlp.fc2"),
    )


class Nanochat(DecoderArchitecture):
    configs = {"NanoChatForCausalLM": nanochat}
    models = {"NanoChatForCausalLM": "lmkit_model_nanochat.model:NanoChat"}
