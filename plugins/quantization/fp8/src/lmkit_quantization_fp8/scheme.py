"""The checkpoint format: which layers are float8, and how one is stored."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from lmkit.api import LinearSpec, QuantFormat, QuantScheme, UnsupportedModel
from lmkit_layouts import Fp8Format, Rounding, Settings

from lmkit_quantization_fp8.rounded import RoundedFp8

# Keys of quantization_config and the values understood; None = checked in `parse`.
KEYS: Mapping[str, tuple[object, ...] | None] = {
    "quant_method": ("fp8",),
    "activation_scheme": ("dynamic", "static"),
    "weight_block_size": None,
    "modules_to_not_convert": None,
    "ignored_layers": None,
    "fmt": ("e4m3", None),
    "scale_fmt": ("float", "ue8m0", None),  # ue8m0: powers of two, stored as such or as float32
    "dequantize": (False, None),
    "modules_to_convert": (None, []),
    "expert_dtype": ("fp8", None),
    "kv_cache_scheme": None,
}
PLAIN_NAME = re.compile(r"^[\w.-]+$")
HEAD = "lm_head"  # producers leave the output head alone whether they list it or not


@dataclass(frozen=True, slots=True)
class Fp8Scheme(QuantScheme):
    """`block` is (rows, columns) of a scale, None = one scale per tensor. `online`: weights are stored plainly.

    `static`: scales of activations are stored; `powers`: those that are not are powers of two.
    """

    block: tuple[int, int] | None = None
    skipped: tuple[str, ...] = ()
    online: bool = False
    static: bool = False
    powers: bool = False
    name: str = "fp8"

    @classmethod
    def parse(cls, quantization_config: Mapping[str, object]) -> Fp8Scheme:
        where = "quantization_config"
        for key, value in quantization_config.items():
            if key not in KEYS:
                raise UnsupportedModel(f"{where}.{key}", value, f"keys {', '.join(KEYS)}")
            allowed = KEYS[key]
            if allowed is not None and value not in allowed:
                raise UnsupportedModel(f"{where}.{key}", value, ", ".join(map(repr, allowed)))
        if quantization_config.get("kv_cache_scheme") != "static":  # as older producers say it
            Settings(quantization_config).float8_cache("kv_cache_scheme")
        block = quantization_config.get("weight_block_size")
        if block is not None and not (
            isinstance(block, list | tuple) and len(block) == 2 and all(type(n) is int and n > 0 for n in block)
        ):
            raise UnsupportedModel(f"{where}.weight_block_size", block, "two positive numbers")
        skipped: list[str] = []
        for key in ("modules_to_not_convert", "ignored_layers"):
            names = quantization_config.get(key) or []
            if not isinstance(names, list | tuple) or not all(
                isinstance(n, str) and PLAIN_NAME.match(n) for n in names
            ):
                raise UnsupportedModel(f"{where}.{key}", names, "a list of module names (no patterns)")
            skipped += names
        online = "quant_method" not in quantization_config  # there are no options to ask for
        if online and quantization_config:
            raise UnsupportedModel(next(iter(quantization_config)), "given", "no options")
        static = quantization_config.get("activation_scheme") == "static"
        powers = quantization_config.get("scale_fmt") == "ue8m0"
        return cls(None if block is None else (block[0], block[1]), tuple(skipped), online, static, powers)

    def for_layer(self, layer: LinearSpec) -> QuantFormat | None:
        sources = layer.sources or (layer.name,)
        kept = {any(_names(pattern, source) for pattern in (*self.skipped, HEAD)) for source in sources}
        if len(kept) > 1:
            raise UnsupportedModel(
                "quantization_config.modules_to_not_convert", sources, "all or none of a merged layer"
            )
        if kept.pop():
            return None
        if self.online:
            return RoundedFp8(layer.in_features)
        dynamic = Rounding("group", self.block[1], self.powers) if self.block else Rounding("token", 0, self.powers)
        inputs = Rounding("stored") if self.static else dynamic
        return Fp8Format(self.block, layer.out_features, layer.in_features, inputs=inputs)


def _names(pattern: str, module: str) -> bool:
    """Whether a skip-list entry names this module: its full name, the start or the end of it, at a dot."""
    return f".{module}.".startswith(f".{pattern}.") or f".{module}.".endswith(f".{pattern}.")
