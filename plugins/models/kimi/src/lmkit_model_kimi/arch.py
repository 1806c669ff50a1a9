"""Kimi Linear (https://arxiv.org/abs/2510.26692) as data. Torch-free.

Three of four layers have a delta net whose state forgets channel by channel; the others have latent attention without
positions. All but the first have experts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from lmkit.api import LinearSpec, StateTensor, UnsupportedModel
from lmkit_decoders import (
    LATENT,
    ConfigReader,
    DecoderArchitecture,
    DecoderConfig,
    MixerConfig,
    corrected_moe,
    latent_config,
    tensor_names,
    usual_config,
)

if TYPE_CHECKING:
    from torch import Tensor

FULL, LINEAR = "full_attention", "linear_attention"
MOE = ".block_sparse_moe"
NAMES = tensor_names(
    **LATENT,
    router=f"{MOE}.gate",
    correction=f"{MOE}.gate.e_score_correction_bias",
    **{
        f"expert_{part}": f"{MOE}.experts.{{e}}.{name}" for part, name in (("gate", "w1"), ("up", "w3"), ("down", "w2"))
    },
    **{f"shared_{part}": f"{MOE}.shared_experts.{part}_proj" for part in ("gate", "up", "down")},
    **{f"dense_{part}": f"{MOE}.{part}_proj" for part in ("gate", "up", "down")},  # as transformers writes it
    **{f"kda_{part}": f".self_attn.{part}_proj" for part in ("q", "k", "v", "o", "b", "f_a", "f_b", "g_a", "g_b")},
    **{f"kda_conv_{part}": f".self_attn.{part}_conv1d" for part in "qkv"},
    kda_norm=".self_attn.o_norm",
    kda=".self_attn",
)


def kimi_linear(r: ConfigReader) -> DecoderConfig:
    r.activation(known=("silu",))
    r.one_of("mla_use_nope", (True,), True)
    r.one_of("moe_router_activation_func", ("sigmoid",), "sigmoid")
    first = r.count("first_k_dense_replace", 1)
    kinds = r.layer_kinds(lambda i: "dense" if i < first else "sparse", ("dense", "sparse"), "mlp_layer_types")
    size = r.integer("moe_intermediate_size", 1024)
    moe = corrected_moe(
        r,
        num_experts=r.integer("num_experts", 256),
        top_k=r.integer("num_experts_per_token", 8),
        size=size,
        layers=tuple(kind == "sparse" for kind in kinds),
        renormalize=r.flag("moe_renormalize", True),
        scale=r.number("routed_scaling_factor", 2.446),
        num_groups=r.integer("num_expert_group", 1),
        top_groups=r.integer("topk_group", 1),
        shared_size=size * r.count("num_shared_experts", 1),
    )
    return usual_config(
        r,
        max_length=r.integer("model_max_length", 1048576),
        norm_eps=r.number("rms_norm_eps", 1e-5),
        moe=moe,
        mixer=delta_attention(r),
        names=NAMES,
        **latent_config(r, None),
    )


def delta_attention(r: ConfigReader) -> MixerConfig:
    """Newer files say it beside the rest, older ones in an object of its own, where layers are counted from 1."""
    if r.config.get("linear_attn_config") is not None:
        own = r.nested("linear_attn_config")
        full = own.config.get("full_attn_layers")
        if not isinstance(full, list) or any(type(i) is not int for i in full):
            raise UnsupportedModel("linear_attn_config.full_attn_layers", full, "a list of layers")
        layers = tuple(i + 1 not in full for i in range(r.layers()))
        kda = own.config.get("kda_layers")
        if kda != [i + 1 for i, linear in enumerate(layers) if linear]:
            raise UnsupportedModel("linear_attn_config.kda_layers", kda, "the layers that full_attn_layers leaves")
        heads, head_dim = own.integer("num_heads", 32), own.integer("head_dim", 128)
        width = own.kernel_width("short_conv_kernel_size", 4)
    else:
        kinds = r.layer_kinds(lambda i: LINEAR if i % 4 or not i else FULL, (FULL, LINEAR))
        layers = tuple(kind == LINEAR for kind in kinds)
        heads, head_dim = r.integer("linear_num_heads", 32), r.integer("linear_head_dim", 128)
        width = r.kernel_width("linear_conv_kernel_dim", 4)
    d, size = r.integer("hidden_size"), heads * head_dim
    low = ("f_a", "g_a", "b")
    return MixerConfig(
        layers=layers,
        state=(StateTensor("conv", (width - 1, 3 * size)), StateTensor("delta", (heads, head_dim, head_dim))),
        linears=(
            LinearSpec("qkv", d, (size,) * 3, False, "none", ("q", "k", "v"), ("kda_q", "kda_k", "kda_v")),
            LinearSpec("low", d, (head_dim, head_dim, heads), False, "none", low, tuple(f"kda_{p}" for p in low)),
            LinearSpec("f", head_dim, (size,), False, "none", (), ("kda_f_b",)),
            LinearSpec("g", head_dim, (size,), False, "none", (), ("kda_g_b",)),
            LinearSpec("o", size, (d,), False, "none", (), ("kda_o",)),
        ),
        num_parameters=3 * size * width + heads + size + head_dim,
        options={"heads": heads, "head_dim": head_dim, "width": width},
    )


def flat(cfg: DecoderConfig, weight: Tensor) -> Tensor:
    """[1, 1, H, 1] -> [H]."""
    return weight.flatten()


class KimiLinear(DecoderArchitecture):
    defaults = {"KimiLinearForCausalLM": {"qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}}
    spellings = {
        "model_max_length": ("max_position_embeddings",),
        "moe_renormalize": ("norm_topk_prob",),
        "num_expert_group": ("n_group",),
        "num_experts": ("num_local_experts",),
        "num_experts_per_token": ("num_experts_per_tok",),
        "num_shared_experts": ("n_shared_experts",),
    }
    configs = {"KimiLinearForCausalLM": kimi_linear}
    models = {"KimiLinearForCausalLM": "lmkit_model_kimi.model:KimiLinearModel"}
    transforms = {"KimiLinearForCausalLM": {"kda": flat}}
    targets = {
        **{f"kda_{part}": ("{mixer}.qkv", part) for part in "qkv"},
        **{f"kda_{part}": ("{mixer}.low", part) for part in ("f_a", "g_a", "b")},
        **{f"kda_conv_{part}": ("{mixer}.conv", part) for part in "qkv"},
        **{f"kda_{part}_b": f"{{mixer}}.{part}" for part in "fg"},
        "kda_o": "{mixer}.o",
        "kda_norm": "{mixer}.norm",
        "kda": "{mixer}",
        "dense_gate": ("layers.{i}.mlp.gate_up", "gate"),
        "dense_up": ("layers.{i}.mlp.gate_up", "up"),
        "dense_down": "layers.{i}.mlp.down",
    }
