"""The architecture that a plan names: where it says so, a decoder as a pooling model with another head or none."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from lmkit.api import (
    Architecture,
    ModelInfo,
    PluginError,
    ResolvedPlan,
    WeightRule,
    decoder_name,
    head_linears,
    make_target,
)

from lmkit_worker.chosen import choice_of

if TYPE_CHECKING:
    from lmkit.api import BuildContext, Model

HEAD = "lm_head"  # name that decoders give to their language-model head


def architecture_of(resolved: ResolvedPlan) -> Architecture | PoolingDecoder:
    """What builds the model of the plan and says where its weights go."""
    choice = choice_of(resolved, "model")
    architecture: Architecture = make_target(choice)
    return architecture if resolved.value("head") is None else PoolingDecoder(architecture)


@dataclass(frozen=True, slots=True)
class PoolingDecoder:
    """A decoder's layers with the head that `head_linears` says in place of its own."""

    decoder: Architecture

    def build(self, info: ModelInfo, ctx: BuildContext) -> Model:
        from lmkit_layers.pooled import PooledDecoder

        decoder = self.decoder.build(_whole(info), ctx)
        if not hasattr(decoder, HEAD):
            raise PluginError(f"{info.architecture}: its language-model head is not called {HEAD!r}")
        return PooledDecoder(decoder, head_linears(info), ctx)

    def weights(self, info: ModelInfo) -> list[WeightRule]:
        """The decoder's, also without the prefix under which whole models keep the layers; its head is not needed."""
        rules = [
            replace(r, target="", ignore=True, part=None) if r.target.startswith(f"{HEAD}.") else r
            for r in self.decoder.weights(_whole(info))
        ]
        kept = {r.source.partition(".")[0] for r in rules if not r.ignore}
        bare = [replace(r, source=r.source.partition(".")[2]) for r in rules if not r.ignore] if len(kept) == 1 else []
        found = [replace(r, target=f"decoder.{r.target}") if not r.ignore else r for r in (*rules, *bare)]
        if head_linears(info):
            found += [WeightRule("score.{p}", "score.0.{p}"), WeightRule("score.{i}.{p}", "score.{i}.{p}")]
        return found


def _whole(info: ModelInfo) -> ModelInfo:
    """The description as the decoder made it."""
    return replace(info, architecture=decoder_name(info.architecture))
