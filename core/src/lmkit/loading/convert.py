"""A decoder as a pooling model: the same layers without its language-model head, with another head or none.

Serves FooModel, FooForSequenceClassification, FooForTokenClassification and reward models of every FooForCausalLM.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from lmkit_layers.poolers import class_pooler

from lmkit.api import (
    Architecture,
    LinearSpec,
    ModelInfo,
    PluginError,
    PoolerInfo,
    PoolingTask,
    Ref,
    UnsupportedModel,
    WeightRule,
)
from lmkit.plugins import load_target
from lmkit.plugins.pooling import decoder_name

if TYPE_CHECKING:
    from lmkit.api import BuildContext, Model

HEAD = "lm_head"  # name that decoders give to their language-model head


class ConvertedArchitecture(Architecture):
    """`decoder`: target of the decoder's plugin. `task` "embed": no head; others: "score", one output per class."""

    def __init__(self, decoder: Ref, task: PoolingTask) -> None:
        self.decoder: Architecture = load_target(decoder)()
        self.names = self.decoder.names
        self.task = task

    def describe(self, config: Mapping[str, object]) -> ModelInfo:
        names = config.get("architectures")
        name = str(names[0]) if isinstance(names, list) and names else ""
        info = self.decoder.describe({**config, "architectures": [decoder_name(name)]})
        info = replace(info, architecture=name)
        head = next((s for s in info.linears if s.name == HEAD), None)
        linears = tuple(s for s in info.linears if s.name != HEAD)
        num_parameters = info.num_parameters - (head.total_out * (head.in_features + head.bias) if head else 0)
        if self.task == "embed":
            pooler = PoolerInfo("embed", info.hidden_size, "last", normalize=True)
        else:
            pooler = class_pooler(config, self.task, "last")
            num_parameters += sum(s.total_out * (s.in_features + s.bias) for s in self._head(info, pooler))
        layers = info.layers
        causal = True if config.get("is_causal") is None else config["is_causal"]
        if not isinstance(causal, bool):
            raise UnsupportedModel("is_causal", causal, "true or false")
        if not causal:
            if info.recurrent:
                raise UnsupportedModel("is_causal", False, "true: recurrent layers do not see what follows")
            layers = tuple(replace(layer, attn=layer.attn and replace(layer.attn, causal=False)) for layer in layers)
        return replace(info, linears=linears, num_parameters=num_parameters, pooler=pooler, layers=layers)

    def build(self, info: ModelInfo, ctx: BuildContext) -> Model:
        from lmkit_layers.pooled import PooledDecoder

        assert info.pooler is not None
        decoder = self.decoder.build(self._whole(info), ctx)
        if not hasattr(decoder, HEAD):
            raise PluginError(f"{info.architecture}: its language-model head is not called {HEAD!r}")
        return PooledDecoder(decoder, self._head(info, info.pooler), ctx)

    def weights(self, info: ModelInfo) -> list[WeightRule]:
        """The decoder's, also without the prefix under which whole models keep the layers; its head is not needed."""
        rules = [
            replace(r, target="", ignore=True, part=None) if r.target.startswith(f"{HEAD}.") else r
            for r in self.decoder.weights(self._whole(info))
        ]
        kept = {r.source.partition(".")[0] for r in rules if not r.ignore}
        bare = [replace(r, source=r.source.partition(".")[2]) for r in rules if not r.ignore] if len(kept) == 1 else []
        found = [replace(r, target=f"decoder.{r.target}") if not r.ignore else r for r in (*rules, *bare)]
        if self.task != "embed":
            found += [WeightRule("score.{p}", "score.0.{p}"), WeightRule("score.{i}.{p}", "score.{i}.{p}")]
        return found

    def _whole(self, info: ModelInfo) -> ModelInfo:
        """The description as the decoder made it."""
        return replace(info, architecture=decoder_name(info.architecture))

    def _head(self, info: ModelInfo, pooler: PoolerInfo) -> tuple[LinearSpec, ...]:
        """The head's linears. Reward models have two, with a ReLU between."""
        if self.task == "embed":
            return ()
        d = info.hidden_size
        score = LinearSpec("score.0", info.hidden_size, (pooler.size,), bias=self.task == "token_classify")
        if not info.architecture.endswith("RewardModel"):
            return (score,)
        return LinearSpec("score.0", d, (d,), bias=True), replace(score, name="score.2", bias=True)
