"""Asking a model what its attention needs: one pass over a few tokens on the meta device, no weights, no arithmetic."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from lmkit.api import AttnNeed, LayerInfo, LmkitError
from torch import Tensor, nn

from lmkit_model_transformers.skeleton import Skeleton, connect, refuse

TOKENS = 3


@dataclass(frozen=True, slots=True)
class Found:
    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    max_length: int
    num_parameters: int
    tied: bool
    layers: tuple[LayerInfo, ...]
    weights: tuple[tuple[str, str], ...]  # name in the checkpoint, name in TransformersModel
    ignored: tuple[str, ...]  # names that some checkpoints have beside


@lru_cache(maxsize=4)
def probe(text: str) -> Found:
    """`text`: config.json. Raises UnsupportedModel with the reason why the model cannot be served."""
    skeleton = Skeleton(text, torch.float32)
    needs: dict[int, AttnNeed] = {}

    def record(module: nn.Module, q: Tensor, k: Tensor, v: Tensor, kwargs: dict[str, Any]) -> Tensor:
        index = int(module.layer_idx)  # type: ignore[arg-type]
        if index in needs:
            raise refuse(skeleton.architecture, f"layer {index} attends twice")
        if k.shape[0] != TOKENS or q.shape[0] != TOKENS:
            raise refuse(skeleton.architecture, f"layer {index} attends to other tokens than its own")
        needs[index] = need_of(q, k, v, kwargs)
        return q.new_empty(q.shape[0], q.shape[1], v.shape[2])

    body = skeleton.body.to("meta")
    connect(body, record)
    ids = torch.zeros(1, TOKENS, dtype=torch.int64, device="meta")
    try:
        with torch.no_grad():
            out = body(input_ids=ids, position_ids=ids, use_cache=False)
            skeleton.recall.hidden = out[0]
            skeleton.whole.to("meta")(input_ids=ids, use_cache=False)
    except LmkitError:
        raise
    except Exception as e:
        raise refuse(
            skeleton.architecture,
            f"its code does not run apart from values and caches ({type(e).__name__}: {e!s:.200})",
        ) from e
    config = skeleton.config
    if sorted(needs) != list(range(config.num_hidden_layers)):
        reason = f"{len(needs)} of its {config.num_hidden_layers} layers use the attention interface"
        raise refuse(skeleton.architecture, reason)
    prefix = f"{skeleton.prefix}."
    weights = [
        (name, f"body.{name.removeprefix(prefix)}" if name.startswith(prefix) else f"whole.{name}")
        for name in skeleton.names
    ]
    inner = int(getattr(config, "intermediate_size", None) or 4 * out[0].shape[-1])
    return Found(
        architecture=skeleton.architecture,
        vocab_size=int(config.vocab_size),
        hidden_size=int(out[0].shape[-1]),
        intermediate_size=inner,
        max_length=int(getattr(config, "max_position_embeddings", None) or 2048),
        num_parameters=skeleton.num_parameters,
        tied=skeleton.tied,
        layers=tuple(LayerInfo(i, needs[i]) for i in sorted(needs)),
        weights=tuple(weights),
        ignored=("lm_head.weight", "embed_out.weight") if skeleton.tied else (),
    )


def need_of(q: Tensor, k: Tensor, v: Tensor, kwargs: dict[str, Any]) -> AttnNeed:
    """The need behind one call of the attention interface."""
    v_dim = v.shape[2] if v.shape[2] != q.shape[2] else None
    return AttnNeed(
        head_dim=q.shape[2],
        num_q_heads=q.shape[1],
        num_kv_heads=k.shape[1],
        v_head_dim=v_dim,
        window=kwargs.get("sliding_window"),
        softcap=kwargs.get("softcap"),
        sinks=kwargs.get("s_aux") is not None,
        causal=kwargs.get("is_causal", True) is not False,
    )
