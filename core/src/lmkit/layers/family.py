"""A family of decoders: what its file has to say, and nothing else. Torch-free."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, ClassVar

from lmkit.api import Architecture, ModelInfo, WeightRule
from lmkit.layers.describe import DecoderConfig, decoder_config, decoder_info, decoder_weights
from lmkit.layers.reader import ConfigReader

if TYPE_CHECKING:
    from torch import Tensor

    from lmkit.api import BuildContext, Model


class DecoderArchitecture(Architecture):
    """An Architecture made of tables.

    `configs`: architecture name -> function that reads its configuration.
    `models`: architecture name -> "package.module:Class" of those that are not the shared Decoder.
    `transforms`: architecture name -> role of a tensor -> (configuration, tensor) -> what is loaded.
    `targets`: role that is the family's own -> module of the model.
    `ignored`: patterns of tensors that are not needed.
    `prefix`: what the names of tensors begin with in some files and not in others.
    """

    configs: ClassVar[Mapping[str, Callable[[ConfigReader], DecoderConfig]]]
    models: ClassVar[Mapping[str, str]] = {}
    transforms: ClassVar[Mapping[str, Mapping[str, Callable[[DecoderConfig, Tensor], Tensor]]]] = {}
    targets: ClassVar[Mapping[str, str]] = {}
    ignored: ClassVar[tuple[str, ...]] = ()
    prefix: ClassVar[str] = ""

    @property
    def names(self) -> tuple[str, ...]:  # type: ignore[override]
        return tuple(self.configs)

    def describe(self, config: Mapping[str, object]) -> ModelInfo:
        reader = ConfigReader(config)
        name = reader.architecture(self.names)
        cfg = self.configs[name](reader)
        return decoder_info(name, reader, cfg, self.extra_parameters(name, cfg))

    def extra_parameters(self, name: str, cfg: DecoderConfig) -> int:
        """Number of parameters beside those of the shared blocks."""
        return 0

    def build(self, info: ModelInfo, ctx: BuildContext) -> Model:
        module, _, name = self.models.get(info.architecture, "lmkit.layers.decoder:Decoder").partition(":")
        return getattr(import_module(module), name)(info, ctx)

    def weights(self, info: ModelInfo) -> list[WeightRule]:
        ignored = [WeightRule(source, "", ignore=True) for source in self.ignored]
        transforms = self.transforms.get(info.architecture, {})
        bound = {role: partial(function, decoder_config(info)) for role, function in transforms.items()}
        rules = [*ignored, *decoder_weights(info, bound, self.targets)]
        if not self.prefix:
            return rules
        return rules + [replace(rule, source=rule.source.removeprefix(self.prefix)) for rule in rules]


def split_per_head(cfg: DecoderConfig, fused: Tensor) -> Tensor:
    """A projection stored head by head as query, key, value [Hq * 3 * D, ...] -> all queries, all keys, all values."""
    return fused.reshape(cfg.num_q_heads, 3, cfg.head_dim, *fused.shape[1:]).transpose(0, 1).reshape(fused.shape)


def transposed(cfg: DecoderConfig, weight: Tensor) -> Tensor:
    """A weight stored [in, out] -> [out, in]; a bias as it is."""
    return weight.T if weight.dim() == 2 else weight
