"""The checkpoint format: which layers are quantized, and how one is stored."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from lmkit.api import LinearSpec, Loader, ParamSpec, QuantFormat, QuantScheme, UnsupportedModel
from lmkit_layouts import ByteRows, Settings
from lmkit_layouts.settings import agreed, of_layer

from lmkit_quantization_bitsandbytes.formats import STORAGE, RoundedFormat, TableFormat, group_of

# What programs of their time did with activations and memory; nothing of how weights are stored. Tensors say
# themselves whether their scales are rounded.
IGNORED = ("quant_method", "llm_int8_enable_fp32_cpu_offload", "_load_in_4bit", "_load_in_8bit")
DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True, slots=True)
class BitsandbytesScheme(QuantScheme):
    """`kind`: "nf4", "fp4" or "int8". `skipped`: names of modules that are stored plainly; None = the output head."""

    kind: str
    skipped: tuple[str, ...] | None = None
    name: str = "bitsandbytes"

    @classmethod
    def parse(cls, quantization_config: Mapping[str, object]) -> BitsandbytesScheme:
        given = Settings(quantization_config, IGNORED)
        four = given.flag("load_in_4bit", False)
        if given.flag("load_in_8bit", False) == four:
            raise given.unsupported("load_in_4bit", "true, or load_in_8bit true, and not both")
        kind = given.one_of("bnb_4bit_quant_type", ("nf4", "fp4"), "fp4") if four else "int8"
        for key, values in (("bnb_4bit_compute_dtype", DTYPES), ("bnb_4bit_quant_storage", STORAGE)):
            given.one_of(key, values, values[0])
        given.get("bnb_4bit_quant_type")
        given.flag("bnb_4bit_use_double_quant", False)
        given.one_of("llm_int8_has_fp16_weight", (False,), False)
        threshold = given.get("llm_int8_threshold", 6.0)
        if type(threshold) not in (int, float):
            raise given.unsupported("llm_int8_threshold", "a number")
        skipped = None
        if given.get("llm_int8_skip_modules") is not None:
            skipped = given.names("llm_int8_skip_modules")
        given.done()
        return cls(kind, skipped)

    def for_layer(self, layer: LinearSpec) -> QuantFormat | None:
        """Experts are plain: producers have stored them either way, and `wrap` dequantizes those that are not."""
        if layer.experts:
            return None
        found = [self._quantized(name, layer.is_head) for name in of_layer(layer)]
        if not agreed(layer, found, "llm_int8_skip_modules"):
            return None
        if self.kind != "int8":
            return TableFormat(self.kind, layer.in_features, group_of(layer.in_features))
        return ByteRows(
            group=0, parts=layer.out_features, width=layer.in_features, bits=8, name="int8", activations="float"
        )

    def wrap(self, loader: Loader, wanted: Callable[[str], ParamSpec | None]) -> Loader:
        from lmkit_quantization_bitsandbytes.tensors import BitsandbytesTensors

        return BitsandbytesTensors(loader, wanted, kind=self.kind)

    def _quantized(self, name: str, head: bool) -> bool:
        if self.skipped is None:
            return not head
        return not any(f".{entry}." in f".{name}." or name.endswith(entry) for entry in self.skipped)


@dataclass(frozen=True, slots=True)
class Nf4Scheme(QuantScheme):
    """Any plain checkpoint, but for its output head."""

    name: str = "nf4"

    @classmethod
    def parse(cls, quantization_config: Mapping[str, object]) -> Nf4Scheme:
        for key, value in quantization_config.items():
            raise UnsupportedModel(key, value, "no options")
        return cls()

    def for_layer(self, layer: LinearSpec) -> RoundedFormat | None:
        return None if layer.is_head else RoundedFormat(layer.in_features)
