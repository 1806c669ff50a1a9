"""InternLM2 as data: Llama with other names, and one projection that holds queries, keys and values by group."""

from __future__ import annotations

from lmkit_decoders import ConfigReader, DecoderArchitecture, DecoderConfig, split_per_group, tensor_names, usual_config


def internlm2(r: ConfigReader) -> DecoderConfig:
    bias = r.flag("bias", True)
    return usual_config(
        r,
        max_positions=2048,
        qkv_bias=bias,
        o_bias=bias,
        names=tensor_names(
            "model.layers.{i}",
            embed="model.tok_embeddings",
            lm_head="output",
            attn_norm=".attention_norm",
            mlp_norm=".ffn_norm",
            qkv=".attention.wqkv",
            o=".attention.wo",
            gate=".feed_forward.w1",
            up=".feed_forward.w3",
            down=".feed_forward.w2",
        ),
    )


class InternLM2(DecoderArchitecture):
    configs = {"InternLM2ForCausalLM": internlm2}
    transforms = {"InternLM2ForCausalLM": {"qkv": split_per_group}}
