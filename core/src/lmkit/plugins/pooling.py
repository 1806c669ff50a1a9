"""What a pooling model answers with: from its architecture, the checkpoint's modules and the user. Torch-free."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any, cast

from lmkit.api import Checkpoint, ConfigError, DenseInfo, ModelInfo, PoolerInfo, PoolingTask, UnsupportedModel
from lmkit.contracts.pooling import CAUSAL, HEADS, decoder_name

REDUCTIONS = {"cls": "cls", "lasttoken": "last", "mean": "mean", "max": "max"}
LEGACY = {  # keys of older files, one flag each
    "pooling_mode_cls_token": "cls",
    "pooling_mode_lasttoken": "lasttoken",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
}
ACTIVATIONS = {"Identity": "none", "Tanh": "tanh", "ReLU": "relu", "GELU": "gelu", "SiLU": "silu"}


def find_head(checkpoint: Checkpoint, known: Collection[str], task: str) -> tuple[str, PoolingTask | None]:
    """(architecture whose plugin builds it, the pooling head put on it or None for its own).

    `known`: architectures with a plugin; `task`: the user's, or "auto".
    """
    name = checkpoint.architecture
    if name.endswith(CAUSAL):
        embeds = task in ("embed", "token_embed") or (task == "auto" and bool(checkpoint.modules))
        return name, "embed" if embeds else None
    ending = next((e for e in HEADS if name.endswith(e)), "")
    if name not in known and decoder_name(name) in known:
        return decoder_name(name), HEADS[ending]
    return name, None


def complete_pooler(info: ModelInfo, checkpoint: Checkpoint, task: str) -> PoolerInfo | None:
    """The architecture's pooler with what modules.json says. Raises ConfigError when it cannot do the user's `task`."""
    pooler = info.pooler
    offered: tuple[str, ...] = ("generate",) if pooler is None else pooler.tasks
    if task not in ("auto", *offered):
        raise ConfigError(f"--task {task}: a {checkpoint.architecture} can {', '.join(offered)}", fix="--task auto")
    if pooler is None or "embed" not in pooler.task or not checkpoint.modules:
        return pooler
    pooler = replace(pooler, normalize=False)
    for module in checkpoint.modules:
        pooler = _with_module(
            pooler, str(module["type"]), str(module["path"]), cast("Mapping[str, Any]", module["config"])
        )
    if not any(module["type"] == "Pooling" for module in checkpoint.modules):  # one vector per token (ColBERT)
        pooler = replace(pooler, task="token_embed", normalize=True)
    return pooler


def max_length(checkpoint: Checkpoint) -> int | None:
    """`max_seq_length` of the checkpoint's Transformer module."""
    for module in checkpoint.modules:
        length = cast("Mapping[str, Any]", module["config"]).get("max_seq_length")
        if module["type"] == "Transformer" and isinstance(length, int) and length > 0:
            return length
    return None


def _with_module(pooler: PoolerInfo, kind: str, path: str, config: Mapping[str, Any]) -> PoolerInfo:
    match kind:
        case "Transformer":
            return pooler
        case "Pooling":
            return replace(pooler, reduce=cast("Any", _reduction(config, path)))
        case "Dense":
            dense = _dense(config, path, pooler.size)
            return replace(pooler, size=dense.out_features, dense=(*pooler.dense, dense))
        case "Normalize":
            return replace(pooler, normalize=True)
    raise UnsupportedModel("modules.json type", kind, "Transformer, Pooling, Dense, Normalize")


def _reduction(config: Mapping[str, Any], path: str) -> str:
    modes = config.get("pooling_mode") or [mode for key, mode in LEGACY.items() if config.get(key)] or "mean"
    mode = modes[0] if isinstance(modes, list) and len(modes) == 1 else modes
    if mode not in REDUCTIONS:
        raise UnsupportedModel(f"{path}/config.json pooling_mode", mode, f"one of {', '.join(REDUCTIONS)}")
    return REDUCTIONS[mode]


def _dense(config: Mapping[str, Any], path: str, size: int) -> DenseInfo:
    given, out = config.get("in_features"), config.get("out_features")
    if given != size or not isinstance(out, int) or not 1 <= out <= 1 << 20:
        raise UnsupportedModel(f"{path}/config.json in_features, out_features", (given, out), f"{size}, and a number")
    name = str(config.get("activation_function", "Identity")).rsplit(".", 1)[-1]
    if name not in ACTIVATIONS:
        raise UnsupportedModel(f"{path}/config.json activation_function", name, ", ".join(ACTIVATIONS))
    return DenseInfo(path, size, out, config.get("bias") is not False, cast("Any", ACTIVATIONS[name]))
