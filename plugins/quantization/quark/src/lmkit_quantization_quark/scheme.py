"""The checkpoint format: which layers are quantized, and how one is stored."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from lmkit.api import LinearSpec, Loader, ParamSpec, QuantFormat, QuantScheme
from lmkit_layouts import Settings
from lmkit_layouts.settings import GLOB, MAX_GLOBS, MAX_NAMES, WHERE, Pattern, agreed, of_layer

from lmkit_quantization_quark.stored import Stored, read

IGNORED = ("quant_method", "quant_mode", "version")
# Those that leave nothing for the model to do; of others, as rotations, something runs with it.
ALGORITHMS = ("awq", "gptq", "gptaq", "smooth", "autosmoothquant", "qronos", "auto_round", "autoround")

Names = tuple[frozenset[str], tuple[Pattern, ...]]


@dataclass(frozen=True, slots=True)
class QuarkScheme(QuantScheme):
    """`usual` holds for linears that no rule and no exclusion names; None = they are plain."""

    usual: Stored | None
    rules: tuple[tuple[Names, Stored | None], ...] = ()
    excluded: Names = (frozenset(), ())
    reorder: bool = True
    name: str = "quark"

    @classmethod
    def parse(cls, quantization_config: Mapping[str, object]) -> QuarkScheme:
        given = Settings(quantization_config, IGNORED)
        for key in ("kv_cache_quant_config", "layer_type_quant_config", "softmax_quant_spec"):
            given.one_of(key, (None, {}), None)
        given.one_of("kv_cache_post_rope", (False, None), None)
        algorithms = given.get("algo_config") or []
        algorithms = algorithms if isinstance(algorithms, list) else [algorithms]
        if not all(isinstance(each, Mapping) and each.get("name") in ALGORITHMS for each in algorithms):
            raise given.unsupported("algo_config", f"algorithms {', '.join(ALGORITHMS)}")
        reorder = _export(given)
        rules, excluded = given.get("layer_quant_config") or {}, given.get("exclude") or []
        if not isinstance(rules, Mapping) or len(rules) > MAX_GLOBS:
            raise given.unsupported("layer_quant_config", f"at most {MAX_GLOBS} patterns, each with an object")
        if not isinstance(excluded, list) or len(excluded) > MAX_NAMES:
            raise given.unsupported("exclude", f"a list of at most {MAX_NAMES} names of modules")
        where = f"{WHERE}.layer_quant_config"
        found = tuple(
            (_names(given, "layer_quant_config", [key]), read(value, f"{where}.{key}")) for key, value in rules.items()
        )
        usual = read(given.get("global_quant_config"), f"{WHERE}.global_quant_config")
        scheme = cls(usual, found, _names(given, "exclude", excluded), reorder)
        given.done()
        return scheme

    def for_layer(self, layer: LinearSpec) -> QuantFormat | None:
        stored = agreed(layer, [self.of_module(name) for name in of_layer(layer)], "layer_quant_config")
        return None if stored is None else stored.layout(layer.out_features, layer.in_features)

    def wrap(self, loader: Loader, wanted: Callable[[str], ParamSpec | None]) -> Loader:
        from lmkit_quantization_quark.tensors import QuarkTensors

        return QuarkTensors(loader, wanted, of_module=self.of_module, reorder=self.reorder)

    def of_module(self, name: str) -> Stored | None:
        """How its weight is stored; None = plainly."""
        if _named(self.excluded, name):
            return None
        return next((stored for names, stored in self.rules if _named(names, name)), self.usual)


def _export(given: Settings) -> bool:
    """Whether columns of a word are in AWQ's order."""
    found = given.get("export")
    if not isinstance(found, Mapping):
        raise given.unsupported("export", "an object, as Quark has written it since 0.2: export the model again")
    export = Settings(found, ("min_kv_scale", "weight_merge_groups"), f"{WHERE}.export")
    export.one_of("kv_cache_group", ([], None), None)
    export.one_of("weight_format", ("real_quantized",), "real_quantized")
    packing = export.one_of("pack_method", ("reorder", "order"), "reorder")
    export.done()
    return packing == "reorder"


def _names(given: Settings, key: str, found: list[object]) -> Names:
    """Whole names, and patterns with * of such."""
    texts = [text for text in found if isinstance(text, str) and GLOB.match(text)]
    globs = [text for text in texts if "*" in text]
    if len(texts) != len(found) or len(globs) > MAX_GLOBS:
        raise given.unsupported(key, f"names of modules, at most {MAX_GLOBS} of them with *")
    return frozenset(texts) - frozenset(globs), tuple(Pattern(fnmatch.translate(text), key) for text in globs)


def _named(names: Names, module: str) -> bool:
    return module in names[0] or any(pattern.matches(module) for pattern in names[1])
