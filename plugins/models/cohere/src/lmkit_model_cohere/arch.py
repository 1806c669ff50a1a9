"""Cohere's Command models as data: attention and MLP side by side, scaled logits. Torch-free."""

from __future__ import annotations

from typing import Any

from lmkit_decoders import (
    EXPERTS,
    ConfigReader,
    DecoderArchitecture,
    DecoderConfig,
    MoEConfig,
    tensor_names,
    usual_config,
)


def cohere(r: ConfigReader, **more: Any) -> DecoderConfig:
    bias = r.flag("attention_bias", False)
    usual = {
        "rope": r.rope(500000.0),
        "norm": "layer_no_bias",
        "norm_eps": r.number("layer_norm_eps", 1e-5),
        "names": tensor_names(mlp_norm=""),
    }
    return usual_config(
        r,
        max_positions=8192,
        wiring="parallel",
        interleaved=True,
        logit_scale=r.number("logit_scale", 0.0625),
        qk_norm="each" if r.flag("use_qk_norm", False) else "",
        tie=r.flag("tie_word_embeddings", True),
        qkv_bias=bias,
        o_bias=bias,
        **{**usual, **more},
    )


def cohere2(r: ConfigReader) -> DecoderConfig:
    windows = r.windows(lambda i: (i + 1) % r.integer("sliding_window_pattern", 4) != 0, 4096)
    unturned = tuple(i for i, window in enumerate(windows) if window is None)
    return cohere(r, rope=r.rope(), windows=windows, unturned=unturned)


def cohere2_moe(r: ConfigReader) -> DecoderConfig:
    """The first layers may be dense, with a pattern of windows of their own; a pattern of 1 turns all of them."""
    num_dense = r.count("first_k_dense_replace", 0)
    pattern, dense_pattern = r.integer("sliding_window_pattern", 4), r.integer("prefix_dense_sliding_window_pattern", 1)

    def slides(i: int) -> bool:
        return (i + 1) % dense_pattern != 0 if i < num_dense else (i - num_dense + 1) % pattern != 0

    windows = r.windows(slides, 4096)
    kinds = r.layer_kinds(lambda i: "dense" if i < num_dense else "sparse", ("dense", "sparse"), "mlp_layer_types")
    turned = [kind == "dense" and dense_pattern == 1 for kind in kinds]
    rms = r.limit("rms_norm_eps")
    return cohere(
        r,
        rope=r.rope(),
        head_dim=r.integer("head_dim", 128),
        intermediate_size=r.integer("prefix_dense_intermediate_size", r.integer("intermediate_size")),
        norm="layer_no_bias" if rms is None else "rms",
        norm_eps=rms or r.number("layer_norm_eps", 1e-5),
        windows=windows,
        unturned=tuple(i for i, window in enumerate(windows) if window is None and not turned[i]),
        moe=experts(r, tuple(kind == "sparse" for kind in kinds)),
        names=tensor_names(mlp_norm="", **EXPERTS),
    )


def experts(r: ConfigReader, layers: tuple[bool, ...]) -> MoEConfig:
    scoring = r.one_of("expert_selection_fn", ("softmax", "sigmoid"), "softmax")
    size = r.integer("intermediate_size")
    return MoEConfig(
        num_experts=r.integer("num_experts", 8),
        top_k=r.integer("num_experts_per_tok", 2),
        size=size,
        layers=layers,
        scoring=scoring,
        renormalize=scoring == "softmax" or r.flag("norm_topk_prob", True),
        shared_size=size * r.count("num_shared_experts", 0),
    )


def averaged(r: ConfigReader) -> dict[str, bool]:
    """Whether routed and shared experts are averaged rather than added."""
    average = r.one_of("shared_expert_combination_strategy", ("average", "sum"), "average") == "average"
    return {"average": average and r.count("num_shared_experts", 0) > 0}


class Cohere(DecoderArchitecture):
    configs = {"CohereForCausalLM": cohere, "Cohere2ForCausalLM": cohere2, "Cohere2MoeForCausalLM": cohere2_moe}
    models = {"Cohere2MoeForCausalLM": "lmkit_model_cohere.model:Cohere2Moe"}
    options = {"Cohere2MoeForCausalLM": averaged}
