"""BitNet (weights that have been unpacked) as data. Torch-free."""

from __future__ import annotations

from lmkit_decoders import ConfigReader, DecoderArchitecture, DecoderConfig, tensor_names, usual_config


def bitnet(r: ConfigReader) -> DecoderConfig:
    bias = r.flag("attention_bias", False)
    return usual_config(
        r,
        max_positions=2048,
        rope=r.rope(5e5),
        norm_eps=r.number("rms_norm_eps", 1e-5),
        activation=r.activation("hidden_act", "relu2"),
        qkv_bias=bias,
        o_bias=bias,
        names=tensor_names(sub_norm=".self_attn.attn_sub_norm", mlp_sub_norm=".mlp.ffn_sub_norm"),
    )


class Bitnet(DecoderArchitecture):
    defaults = {"BitNetForCausalLM": {"num_key_value_heads": 5}}
    configs = {"BitNetForCausalLM": bitnet}
    models = {"BitNetForCausalLM": "lmkit_model_bitnet.model:BitNet"}
    targets = {"sub_norm": "layers.{i}.attn.sub_norm", "mlp_sub_norm": "layers.{i}.mlp.sub_norm"}

    def extra_parameters(self, name: str, cfg: DecoderConfig) -> int:
        return (cfg.hidden_size + cfg.intermediate_size) * len(cfg.windows)
