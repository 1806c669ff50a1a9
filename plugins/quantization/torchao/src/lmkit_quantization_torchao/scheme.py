"""The checkpoint format: which layers are quantized, and how one is stored."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from lmkit.api import LinearSpec, Loader, ParamSpec, QuantFormat, QuantScheme
from lmkit_layouts import Settings
from lmkit_layouts.settings import WHERE, Pattern, agreed, of_layer

from lmkit_quantization_torchao.configs import Stored, read


@dataclass(frozen=True, slots=True)
class TorchaoScheme(QuantScheme):
    """`rules`: names of modules and patterns of such, with how these are stored; None = plainly. `usual` holds for all
    others. `skipped`: modules for which nothing of it holds; None = the output head, unless `embeddings`."""

    usual: Stored | None
    rules: tuple[tuple[str | Pattern, Stored | None], ...] = ()
    skipped: tuple[str, ...] | None = None
    embeddings: bool = False
    name: str = "torchao"

    @classmethod
    def parse(cls, quantization_config: Mapping[str, object]) -> TorchaoScheme:
        given = Settings(quantization_config, ("quant_method", "untie_embedding_weights"))
        types = given.get("quant_type")
        if not isinstance(types, Mapping) or list(types) != ["default"]:
            raise given.unsupported("quant_type", "an object with 'default', as torchao has written it since 0.10")
        embeddings = given.flag("include_input_output_embeddings", False)
        listed = given.get("modules_to_not_convert") is not None
        skipped = given.names("modules_to_not_convert") if listed else None
        given.done()
        usual, rules = read(types["default"], f"{WHERE}.quant_type.default")
        return cls(usual, rules, skipped, embeddings)

    def for_layer(self, layer: LinearSpec) -> QuantFormat | None:
        names = of_layer(layer)
        rows = layer.out_features if len(layer.out_features) == len(names) else (layer.total_out,) * len(names)
        found = [
            self.of_module(name) if self._takes(name, size, layer) else None
            for name, size in zip(names, rows, strict=True)
        ]
        stored = agreed(layer, found, "quant_type")
        return None if stored is None else stored.layout(layer.out_features, layer.in_features)

    def wrap(self, loader: Loader, wanted: Callable[[str], ParamSpec | None]) -> Loader:
        from lmkit_quantization_torchao.tensors import TorchaoTensors

        return TorchaoTensors(loader, wanted, of_module=self.of_module)

    def of_module(self, name: str) -> Stored | None:
        """How its weight is stored if it is quantized."""
        return next((each for rule, each in self.rules if _names(rule, name)), self.usual)

    def _takes(self, name: str, rows: int, layer: LinearSpec) -> bool:
        """Whether the producer quantizes it at all."""
        stored = self.of_module(name)
        if stored is not None and (rows % stored.multiple[0] or layer.in_features % stored.multiple[1]):
            return False
        if layer.is_head and (self.embeddings or self.skipped is None):
            return self.embeddings
        return not any(f".{entry}." in f".{name}." for entry in self.skipped or ())


def _names(rule: str | Pattern, module: str) -> bool:
    """Rules may be of modules, or of their weights."""
    names = (f"{module}.weight", module)
    return rule in names if isinstance(rule, str) else any(map(rule.matches, names))
