"""Asking a model what its attention needs: one pass over a few tokens on the meta device, no weights, no arithmetic."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from lmkit.api import AttnNeed, LayerInfo, LmkitError
from torch import Tensor, nn

from lmkit_model_transformers.building import refuse
from lmkit_model_transformers.routing import ASKING, Mask, connect
from lmkit_model_transformers.skeleton import Skeleton
from lmkit_model_transformers.stored import Stored

TOKENS = 3


@dataclass(frozen=True, slots=True)
class Found:
    """Layers are calls of attention, in their order."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    max_length: int
    num_parameters: int
    tied: bool
    layers: tuple[LayerInfo, ...]
    weights: Stored
    ignored: tuple[str, ...]  # names that some checkpoints have beside


@lru_cache(maxsize=4)
def probe(text: str) -> Found:
    """`text`: config.json. Raises UnsupportedModel with the reason why the model cannot be served."""
    skeleton = Skeleton(text, torch.float32, ASKING)
    needs: list[AttnNeed] = []
    attending: set[str] = set()
    config = skeleton.config.get_text_config()
    max_length = int(getattr(config, "max_position_embeddings", None) or 2048)

    def record(name: str, q: Tensor, k: Tensor, v: Tensor, mask: Any, kwargs: dict[str, Any]) -> Tensor:
        need = need_of(q, k, v, kwargs)
        reason = _unlike(need, q, k, mask, kwargs, max_length)
        if reason:
            raise refuse(skeleton.architecture, f"{name} {reason}")
        needs.append(need)
        attending.add(name)
        return q.new_empty(q.shape[0], q.shape[1], v.shape[2])

    body = skeleton.body.to("meta")
    connect(body, record)
    ids = torch.zeros(1, TOKENS, dtype=torch.int64, device="meta")
    try:
        with torch.no_grad():
            out = body(input_ids=ids, position_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False)
            skeleton.recall.hidden = out[0]
            skeleton.whole.to("meta")(input_ids=ids, use_cache=False)
    except LmkitError:
        raise
    except Exception as e:
        raise refuse(
            skeleton.architecture,
            f"its code does not run apart from values and caches ({type(e).__name__}: {e!s:.200})",
        ) from e
    silent = _silent(body, attending)
    if silent:
        raise refuse(skeleton.architecture, f"{silent} does not use the attention interface")
    return Found(
        architecture=skeleton.architecture,
        vocab_size=skeleton.vocab_size,
        hidden_size=int(out[0].shape[-1]),
        intermediate_size=int(getattr(config, "intermediate_size", None) or 4 * out[0].shape[-1]),
        max_length=max_length - skeleton.first_position,
        num_parameters=skeleton.num_parameters,
        tied=skeleton.tied,
        layers=tuple(LayerInfo(i, need) for i, need in enumerate(needs)),
        weights=skeleton.weights,
        ignored=skeleton.ignored,
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
        causal=kwargs["is_causal"] is not False,
    )


def _unlike(need: AttnNeed, q: Tensor, k: Tensor, mask: Any, kwargs: dict[str, Any], max_length: int) -> str | None:
    """Why this call is not the attention that `need` says, or None."""
    if k.shape[0] != TOKENS or q.shape[0] != TOKENS:
        return "attends to other tokens than its own"
    if not need.causal:
        return "sees what follows (where the configuration has it, set is_decoder)"
    if isinstance(mask, Mask) and not _agrees(mask, need, max_length):
        return "hides other tokens than a window would"
    if mask is not None and not isinstance(mask, Mask):
        return "makes a mask of its own"
    strange = [
        key for key, value in kwargs.items() if isinstance(value, Tensor) and key not in ("s_aux", "position_ids")
    ]
    return f"gives attention {', '.join(strange)}" if strange else None


def _agrees(mask: Mask, need: AttnNeed, max_length: int) -> bool:
    """Whether the mask is the causal one with the need's window: compared where any kind of window has its edges."""
    window = need.window or max_length
    edges = {0, 1, 2, 3, 5, window, 2 * window, 3 * window + 1, *(2**i for i in range(3, 18)), max_length}
    near = sorted({edge + d for edge in edges for d in (-1, 0, 1)} & set(range(max_length)))
    zero = torch.zeros((), dtype=torch.int64)
    position = torch.tensor(near)
    q, k = position[:, None], position[None, :]
    want = (k <= q) & (k > q - window)
    return torch.equal(torch.as_tensor(mask.sees(zero, zero, q, k)).expand_as(want), want)


def _silent(body: nn.Module, attending: set[str]) -> str | None:
    """A layer that mixes tokens by other means than attention, if at all: one that never attends, of a list of
    layers of which others do."""
    for name, module in body.named_modules():
        if isinstance(module, nn.ModuleList):
            heard = [any(f"{a}.".startswith(f"{name}.{i}.") for a in attending) for i in range(len(module))]
            if any(heard) and not all(heard):
                return f"{name}.{heard.index(False)}"
    return None if attending else "no layer of it"
