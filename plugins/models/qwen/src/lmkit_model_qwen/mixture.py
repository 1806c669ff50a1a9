"""Mixtures of experts of the Qwens. Torch-free."""

from __future__ import annotations

from typing import Any

from lmkit_decoders import EXPERTS, ConfigReader, MoEConfig

SHARED = {
    **EXPERTS,
    **{f"shared_{p}": f".mlp.shared_expert.{p}_proj" for p in ("gate", "up", "down")},
    "shared_weight": ".mlp.shared_expert_gate.weight",
}


def experts(r: ConfigReader, **given: Any) -> MoEConfig:
    """Experts in every `decoder_sparse_step`-th layer, but not in `mlp_only_layers`."""
    step, without = r.integer("decoder_sparse_step", 1), r.layer_numbers("mlp_only_layers")
    return MoEConfig(
        layers=tuple(i not in without and (i + 1) % step == 0 for i in range(r.layers())),
        **{"renormalize": r.flag("norm_topk_prob", False), **given},
    )


def shared_expert(r: ConfigReader) -> dict[str, Any]:
    return {"shared_size": r.integer("shared_expert_intermediate_size", 512)}
