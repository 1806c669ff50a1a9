"""Models of Mamba layers only."""

from __future__ import annotations

from typing import Any

from lmkit.api import UnsupportedModel
from lmkit.layers import (
    MAMBA,
    ConfigReader,
    DecoderArchitecture,
    DecoderConfig,
    mamba2_mixer,
    mamba_mixer,
    mamba_names,
    negative_exp,
    tensor_names,
    usual_config,
)

NAMES = tensor_names(
    "backbone.layers.{i}",
    embed="backbone.embeddings",
    norm="backbone.norm_f",
    attn_norm=".norm",
    **dict.fromkeys(("mlp_norm", "q", "k", "v", "o", "q_norm", "k_norm", "sinks", "gate", "up", "down"), ""),
    **mamba_names(".mixer"),
)
MAX_LENGTH = 1 << 17  # where the file does not say it: nothing in the model depends on positions


def decoder(r: ConfigReader, tie: bool, **given: Any) -> DecoderConfig:
    r.one_of("hidden_act", ("silu",), "silu")
    return usual_config(
        r,
        num_q_heads=1,
        num_kv_heads=1,
        head_dim=2,
        intermediate_size=r.integer("expand", 2) * r.integer("hidden_size"),
        max_positions=MAX_LENGTH,
        norm_eps=r.number("layer_norm_epsilon", 1e-5),
        activation="silu",
        rope=None,
        tie=r.flag("tie_word_embeddings", tie),
        placement="alone",
        names=NAMES,
        **given,
    )


def mamba(r: ConfigReader, **given: Any) -> DecoderConfig:
    rank = r.config.get("time_step_rank", "auto")
    mixer = mamba_mixer(
        layers=(True,) * r.layers(),
        hidden_size=r.integer("hidden_size"),
        size=r.integer("intermediate_size", r.integer("expand", 2) * r.integer("hidden_size")),
        state_size=r.integer("state_size", 16),
        width=r.integer("conv_kernel", 4),
        rank=0 if rank == "auto" else r.integer("time_step_rank"),
        bias=r.flag("use_bias", False),
        conv_bias=r.flag("use_conv_bias", True),
        **given,
    )
    return decoder(r, True, mixer=mixer)


def falcon_mamba(r: ConfigReader) -> DecoderConfig:
    return mamba(r, norm="rms_plain", norm_eps=r.number("mixer_rms_eps", 1e-6))


def mamba2(r: ConfigReader) -> DecoderConfig:
    heads, head_dim, groups = r.integer("num_heads", 128), r.integer("head_dim", 64), r.integer("n_groups", 8)
    size = r.integer("expand", 2) * r.integer("hidden_size")
    if heads * head_dim != size or heads % groups:
        raise UnsupportedModel("num_heads", heads, f"{size} / {head_dim}, in {groups} groups")
    limits = r.config.get("time_step_limit", [0.0, float("inf")])
    limits = [float("inf") if n == {"__float__": "Infinity"} else n for n in limits] if isinstance(limits, list) else []
    if [type(limit) for limit in limits] != [float, float]:
        raise UnsupportedModel("time_step_limit", r.config["time_step_limit"], "two numbers")
    mixer = mamba2_mixer(
        layers=(True,) * r.layers(),
        hidden_size=r.integer("hidden_size"),
        heads=heads,
        head_dim=head_dim,
        groups=groups,
        state_size=r.integer("state_size", 128),
        width=r.integer("conv_kernel", 4),
        bias=r.flag("use_bias", False),
        conv_bias=r.flag("use_conv_bias", True),
        norm_groups=groups,
        dt_limits=(limits[0], limits[1]),
    )
    return decoder(r, False, mixer=mixer)


class MambaFamily(DecoderArchitecture):
    configs = {"MambaForCausalLM": mamba, "Mamba2ForCausalLM": mamba2, "FalconMambaForCausalLM": falcon_mamba}
    models = {
        "MambaForCausalLM": "lmkit_model_mamba.model:MambaModel",
        "FalconMambaForCausalLM": "lmkit_model_mamba.model:MambaModel",
        "Mamba2ForCausalLM": "lmkit_model_mamba.model:Mamba2Model",
    }
    transforms = {name: {"mamba_A": negative_exp} for name in configs}
    targets = MAMBA
