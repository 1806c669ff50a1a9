"""The checkpoint format: GPTQ's or AWQ's words, and which layers have them in the producer's own words."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from lmkit.api import LinearSpec, QuantScheme, UnsupportedModel
from lmkit_layouts import AwqWords, GptqWords, Settings
from lmkit_layouts.settings import MAX_NAMES, PLAIN_NAME, WHERE, agreed, names_module, of_layer

BITS = (2, 3, 4, 8)
PLAIN_BITS = (16, 32)  # of what is not quantized
OWN, GPTQ, AWQ = "auto_round", "auto_round:auto_gptq", "auto_round:auto_awq"  # its own has zeros as they are
# How the weights were found; nothing of how they are stored.
IGNORED = (
    "quant_method", "autoround_version", "amp", "enable_quanted_input", "enable_minmax_tuning",
    "enable_norm_bias_tuning", "iters", "lr", "minmax_lr", "nsamples", "seqlen", "batch_size",
    "gradient_accumulate_steps", "low_gpu_mem_usage", "low_cpu_mem_usage", "dataset", "sampler", "backend",
)  # fmt: skip
FORM = ("scale_dtype", "super_bits", "super_group_size")  # of what is not stored as words
ACTIVATIONS = ("act_bits", "act_group_size", "act_data_type", "act_sym", "act_dynamic")


@dataclass(frozen=True, slots=True)
class Stored:
    bits: int
    group: int  # 0 = all columns


@dataclass(frozen=True, slots=True)
class AutoRoundScheme(QuantScheme):
    """`blocks`: modules within which linears are quantized; () = all but the output head. `extra`: modules that are
    stored otherwise; None = plainly."""

    stored: Stored
    packing: str
    blocks: tuple[str, ...] = ()
    extra: Mapping[str, Stored | None] = field(default_factory=dict)
    name: str = "auto-round"

    @classmethod
    def parse(cls, quantization_config: Mapping[str, object]) -> AutoRoundScheme:
        given = Settings(quantization_config, IGNORED)
        packing = given.one_of("packing_format", (OWN, GPTQ, AWQ), OWN)
        stored = Stored(given.one_of("bits", (4,) if packing == AWQ else BITS, 4), given.group("group_size", 128))
        _integers(given)
        blocks = given.get("block_name_to_quantize") or given.get("to_quant_block_names")
        names = blocks.split(",") if isinstance(blocks, str) else blocks or []
        if not isinstance(names, list) or len(names) > MAX_NAMES or not all(map(_is_name, names)):
            raise given.unsupported("block_name_to_quantize", "names of modules")
        scheme = cls(stored, packing, tuple(name.strip() for name in names), _extra(given, stored, packing))
        given.done()
        return scheme

    def for_layer(self, layer: LinearSpec) -> GptqWords | AwqWords | None:
        stored = agreed(layer, [self._of_module(name) for name in of_layer(layer)], "extra_config")
        if stored is None or layer.is_head:
            return None
        parts, width = layer.out_features, layer.in_features
        if self.packing == AWQ:
            return AwqWords(group=stored.group, parts=parts, width=width)
        wide = stored.bits == 8
        return GptqWords(
            stored_bits=stored.bits, group=stored.group, parts=parts, width=width, bits=8 if wide else 4,
            name="int8" if wide else "int4", version=2 if self.packing == OWN else 1,
        )  # fmt: skip

    def _of_module(self, name: str) -> Stored | None:
        if name in self.extra:
            return self.extra[name]
        return self.stored if not self.blocks or any(names_module(block, name) for block in self.blocks) else None


def _is_name(value: object) -> bool:
    return isinstance(value, str) and PLAIN_NAME.match(value.strip()) is not None


def _integers(given: Settings, plain: bool = False) -> None:
    """Whether weights are integers, or none at all, and nothing else is rounded. Raises UnsupportedModel."""
    given.one_of("data_type", ("float", "fp", "int") if plain else ("int",), "int")
    given.flag("sym", True)  # zeros are read either way
    for key in FORM:
        given.one_of(key, (None, "torch.float16", "float16", "fp16"), None)
    for key in ACTIVATIONS:
        if given.get(key) not in (None, 16, 32, "float", "fp", False):
            raise given.unsupported(key, "activations that are not rounded")


def _extra(given: Settings, base: Stored, packing: str) -> dict[str, Stored | None]:
    """extra_config: module -> what differs there."""
    found = given.get("extra_config") or {}
    if not isinstance(found, Mapping) or len(found) > MAX_NAMES or not all(map(_is_name, found)):
        raise given.unsupported("extra_config", "names of modules, each with an object")
    stored: dict[str, Stored | None] = {}
    for name, values in found.items():
        where = f"{WHERE}.extra_config.{name}"
        if not isinstance(values, Mapping):
            raise UnsupportedModel(where, values, "an object")
        own = Settings(values, (), where)
        bits = own.one_of("bits", (*((4,) if packing == AWQ else BITS), *PLAIN_BITS), base.bits)
        _integers(own, plain=bits in PLAIN_BITS)
        group = own.group("group_size", base.group or -1)
        own.done()
        stored[name] = None if bits in PLAIN_BITS else Stored(bits, group)
    return stored
