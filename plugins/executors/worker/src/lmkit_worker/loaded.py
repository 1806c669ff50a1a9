"""What loading gives."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lmkit.api import AttentionBackend, Model, ModelInfo, RowOps
    from torch import nn


@dataclass(slots=True)
class LoadedModel:
    """A model ready to run, with the facts of its loading."""

    model: Model
    info: ModelInfo
    weight_bytes: int
    warnings: tuple[str, ...] = field(default_factory=tuple)
    pack_seconds: float = 0.0  # spent on laying weights out as kernels want them
    dense: nn.Module | None = None  # what follows the head of a pooling model
    attention: AttentionBackend | None = None  # the object the model's layers call: makes planners and KV tensors
    rows: RowOps | None = None  # that of the model's layers; None: plain torch
    draft: LoadedModel | None = None  # what its proposer runs
    has_head: bool = True  # False: a rank after this one makes the logits
