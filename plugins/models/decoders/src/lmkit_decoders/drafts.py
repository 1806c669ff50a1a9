"""Drafts of proposers: decoders that guess one token after the other."""

from __future__ import annotations

from typing import cast

import torch
from lmkit.api import BuildContext, LinearSpec, Model, ModelInfo, PluginError, StepInputs
from lmkit_layers.drafts import DraftProposer
from lmkit_layers.norm import RMSNorm
from torch import Tensor

from lmkit_decoders.decoder import Decoder


class Chain(DraftProposer):
    """A draft that reads tokens, as any decoder does."""

    reads_hidden = False

    def __init__(self, draft: Model, model: Model, /) -> None:
        self.draft = draft

    def enter(self, token_ids: Tensor, hidden: Tensor | None) -> Tensor | None:
        """Contract: lmkit_layers.DraftProposer."""
        return None

    def state(self, x: StepInputs) -> Tensor:
        """Contract: lmkit_layers.DraftProposer."""
        return self.draft.forward(x)

    def guess(self, state: Tensor) -> Tensor:
        """Contract: lmkit_layers.DraftProposer."""
        return self.known(self.draft.logits(state).argmax(-1, keepdim=True))

    def branch(self, state: Tensor, num: int) -> tuple[Tensor, Tensor]:
        """Contract: lmkit_layers.DraftProposer."""
        scores, ids = torch.log_softmax(self.draft.logits(state).float(), -1).topk(num)
        return self.known(ids), scores

    def known(self, ids: Tensor) -> Tensor:
        """The model's ids of the draft's."""
        return ids


class HiddenChain(Chain):
    """A draft that reads the model's hidden states, and embeds and scores tokens as the model does."""

    reads_hidden = True
    draft: HeadDecoder

    def __init__(self, draft: HeadDecoder, model: Model, /) -> None:
        super().__init__(draft, model)
        if not isinstance(model, Decoder):
            raise PluginError(
                f"{type(model).__name__} does not show its embedding: a draft that reads hidden states needs it",
                fix="--model-impl native, or leave --proposer out",
            )
        draft.share(model)

    def enter(self, token_ids: Tensor, hidden: Tensor | None) -> Tensor:
        """Contract: lmkit_layers.DraftProposer."""
        assert hidden is not None
        return self.draft.enter(token_ids, hidden)


class Sum(RMSNorm):
    """The sum itself, where a norm of it might be: made by the operator that adds and norms, as all devices have it."""

    def __init__(self, size: int, ctx: BuildContext) -> None:
        super().__init__(size, 1.0, ctx.dtype, ctx.rows, weight=False)

    def forward(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        return x

    def add(self, h: Tensor, delta: Tensor | None) -> Tensor:
        if delta is not None:
            super().add(h, delta)
        return h


class HeadDecoder(Decoder):
    """Layers over a projection of a token's embedding and the hidden state before it.

    Embedding and head are the model's.

    `fc` in `specs`: the projection, [embedding, hidden state] -> hidden size.
    """

    def __init__(self, info: ModelInfo, ctx: BuildContext) -> None:
        super().__init__(info, ctx)
        specs: dict[str, LinearSpec] = {spec.name: spec for spec in info.linears}
        self.fc = ctx.linear(specs["fc"])
        self.embed = self.lm_head = None  # type: ignore[assignment]
        self._shared: tuple[Decoder, ...] = ()

    def share(self, model: Decoder) -> None:
        """Takes embedding and head of the model that it guesses for."""
        self._shared = (model,)  # in a tuple: not a submodule

    @property
    def model(self) -> Decoder:
        return self._shared[0]

    @torch.inference_mode()
    def enter(self, token_ids: Tensor, hidden: Tensor) -> Tensor:
        """What enters the layers, of tokens [T] and the hidden states before them [T, H]: [T, D]."""
        return cast("Tensor", self.fc(torch.cat((self.model.embed(token_ids), hidden), -1)))

    def embeddings(self, x: StepInputs) -> Tensor:
        assert x.embeds is not None
        return x.embeds

    def logits(self, hidden: Tensor) -> Tensor:
        return self.model.logits(hidden)


class FurtherDecoder(HeadDecoder):
    """The layer of a checkpoint that predicts the token after the next: see `lmkit_decoders.further`."""

    def __init__(self, info: ModelInfo, ctx: BuildContext) -> None:
        super().__init__(info, ctx)
        self.enorm, self.hnorm = (ctx.norm(info.hidden_size, self.cfg.norm_eps, self.cfg.norm) for _ in range(2))

    @torch.inference_mode()
    def enter(self, token_ids: Tensor, hidden: Tensor) -> Tensor:
        embedded = self.enorm(self.model.embed(token_ids))
        return cast("Tensor", self.fc(torch.cat((embedded, self.hnorm(hidden)), -1)))
