"""Medusa heads as data, in the layout of the published checkpoints. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, cast

from lmkit.api import Architecture, BuildContext, LinearSpec, ModelInfo, UnsupportedModel, WeightRule
from lmkit_decoders import ConfigReader

if TYPE_CHECKING:
    from lmkit.api import Model

MAX_HEADS, MAX_LAYERS = 16, 8


class MedusaArchitecture(Architecture):
    """`medusa_num_heads` heads, each of `medusa_num_layers` residual blocks and a linear to the vocabulary."""

    names = ("MedusaForCausalLM",)

    def describe(self, config: Mapping[str, object]) -> ModelInfo:
        r = ConfigReader(config)
        target = ConfigReader(cast("Mapping[str, object]", config.get("lmkit_target", {})))
        sizes: dict[str, int] = {}
        for key in ("hidden_size", "vocab_size"):  # files may leave these to the model
            wanted = target.integer(key)
            sizes[key] = r.integer(key, wanted)
            if sizes[key] != wanted:
                raise UnsupportedModel(f"{key} of the heads", sizes[key], f"{wanted}, that of the model")
        heads = r.integer("medusa_num_heads", 5, MAX_HEADS)
        layers = r.integer("medusa_num_layers", 1, MAX_LAYERS)
        linears = tuple(linear for head in range(heads) for linear in head_linears(head, layers, **sizes))
        return ModelInfo(
            architecture=self.names[0],
            vocab_size=sizes["vocab_size"],
            hidden_size=sizes["hidden_size"],
            layers=(),
            max_length=target.integer("max_length"),
            dtype=r.dtype() if "torch_dtype" in config or "dtype" in config else str(target.config["dtype"]),
            num_parameters=sum(linear.total_out * (linear.in_features + linear.bias) for linear in linears),
            linears=linears,
            config={"heads": heads, "layers": layers},
        )

    def build(self, info: ModelInfo, ctx: BuildContext) -> Model:
        from lmkit_proposer_medusa.model import MedusaHeads

        return MedusaHeads(info, ctx)

    def weights(self, info: ModelInfo) -> list[WeightRule]:
        """Blocks of a head are numbered, its linear follows them."""
        last = info.config["layers"]
        return [
            WeightRule("{i}.{n}.linear.{p}", "heads.{i}.{n}.{p}"),
            WeightRule(f"{{i}}.{last}.{{p}}", f"heads.{{i}}.{last}.{{p}}"),
        ]


def head_linears(head: int, num_layers: int, hidden_size: int, vocab_size: int) -> list[LinearSpec]:
    """The linears of one head, in order."""
    blocks: list[Any] = [
        LinearSpec(f"heads.{head}.{i}", hidden_size, (hidden_size,), True, sources=(f"{head}.{i}.linear",))
        for i in range(num_layers)
    ]
    return [
        *blocks,
        LinearSpec(f"heads.{head}.{num_layers}", hidden_size, (vocab_size,), sources=(f"{head}.{num_layers}",)),
    ]
