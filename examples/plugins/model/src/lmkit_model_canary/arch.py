"""Canary as data: what its configuration means, and where its tensors go. Torch-free: plans are made without it.

A family whose layers are no decoder's as lmkit_decoders knows them brings modules of its own: docs/add_a_model.md.
"""

from lmkit_decoders import ConfigReader, DecoderArchitecture, DecoderConfig, tensor_names, usual_config


def canary(r: ConfigReader) -> DecoderConfig:
    """What differs from a Llama; a key that is there and is not read is refused, if it could change an answer."""
    return usual_config(
        r,
        max_positions=2048,
        qkv_bias=r.flag("attention_bias", False),
        o_bias=r.flag("attention_bias", False),
        mlp_bias=r.flag("mlp_bias", False),
        names=tensor_names(
            "blocks.{i}",
            embed="embed",
            norm="norm",
            lm_head="head",
            attn_norm=".norm_1",
            mlp_norm=".norm_2",
            qkv=".attn.qkv",  # queries, keys and values, one after another
            o=".attn.out",
            gate=".mlp.gate",
            up=".mlp.up",
            down=".mlp.down",
        ),
    )


class Canary(DecoderArchitecture):
    """Contract: lmkit.api.Architecture."""

    configs = {"CanaryForCausalLM": canary}
