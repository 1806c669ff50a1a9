"""gpt-oss as data: sinks, every other layer windowed, experts with biases and a clamped gate. Torch-free.

Experts stored in 4 bits (MXFP4), as they are published, are [E, out, groups, 16] bytes with scales [E, out, groups].
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from lmkit.api import LinearSpec
from lmkit_decoders import (
    EACH_EXPERT,
    ConfigReader,
    DecoderArchitecture,
    DecoderConfig,
    MoEConfig,
    OneTensor,
    each_expert,
    tensor_names,
    usual_config,
)

if TYPE_CHECKING:
    from torch import Tensor


STRETCHED = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


PACKED = {"blocks": "weight_packed", "scales": "weight_scale"}  # of experts in 4 bits: names in files, and here


class GptOssConfig(DecoderConfig):
    """Experts have biases."""

    def expert_linears(self, i: int) -> list[LinearSpec]:
        return [replace(spec, bias=True) for spec in super().expert_linears(i)]


def gpt_oss(r: ConfigReader) -> DecoderConfig:
    r.one_of("swiglu_alpha", (1.702,), 1.702)
    r.one_of("swiglu_limit", (7.0,), 7.0)
    bias, experts = r.flag("attention_bias", True), ".mlp.experts"
    moe = MoEConfig(
        num_experts=r.integer("num_local_experts", 128),
        top_k=r.integer("num_experts_per_tok", 4),
        size=r.integer("intermediate_size", 2880),
        layers=(True,) * r.layers(),
        activation="swiglu_clamped",
    )
    return usual_config(
        r,
        kind=GptOssConfig,
        max_positions=131072,
        rope=r.rope(150000.0, missing=STRETCHED),
        windows=r.windows(lambda i: i % 2 == 0, 128),
        num_kv_heads=r.integer("num_key_value_heads", 8),
        head_dim=r.integer("head_dim", 64),
        norm_eps=r.number("rms_norm_eps", 1e-5),
        sinks=True,
        qkv_bias=bias,
        o_bias=bias,
        moe=moe,
        names=tensor_names(
            router=".mlp.router",
            **each_expert(".mlp"),
            experts_up=f"{experts}.gate_up_proj",
            experts_up_bias=f"{experts}.gate_up_proj_bias",
            experts_down=f"{experts}.down_proj",
            experts_down_bias=f"{experts}.down_proj_bias",
            **{
                f"experts_{role}_{part}": f"{experts}.{name}_proj_{part}"
                for role, name in (("up", "gate_up"), ("down", "down"))
                for part in PACKED
            },
        ),
    )


def gates_first(cfg: DecoderConfig, weight: Tensor) -> Tensor:
    """[E, in, 2 M] (bias [E, 2 M]) with gate and up in turn -> [E * 2 M, in] with all gates of an expert first."""
    halves = weight.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)
    return halves.transpose(1, 2).flatten(0, 1) if halves.dim() == 3 else halves.flatten()


def transposed_experts(cfg: DecoderConfig, weight: Tensor) -> Tensor:
    """[E, in, out] -> [E * out, in]; a bias [E, out] -> [E * out]."""
    return weight.transpose(1, 2).flatten(0, 1) if weight.dim() == 3 else weight.flatten()


def packed_gates_first(cfg: DecoderConfig, stored: Tensor) -> Tensor:
    """[E, 2 M, ...] with gate and up in turn -> [E * 2 M, the rest in one] with all gates of an expert first."""
    return stored.unflatten(1, (-1, 2)).transpose(1, 2).flatten(0, 2).flatten(1)


def packed_experts(cfg: DecoderConfig, stored: Tensor) -> Tensor:
    """[E, out, ...] -> [E * out, the rest in one]."""
    return stored.flatten(0, 1).flatten(1)


class GptOss(DecoderArchitecture):
    spellings = {
        "num_local_experts": ("num_experts",),
        "num_experts_per_tok": ("experts_per_token",),
    }
    configs = {"GptOssForCausalLM": gpt_oss}
    config = GptOssConfig
    models = {"GptOssForCausalLM": "lmkit_model_gpt_oss.model:GptOss"}
    targets = {
        **EACH_EXPERT,
        "experts_up_bias": OneTensor("layers.{i}.mlp.experts.up.bias", "*"),
        "experts_down_bias": OneTensor("layers.{i}.mlp.experts.down.bias", "*"),
        **{
            f"experts_{role}_{part}": OneTensor(f"layers.{{i}}.mlp.experts.{role}.{to}", "*")
            for role in ("up", "down")
            for part, to in PACKED.items()
        },
    }
    transforms = {
        "GptOssForCausalLM": {
            "experts_up": gates_first,
            "experts_up_bias": gates_first,
            "experts_down": transposed_experts,
            "experts_down_bias": transposed_experts,
            **{f"experts_up_{part}": packed_gates_first for part in PACKED},
            **{f"experts_down_{part}": packed_experts for part in PACKED},
        }
    }

    def extra_parameters(self, name: str, cfg: DecoderConfig) -> int:
        """The biases of routers."""
        assert cfg.moe is not None
        return cfg.moe.num_experts * sum(cfg.moe.layers)
