"""The checkpoint format: which layers are quantized, and how one is stored."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from lmkit.api import LinearSpec, QuantFormat, QuantScheme
from lmkit_layouts import Fp8Format, NvFp4, Rounding, Settings
from lmkit_layouts.fp4 import NV_GROUP
from lmkit_layouts.settings import MAX_NAMES, PLAIN_NAME, WHERE, Pattern, agreed, names_module, of_layer

FP8, NVFP4, WEIGHTS, MIXED = "FP8", "NVFP4", "W4A16_NVFP4", "MIXED_PRECISION"
ALGORITHMS = (FP8, NVFP4, WEIGHTS)
METHODS = ("modelopt", "modelopt_fp4", "hf_quant_config.json")
# Said twice by the form that names groups, for programs that read other producers' files.
AGAIN = ("config_groups", "quant_method", "producer")


@dataclass(frozen=True, slots=True)
class ModelOptScheme(QuantScheme):
    """`algorithm` of every linear, or of each that `layers` names; `kept` are plain."""

    algorithm: str
    kept: tuple[Pattern, ...] = ()
    layers: tuple[tuple[str, str], ...] = ()
    name: str = "modelopt"

    @classmethod
    def parse(cls, quantization_config: Mapping[str, object]) -> ModelOptScheme:
        outer, where = Settings(quantization_config, AGAIN), WHERE
        own, values = outer.get("quantization"), quantization_config
        if own is not None:
            if not isinstance(own, Mapping):
                raise outer.unsupported("quantization", "an object with quant_algo")
            outer.one_of("quant_method", METHODS, "modelopt")
            outer.done()
            values, where = own, f"{WHERE}.quantization"
        given = Settings(values, AGAIN, where)
        algorithm = given.one_of("quant_algo", (*ALGORITHMS, MIXED), "")
        given.one_of("kv_cache_quant_algo", (None, FP8), None)
        given.float8_cache("kv_cache_scheme")
        given.one_of("group_size", (None, NV_GROUP), None)
        for key in ("has_zero_point", "pre_quant_scale"):
            given.one_of(key, (None, False), None)
        kept = given.globs("exclude_modules") + given.globs("ignore")
        layers = _layers(given, where) if algorithm == MIXED else ()
        given.done()
        return cls(algorithm, kept, layers)

    def for_layer(self, layer: LinearSpec) -> QuantFormat | None:
        algorithm = agreed(layer, [self._of_module(name) for name in of_layer(layer)], "ignore")
        if algorithm is None:
            return None
        if algorithm == FP8:
            return Fp8Format(None, layer.out_features, layer.in_features, inputs=Rounding("stored"))
        return NvFp4(
            parts=layer.out_features, width=layer.in_features, codes="weight", whole="weight_scale_2", times=True
        )

    def _of_module(self, name: str) -> str | None:
        if any(pattern.matches(name) for pattern in self.kept):
            return None
        if self.algorithm != MIXED:
            return self.algorithm
        return next((algorithm for entry, algorithm in self.layers if names_module(entry, name)), None)


def _layers(given: Settings, where: str) -> tuple[tuple[str, str], ...]:
    """quantized_layers: for each module how it is stored."""
    found = given.get("quantized_layers")
    if not isinstance(found, Mapping) or not 0 < len(found) <= MAX_NAMES:
        raise given.unsupported("quantized_layers", f"1 to {MAX_NAMES} modules, with the quant_algo of each")
    layers = []
    for name, values in found.items():
        if not isinstance(name, str) or not PLAIN_NAME.match(name) or not isinstance(values, Mapping):
            raise given.unsupported("quantized_layers", "names of modules, each with an object that has quant_algo")
        one = Settings(values, (), f"{where}.quantized_layers.{name}")
        layers.append((name, one.one_of("quant_algo", ALGORITHMS, "")))
        one.one_of("group_size", (None, NV_GROUP), None)
        one.done()
    return tuple(layers)
