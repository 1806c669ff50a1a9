"""OPT and BioGPT as data: learned positions from the third row of their table on. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from lmkit.api import LinearSpec, ModelInfo
from lmkit_decoders import ConfigReader, DecoderArchitecture, DecoderConfig, tensor_names, usual_config

FIRST_ROW = 2  # of the table of learned positions


def opt(r: ConfigReader) -> DecoderConfig:
    bias = r.flag("enable_bias", True)
    given = common(r, "model.decoder", "final_layer_norm", "lm_head")
    if not r.flag("layer_norm_elementwise_affine", True):
        given["norm"] = "layer_plain"
    given["names"] |= {part: f"model.decoder.{part}" for part in ("project_in", "project_out")}
    return usual_config(
        r,
        **given,
        intermediate_size=r.integer("ffn_dim", 3072),
        activation=r.activation("activation_function", "relu"),
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=bias,
    )


def biogpt(r: ConfigReader) -> DecoderConfig:
    return usual_config(
        r,
        **common(r, "biogpt", "layer_norm", "output_projection", max_positions=1024),
        intermediate_size=r.integer("intermediate_size", 4096),
        activation=r.activation("hidden_act", "gelu"),
        embed_scale=r.integer("hidden_size") ** 0.5 if r.flag("scale_embedding", True) else 1.0,
        qkv_bias=True,
        o_bias=True,
        mlp_bias=True,
    )


def common(r: ConfigReader, model: str, norm: str, head: str, max_positions: int = 2048) -> dict[str, Any]:
    length, heads = r.integer("max_position_embeddings", max_positions), r.integer("num_attention_heads")
    return {
        "rope": None,
        "num_kv_heads": heads,
        "head_dim": r.integer("hidden_size") // heads,
        "max_length": length,
        "num_positions": length + FIRST_ROW,
        "norm": "layer",
        "norm_eps": 1e-5,
        "gated": False,
        "tie": r.flag("tie_word_embeddings", True),
        "names": tensor_names(
            f"{model}.layers.{{i}}",
            embed=f"{model}.embed_tokens",
            positions=f"{model}.embed_positions",
            norm=f"{model}.{norm}",
            lm_head=head,
            attn_norm=".self_attn_layer_norm",
            mlp_norm=".final_layer_norm",
            o=".self_attn.out_proj",
            up=".fc1",
            down=".fc2",
        ),
    }


def shape(r: ConfigReader) -> Mapping[str, Any]:
    """The size of embeddings, which projections lead to and from; where norms stand."""
    before = r.flag("do_layer_norm_before", True)
    return {
        "size": r.integer("word_embed_proj_dim", 768),
        "norms_before": before,
        "final_norm": before and not r.flag("_remove_final_layer_norm", False),
    }


class Opt(DecoderArchitecture):
    configs = {"OPTForCausalLM": opt, "BioGptForCausalLM": biogpt}
    models = {"OPTForCausalLM": "lmkit_model_opt.model:OptModel", "BioGptForCausalLM": "lmkit_model_opt.model:BioGpt"}
    options = {"OPTForCausalLM": shape}
    targets = {"project_in": "project_in", "project_out": "project_out"}

    def describe(self, config: Mapping[str, object]) -> ModelInfo:
        info = super().describe(config)
        options = info.config.get("options", {"size": info.hidden_size, "final_norm": True})
        narrow = options["size"] != info.hidden_size
        linears = [replace(s, in_features=options["size"]) if s.name == "lm_head" else s for s in info.linears]
        heads = 1 + (not info.tie_embeddings)
        extra = heads * info.vocab_size * (options["size"] - info.hidden_size)
        if narrow:
            linears += projections(info.hidden_size, options["size"])
            extra += 2 * info.hidden_size * options["size"]
        if not options["final_norm"] and info.config["norm"] == "layer":
            extra -= 2 * info.hidden_size
        return replace(info, linears=tuple(linears), num_parameters=info.num_parameters + extra)


def projections(hidden: int, size: int) -> list[LinearSpec]:
    sizes = {"project_in": (size, hidden), "project_out": (hidden, size)}
    return [LinearSpec(name, a, (b,), sources=(f"model.decoder.{name}",)) for name, (a, b) in sizes.items()]
