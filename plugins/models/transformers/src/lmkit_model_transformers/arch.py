"""A model of transformers as data: its code is built without weights and asked. This module is torch-free."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING

from lmkit.api import Architecture, ModelInfo, WeightRule
from lmkit_decoders.describe import ConfigReader

if TYPE_CHECKING:
    from lmkit.api import BuildContext, Model


class TransformersArchitecture(Architecture):
    names = ("transformers",)

    def describe(self, config: Mapping[str, object]) -> ModelInfo:
        from lmkit_model_transformers.probe import probe

        inner = config.get("text_config")  # where configurations of several models have a language model's fields
        outer = {key: value for key, value in config.items() if value is not None}
        r = ConfigReader({**inner, **outer} if isinstance(inner, Mapping) else outer)
        found = probe(json.dumps(config, sort_keys=True))
        return ModelInfo(
            architecture=found.architecture,
            vocab_size=found.vocab_size,
            hidden_size=found.hidden_size,
            layers=found.layers,
            max_length=found.max_length,
            dtype=r.dtype(),
            num_parameters=found.num_parameters,
            eos_token_ids=r.token_ids("eos_token_id"),
            bos_token_id=next(iter(r.token_ids("bos_token_id")), None),
            tie_embeddings=found.tied,
            intermediate_size=found.intermediate_size,
            config={"text": json.dumps(config, sort_keys=True)},
        )

    def build(self, info: ModelInfo, ctx: BuildContext) -> Model:
        from lmkit_model_transformers.model import TransformersModel

        return TransformersModel(str(info.config["text"]), info, ctx)

    def weights(self, info: ModelInfo) -> list[WeightRule]:
        from lmkit_model_transformers.probe import probe

        found = probe(str(info.config["text"]))
        return [WeightRule(source, target, part) for source, target, part in found.weights.rules] + [
            WeightRule(source, "", ignore=True) for source in found.ignored
        ]
