"""Models of Mamba layers, alone or with attention in some. Torch-free."""

from __future__ import annotations

from typing import Any

from lmkit.api import UnsupportedModel
from lmkit_decoders import (
    MAMBA,
    ConfigReader,
    DecoderArchitecture,
    DecoderConfig,
    MoEConfig,
    hybrid_mamba2,
    mamba2_mixer,
    mamba_mixer,
    mamba_names,
    negative_exp,
    tensor_names,
    time_step_limits,
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
HYBRID = {  # roles of blocks with an MLP, and with attention in some layers
    "norm": "model.final_layernorm",
    "mlp_norm": ".pre_ff_layernorm",
    **{part: f".feed_forward.{part}_proj" for part in ("gate", "up", "down")},
    **mamba_names(".mamba"),
}
MAX_LENGTH = 1 << 17  # where the file does not say it: nothing in the model depends on positions


def decoder(r: ConfigReader, tie: bool, **given: Any) -> DecoderConfig:
    r.activation(known=("silu",))
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
        wiring="alone",
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
        width=r.kernel_width("conv_kernel", 4),
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
    mixer = mamba2_mixer(
        layers=(True,) * r.layers(),
        hidden_size=r.integer("hidden_size"),
        heads=heads,
        head_dim=head_dim,
        groups=groups,
        state_size=r.integer("state_size", 128),
        width=r.kernel_width("conv_kernel", 4),
        bias=r.flag("use_bias", False),
        conv_bias=r.flag("use_conv_bias", True),
        norm_groups=groups,
        dt_limits=time_step_limits(r),
    )
    return decoder(r, False, mixer=mixer)


def bamba(r: ConfigReader) -> DecoderConfig:
    r.activation(known=("silu",))
    attends = r.layer_numbers("attn_layer_indices")
    bias = r.flag("attention_bias", False)
    return usual_config(
        r,
        num_kv_heads=r.optional("num_key_value_heads", 8) or r.integer("num_attention_heads"),
        max_positions=262144,
        norm_eps=r.number("rms_norm_eps", 1e-5),
        rope=r.rope(default_partial=0.5),
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=r.flag("mlp_bias", False),
        mixer=hybrid_mamba2(r, tuple(i not in attends for i in range(r.layers()))),
        names=tensor_names(**HYBRID),
    )


def every(r: ConfigReader, kind: str, period: int, offset: int) -> tuple[bool, ...]:
    """Which layers have what stands in one of each `kind`_layer_period."""
    period, offset = r.integer(f"{kind}_layer_period", period), r.count(f"{kind}_layer_offset", offset)
    return tuple(i % period == offset for i in range(r.layers()))


def jamba(r: ConfigReader) -> DecoderConfig:
    r.activation(known=("silu",))
    eps, d, rank = r.number("rms_norm_eps", 1e-6), r.integer("hidden_size"), r.config.get("mamba_dt_rank", "auto")
    mixer = mamba_mixer(
        layers=tuple(not attends for attends in every(r, "attn", 8, 4)),
        hidden_size=d,
        size=r.integer("mamba_expand", 2) * d,
        state_size=r.integer("mamba_d_state", 16),
        width=r.kernel_width("mamba_d_conv", 4),
        rank=0 if rank == "auto" else r.integer("mamba_dt_rank"),
        bias=r.flag("mamba_proj_bias", False),
        conv_bias=r.flag("mamba_conv_bias", True),
        norm="rms",
        norm_eps=eps,
    )
    moe = MoEConfig(
        num_experts=r.integer("num_experts", 16),
        top_k=r.integer("num_experts_per_tok", 2),
        size=r.integer("intermediate_size"),
        layers=every(r, "expert", 2, 1),
        renormalize=False,
    )
    experts = {f"expert_{part}": f".feed_forward.experts.{{e}}.{part}_proj" for part in ("gate", "up", "down")}
    return usual_config(
        r,
        num_kv_heads=r.optional("num_key_value_heads", 8) or r.integer("num_attention_heads"),
        max_positions=262144,
        rope=None,
        mixer=mixer,
        moe=moe if moe.num_experts > 1 else None,
        names=tensor_names(**HYBRID, **experts, router=".feed_forward.router"),
    )


class MambaFamily(DecoderArchitecture):
    configs = {
        "MambaForCausalLM": mamba,
        "Mamba2ForCausalLM": mamba2,
        "FalconMambaForCausalLM": falcon_mamba,
        "BambaForCausalLM": bamba,
        "JambaForCausalLM": jamba,
    }
    models = {
        "MambaForCausalLM": "lmkit_model_mamba.model:MambaModel",
        "FalconMambaForCausalLM": "lmkit_model_mamba.model:MambaModel",
        "JambaForCausalLM": "lmkit_model_mamba.model:MambaModel",
        "Mamba2ForCausalLM": "lmkit_model_mamba.model:Mamba2Model",
        "BambaForCausalLM": "lmkit_model_mamba.model:Mamba2Model",
    }
    transforms = {name: {"mamba_A": negative_exp} for name in configs}
    spellings = {
        "num_experts": ("num_local_experts",),
    }
    targets = MAMBA
