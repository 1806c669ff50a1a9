"""StableLM and Orion as data: layer norms; StableLM turns a quarter of each head. Torch-free."""

from __future__ import annotations

from lmkit_decoders import ConfigReader, DecoderArchitecture, DecoderConfig, tensor_names, usual_config


def stablelm(r: ConfigReader) -> DecoderConfig:
    parallel = r.flag("use_parallel_residual", False)
    heads = {f"{p}_norm": f".self_attn.{p}_layernorm.norms.{{n}}" for p in "qk"}
    return usual_config(
        r,
        max_positions=4096,
        rope=r.rope(default_partial=0.25),
        wiring="parallel" if parallel else "pre",
        norm="layer",
        norm_eps=r.number("layer_norm_eps", 1e-5),
        qk_norm="each" if r.flag("qk_layernorm", False) else "",
        qkv_bias=r.flag("use_qkv_bias", False),
        names=tensor_names(**heads, mlp_norm="") if parallel else tensor_names(**heads),
    )


def orion(r: ConfigReader) -> DecoderConfig:
    """A Llama with layer norms."""
    r.one_of("pretraining_tp", (1,), 1)
    r.one_of("attention_bias", (None, False))
    return usual_config(r, max_positions=4096, norm="layer", norm_eps=r.number("rms_norm_eps", 1e-5))


class Stablelm(DecoderArchitecture):
    defaults = {"StableLmForCausalLM": {"num_key_value_heads": 32}}
    configs = {"StableLmForCausalLM": stablelm, "OrionForCausalLM": orion}
