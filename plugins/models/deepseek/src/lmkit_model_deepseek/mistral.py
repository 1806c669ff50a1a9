"""Mistral Large 3: latent attention and a mixture of experts, under Mistral's own names. Torch-free."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from lmkit_decoders import (
    ConfigReader,
    DecoderArchitecture,
    DecoderConfig,
    corrected_moe,
    latent_config,
    tensor_names,
    usual_config,
)

ORDER = {"gate": "w1", "up": "w3", "down": "w2"}
NAMES = tensor_names(
    "layers.{i}",
    embed="tok_embeddings",
    norm="norm",
    lm_head="output",
    attn_norm=".attention_norm",
    mlp_norm=".ffn_norm",
    q=".attention.wq",
    q_a=".attention.wq_a",
    q_a_norm=".attention.q_a_norm",
    q_b=".attention.wq_b",
    kv_a=".attention.wkv_a_with_mqa",
    kv_a_norm=".attention.kv_a_norm",
    kv_b=".attention.wkv_b",
    k="",
    v="",
    o=".attention.wo",
    router=".gate",
    **{part: f".feed_forward.{name}" for part, name in ORDER.items()},
    **{f"expert_{part}": f".experts.{{e}}.{name}" for part, name in ORDER.items()},
    **{f"shared_{part}": f".shared_experts.{name}" for part, name in ORDER.items()},
)


def mistral_large3(r: ConfigReader) -> DecoderConfig:
    """Softmax scores whose sum is 1 again after the choice; queries that grow with their position."""
    r.one_of("scoring_func", ("softmax",), "softmax")
    r.one_of("topk_method", (None,))
    r.one_of("moe_layer_freq", (1,), 1)
    r.one_of("n_group", (1,), 1)
    rope = yarn(r)
    moe = corrected_moe(r, scoring="softmax", correction=False, float32=False, num_groups=1, top_groups=1)
    given: dict[str, Any] = latent_config(r, rope)
    given["mla"] = replace(given["mla"], norm_eps=r.number("rms_norm_eps", 1e-6))
    if r.config.get("llama_4_scaling") is not None:
        growth = r.nested("llama_4_scaling")
        given["query_growth"] = (growth.number("beta"), growth.number("original_max_position_embeddings"))
    return usual_config(r, max_positions=128000, moe=moe, interleaved=True, names=NAMES, **given)


def yarn(r: ConfigReader) -> dict[str, Any]:
    """Rotary parameters. Unless `apply_yarn_scaling` says no, attention is sharper the further positions stretch; how
    long the turned vectors are never changes."""
    if r.config.get("rope_parameters") is None:
        return r.rope()
    parameters = dict(r.nested("rope_parameters").config)
    sharp = ConfigReader(parameters).flag("apply_yarn_scaling", True)
    parameters.pop("apply_yarn_scaling", None)
    rope = ConfigReader({**r.config, "rope_parameters": parameters, "rope_scaling": None}).rope()
    if rope["rope_type"] != "yarn":
        return rope
    return {**rope, "attention_factor": 1.0, "mscale_all_dim": rope.get("mscale_all_dim", 0.0) if sharp else 0.0}


class MistralLarge3(DecoderArchitecture):
    configs = {"MistralLarge3ForCausalLM": mistral_large3}
    spellings = {
        "hidden_size": ("dim",),
        "num_hidden_layers": ("n_layers",),
        "num_attention_heads": ("n_heads",),
        "intermediate_size": ("hidden_dim",),
        "rms_norm_eps": ("norm_eps",),
        "tie_word_embeddings": ("tied_embeddings",),
    }
