"""The checkpoint format: which layers are quantized, and how one is stored."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from lmkit.api import LinearSpec, Loader, ParamSpec, QuantScheme
from lmkit_layouts import OffsetRows, Settings
from lmkit_layouts.settings import MAX_NAMES, PLAIN_NAME, WHERE, agreed, names_module, of_layer

from lmkit_quantization_hqq.stored import Stored

BITS = (1, 2, 3, 4, 8)
WEIGHTS = "weight_quant_params"


@dataclass(frozen=True, slots=True)
class HqqScheme(QuantScheme):
    """`usual` holds for all linears, or `tags` for those that they name, others being plain."""

    usual: Stored | None
    tags: tuple[tuple[str, Stored | None], ...] = ()
    skipped: tuple[str, ...] = ()
    name: str = "hqq"

    @classmethod
    def parse(cls, quantization_config: Mapping[str, object]) -> HqqScheme:
        given = Settings(quantization_config, ("quant_method",))
        found = given.get("quant_config")
        if not isinstance(found, Mapping) or not 0 < len(found) <= MAX_NAMES:
            raise given.unsupported("quant_config", f"an object with {WEIGHTS}, or one such object for each of names")
        skipped = given.names("skip_modules")
        given.done()
        where = f"{WHERE}.quant_config"
        if WEIGHTS in found:
            return cls(_stored(found, where), (), skipped)
        tags = []
        for tag, values in found.items():
            if not isinstance(tag, str) or not PLAIN_NAME.match(tag) or not isinstance(values, Mapping | None):
                raise given.unsupported("quant_config", "names of modules, each with an object, or null")
            tags.append((tag, None if values is None else _stored(values, f"{where}.{tag}")))
        return cls(None, tuple(tags), skipped)

    def for_layer(self, layer: LinearSpec) -> OffsetRows | None:
        stored = agreed(layer, [self.of_module(name) for name in of_layer(layer)], "quant_config")
        return None if stored is None else stored.layout(layer.out_features, layer.in_features)

    def wrap(self, loader: Loader, wanted: Callable[[str], ParamSpec | None]) -> Loader:
        from lmkit_quantization_hqq.tensors import HqqTensors

        return HqqTensors(loader, wanted, of_module=self.of_module)

    def of_module(self, name: str) -> Stored | None:
        """How its weight is stored; None = plainly. Tags are names without the numbers of layers and experts."""
        parts = [part for part in name.split(".") if not part.isnumeric()]
        tag = ".".join(part for part in parts if part not in ("model", "layers"))
        if any(names_module(entry, each) for entry in self.skipped for each in (name, tag)):
            return None
        return dict(self.tags).get(tag, self.usual)


def _stored(values: Mapping[str, object], where: str) -> Stored:
    outer = Settings(values, ("offload_meta",), where)
    for key in ("scale_quant_params", "zero_quant_params"):
        outer.one_of(key, (None,), None)
    weights = outer.get(WEIGHTS)
    if not isinstance(weights, Mapping):
        raise outer.unsupported(WEIGHTS, "an object that says how weights are stored")
    outer.done()
    given = Settings(weights, ("optimize", "round_zero", "view_as_float"), f"{where}.{WEIGHTS}")
    group = 0 if given.get("group_size", 64) is None else given.group("group_size", 64)
    given.one_of("channel_wise", (True,), True)
    given.one_of("axis", (1,), 1)
    stored = Stored(given.one_of("nbits", BITS, 4), group)
    given.done()
    return stored
