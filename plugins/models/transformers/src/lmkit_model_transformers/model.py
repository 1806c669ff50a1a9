"""A model of transformers as a Model: its layers as they are, attention through lmkit."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from lmkit.api import BuildContext, ModelInfo, PluginError, StepInputs
from torch import Tensor, nn

from lmkit_model_transformers.probe import need_of
from lmkit_model_transformers.routing import connect
from lmkit_model_transformers.skeleton import Skeleton


class TransformersModel(nn.Module):
    """`body` makes hidden states, `whole` (with a stand-in for the body) logits, so that whatever the family does
    around its head is done by its own code."""

    def __init__(self, text: str, info: ModelInfo, ctx: BuildContext) -> None:
        super().__init__()
        skeleton = Skeleton(text, ctx.dtype)
        self.body, self.whole, self.recall = skeleton.body, skeleton.whole, (skeleton.recall,)
        self.first_position = skeleton.first_position
        self.needs = {layer: need for need, layers in info.kv_groups() for layer in layers}
        self.attention = {layer: ctx.attention(layer, scale=need.head_dim**-0.5) for layer, need in self.needs.items()}
        self.step: StepInputs | None = None  # of the pass that runs: the library's code has no place for it
        self.calls = 0  # of attention, so far in this pass
        connect(self.body, self._attend)
        for target, parts in skeleton.weights.parts:
            path, _, key = target.rpartition(".")
            module: Any = self.get_submodule(path)
            module.parts = {**getattr(module, "parts", {}), key: parts}

    @torch.inference_mode()
    def forward(self, x: StepInputs) -> Tensor:
        self.step, self.calls = x, 0
        positions = x.positions[None] + self.first_position if self.first_position else x.positions[None]
        try:
            out = self.body(input_ids=x.token_ids[None], position_ids=positions, use_cache=False)
        finally:
            self.step = None
        return out[0][0]

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        (recall,) = self.recall
        recall.hidden = hidden[None]
        ids = torch.zeros(1, len(hidden), dtype=torch.int64, device=hidden.device)
        return self.whole(input_ids=ids, use_cache=False).logits[0]

    def _attend(self, name: str, q: Tensor, k: Tensor, v: Tensor, mask: None, kwargs: dict[str, Any]) -> Tensor:
        """q [T, Hq, D], k, v [T, Hkv, ...] -> [T, Hq, Dv]."""
        index, asked = self.calls, need_of(q, k, v, kwargs)
        self.calls += 1
        need = self.needs[index]
        if replace(need, dtype=asked.dtype, kv_dtype=asked.kv_dtype, block_size=asked.block_size) != asked:
            raise PluginError(f"{name} asks for another attention than it was probed for: {asked}")
        attention: Any = self.attention[index]
        attention.scale = need.head_dim**-0.5 if kwargs.get("scaling") is None else float(kwargs["scaling"])
        if need.sinks:
            attention.sinks = nn.Parameter(kwargs["s_aux"].float(), requires_grad=False)
        assert self.step is not None
        return attention(q.contiguous(), k.contiguous(), v.contiguous(), self.step).view(q.shape[0], q.shape[1], -1)
