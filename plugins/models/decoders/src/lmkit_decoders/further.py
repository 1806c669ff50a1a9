"""Layers that a checkpoint has behind its last, which predict further tokens (multi-token prediction). Torch-free.

Gloeckle et al. 2024, arXiv:2404.19737; as files have them, DeepSeek-V3 (arXiv:2412.19437, 2.2): norms of the embedding
of the next token and of the hidden state, a projection of both, a decoder layer, a norm, and the model's own head.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from lmkit.api import LinearSpec, UnsupportedModel, WeightRule

from lmkit_decoders.describe import DecoderConfig

if TYPE_CHECKING:
    from torch import Tensor

MODEL = "lmkit_decoders.drafts:FurtherDecoder"
SHARED = ("embed.", "lm_head.")  # modules of the model itself


@dataclass(frozen=True, slots=True)
class FurtherLayer:
    """The first of these layers, as a decoder of its own: it guesses for a model of architecture `of`."""

    of: str
    layer: str = ""  # what its tensors' names begin with; "": it is numbered as the layer behind the last
    names: Mapping[str, str] = field(
        default_factory=lambda: {"enorm": ".enorm", "hnorm": ".hnorm", "fc": ".eh_proj", "norm": ".shared_head.norm"}
    )
    hidden_first: bool = False  # the projection takes the hidden state before the embedding

    def config(self, cfg: DecoderConfig) -> DecoderConfig:
        """That of the layer, from the model's. Raises UnsupportedModel where the file has none."""
        if not self.layer and not cfg.num_unused_layers:
            raise UnsupportedModel("num_nextn_predict_layers", 0, "at least 1: a layer that predicts further tokens")
        begin = next(name for name in cfg.names.values() if "{i}" in name).partition("{i}")[0] + "{i}"
        here = self.layer or begin.format(i=len(cfg.windows))
        names = {role: name.replace(begin, here) for role, name in cfg.names.items()}
        return replace(
            cfg,
            windows=cfg.windows[-1:],
            unturned=(),
            per_layer=cfg.per_layer[-1:],
            moe=cfg.moe and replace(cfg.moe, layers=cfg.moe.layers[-1:]),
            num_unused_layers=0,
            tie=True,
            names=names | {role: f"{here}{name}" for role, name in self.names.items()},
        )

    def linear(self, cfg: DecoderConfig) -> LinearSpec:
        """The projection."""
        return LinearSpec("fc", 2 * cfg.hidden_size, (cfg.hidden_size,), sources=(cfg.names["fc"],))

    def rules(self, rules: Iterable[WeightRule]) -> list[WeightRule]:
        """Those for the whole file: all else in it belongs to the model."""
        own = [replace(r, target=r.target.replace("{i}", "0")) for r in rules if not r.target.startswith(SHARED)]
        change = hidden_last if self.hidden_first else None
        own = [replace(r, transform=change) if r.target.startswith("fc.") else r for r in own]
        return [*own, WeightRule("{any}", "", ignore=True)]


def hidden_last(weight: Tensor) -> Tensor:
    """The halves [D, 2 * D] of a projection in the other order; another tensor as it is."""
    return weight.roll(weight.shape[1] // 2, 1) if weight.dim() == 2 else weight


TARGETS = {"enorm": "enorm", "hnorm": "hnorm", "fc": "fc"}
