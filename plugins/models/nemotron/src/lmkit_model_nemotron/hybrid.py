"""Nemotron-H as data: each layer is one block: Mamba 2, attention without positions, an MLP or experts. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import inf

from lmkit.api import LinearSpec, UnsupportedModel
from lmkit_decoders import (
    MAMBA,
    ConfigReader,
    DecoderArchitecture,
    DecoderConfig,
    MoEConfig,
    corrected_moe,
    mamba2_mixer,
    mamba_names,
    negative_exp,
    tensor_names,
    usual_config,
)

MAMBA2, ATTENTION, MLP, MOE = KINDS = ("linear_attention", "full_attention", "mlp", "moe")
OLD = {"M": MAMBA2, "*": ATTENTION, "-": MLP, "E": MOE, "mamba": MAMBA2, "attention": ATTENTION}
NAMES = tensor_names(
    "backbone.layers.{i}",
    embed="backbone.embeddings",
    norm="backbone.norm_f",
    attn_norm=".norm",
    mlp_norm="",
    router=".mixer.gate",
    correction=".mixer.gate.e_score_correction_bias",
    latent_in=".mixer.fc1_latent_proj",
    latent_out=".mixer.fc2_latent_proj",
    gate="",
    **{part: f".mixer.{part}_proj" for part in ("q", "k", "v", "o", "up", "down")},
    **{f"expert_{part}": f".mixer.experts.{{e}}.{part}_proj" for part in ("up", "down")},
    **{f"shared_{part}": f".mixer.shared_experts.{part}_proj" for part in ("up", "down")},
    **mamba_names(".mixer"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class NemotronConfig(DecoderConfig):
    mlp_only: tuple[int, ...] = ()  # layers that are an MLP, or experts, alone
    latent: int = 0  # size of what routed experts read and write, 0: the hidden size

    def attends(self, layer: int) -> bool:
        return layer not in self.mlp_only and not self.mixes(layer)

    def has_mlp(self, layer: int) -> bool:
        return layer in self.mlp_only

    def expert_linears(self, i: int) -> list[LinearSpec]:
        up, down, *shared = super(NemotronConfig, self).expert_linears(i)
        if not self.latent:
            return [up, down, *shared]
        narrow, size = (self.latent,), self.hidden_size
        down = replace(down, out_features=narrow * len(down.out_features))
        return [replace(up, in_features=self.latent), down, *shared] + [
            LinearSpec(f"layers.{i}.mlp.{name}", num_in, out, self.mlp_bias, "none", (), self.sources(i, name))
            for name, num_in, out in (("latent_in", size, narrow), ("latent_out", self.latent, (size,)))
        ]


def layer_kinds(r: ConfigReader) -> list[str]:
    """A list of kinds, or a text with a letter for each layer."""
    key = "layers_block_type" if r.config.get("layers_block_type") else "hybrid_override_pattern"
    given = r.config.get(key)
    kinds = [OLD.get(str(kind), kind) for kind in given] if isinstance(given, list | str) else []
    if not kinds or any(kind not in KINDS for kind in kinds):
        raise UnsupportedModel(key, given, f"layers of {', '.join((*KINDS, *OLD))}")
    if r.config.get("num_hidden_layers") not in (None, len(kinds)):
        raise UnsupportedModel("num_hidden_layers", r.config["num_hidden_layers"], f"{len(kinds)}, as {key} has")
    return kinds


def nemotron_h(r: ConfigReader) -> DecoderConfig:
    kinds = layer_kinds(r)
    r = ConfigReader({**r.config, "num_hidden_layers": len(kinds)})
    r.one_of("sliding_window", (None,))
    r.one_of("residual_in_fp32", (False,), False)
    r.activation("mamba_hidden_act", known=("silu",))
    heads, groups = r.integer("mamba_num_heads", 128), r.integer("n_groups", 8)
    if heads % groups:
        raise UnsupportedModel("mamba_num_heads", heads, f"a multiple of {groups}")
    mixer = mamba2_mixer(
        layers=tuple(kind == MAMBA2 for kind in kinds),
        hidden_size=r.integer("hidden_size"),
        heads=heads,
        head_dim=r.integer("mamba_head_dim", 64),
        groups=groups,
        state_size=r.integer("ssm_state_size", 128),
        width=r.kernel_width("conv_kernel", 4),
        bias=r.flag("use_bias", False),
        conv_bias=r.flag("use_conv_bias", True),
        norm_groups=groups,
        dt_limits=(r.number("time_step_min", 0.001), inf),
    )
    return usual_config(
        r,
        kind=NemotronConfig,
        latent=r.optional("moe_latent_size") or 0 if MOE in kinds else 0,
        max_positions=4096,
        intermediate_size=r.integer("intermediate_size", 21504),
        num_kv_heads=r.integer("num_key_value_heads", 8),
        head_dim=r.integer("head_dim", r.integer("attention_head_dim", 128)),
        norm_eps=r.number("layer_norm_epsilon", 1e-5),
        activation=r.activation("mlp_hidden_act", "relu2"),
        gated=False,
        rope=None,
        mlp_bias=r.flag("mlp_bias", False),
        wiring="alone",
        mlp_only=tuple(i for i, kind in enumerate(kinds) if kind in (MLP, MOE)),
        mixer=mixer,
        moe=experts(r, kinds) if MOE in kinds else None,
        names=NAMES,
    )


def experts(r: ConfigReader, kinds: list[str]) -> MoEConfig:
    r.one_of("n_shared_experts", (1,), 1)
    return corrected_moe(
        r,
        num_experts=r.integer("n_routed_experts", 8),
        top_k=r.integer("num_experts_per_tok", 2),
        size=r.integer("moe_intermediate_size", 7688),
        layers=tuple(kind == MOE for kind in kinds),
        shared_size=r.integer("moe_shared_expert_intermediate_size", 7688),
    )


class NemotronH(DecoderArchitecture):
    configs = {"NemotronHForCausalLM": nemotron_h}
    models = {"NemotronHForCausalLM": "lmkit_model_nemotron.model:NemotronHModel"}
    transforms = {"NemotronHForCausalLM": {"mamba_A": negative_exp}}
    config = NemotronConfig
    targets = {**MAMBA, **{name: f"layers.{{i}}.mlp.{name}" for name in ("latent_in", "latent_out")}}
    spellings = {
        "layers_block_type": ("layer_types",),
        "n_routed_experts": ("num_local_experts",),
        "time_step_min": ("mamba_dt_min",),
    }
    ignored = ("mtp.{any}",)
