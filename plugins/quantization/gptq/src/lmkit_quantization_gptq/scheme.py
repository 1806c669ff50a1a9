"""The checkpoint format: which layers are quantized, and how one is stored."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from lmkit.api import LinearSpec, QuantScheme, UnsupportedModel
from lmkit_layouts import GptqWords, Settings
from lmkit_layouts.settings import WHERE, Pattern, agreed, names_module, of_layer

BITS = (2, 3, 4, 8)
# How the weights were found, and what programs of their time did with them; nothing of how they are stored.
IGNORED = (
    "meta", "damp_percent", "damp_auto_increment", "static_groups", "true_sequential", "mse", "dataset", "tokenizer",
    "batch_size", "pad_token_id", "model_seqlen", "max_input_length", "cache_block_outputs", "block_name_to_quantize",
    "module_name_preceding_first_block", "use_exllama", "disable_exllama", "exllama_config", "use_cuda_fp16",
    "use_triton", "backend", "model_name_or_path", "model_file_base_name", "quant_method", "act_group_aware", "hyb_act",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Stored:
    """How one linear is stored."""

    bits: int
    group: int  # 0 = all columns
    ordered: bool


@dataclass(frozen=True, slots=True)
class GptqScheme(QuantScheme):
    """`dynamic`: what holds where a pattern matches the beginning of a module's name, the first that does; None = it is
    not quantized. `modules`: endings of the names of those that are; () = all but the output head."""

    stored: Stored
    version: int = 1
    dynamic: tuple[tuple[Pattern, Stored | None], ...] = ()
    modules: tuple[str, ...] = ()
    name: str = "gptq"

    @classmethod
    def parse(cls, quantization_config: Mapping[str, object]) -> GptqScheme:
        given = Settings(quantization_config, IGNORED)
        stored = Stored(given.one_of("bits", BITS, 4), given.group("group_size", 128), given.flag("desc_act", False))
        given.flag("sym", True)  # zeros are read either way
        given.one_of("pack_dtype", ("int32",), "int32")
        given.one_of("lm_head", (False,), False)
        given.one_of("is_marlin_format", (False,), False)
        given.one_of("method", ("gptq",), "gptq")
        form = given.one_of("checkpoint_format", ("gptq", "gptq_v2"), "gptq")
        given.one_of("format", ("gptq", "gptq_v2"), form)
        scheme = cls(stored, 2 if form == "gptq_v2" else 1, _dynamic(given, stored), _modules(given))
        given.done()
        return scheme

    def for_layer(self, layer: LinearSpec) -> GptqWords | None:
        if layer.is_head:
            return None
        stored = agreed(layer, [self._of_module(name) for name in of_layer(layer)], "dynamic")
        if stored is None:
            return None
        return GptqWords(
            stored_bits=stored.bits, group=stored.group, parts=layer.out_features, width=layer.in_features,
            ordered=stored.ordered, bits=8 if stored.bits == 8 else 4, name="int8" if stored.bits == 8 else "int4",
            version=self.version,
        )  # fmt: skip

    def _of_module(self, name: str) -> Stored | None:
        for pattern, stored in self.dynamic:
            if pattern.matches(name):
                return stored
        if self.modules and not any(names_module(module, name) for module in self.modules):
            return None
        return self.stored


def _dynamic(given: Settings, base: Stored) -> tuple[tuple[Pattern, Stored | None], ...]:
    """Keys are patterns: "-:" before one leaves modules as they are, "+:" or nothing gives them other values."""
    found = given.get("dynamic") or {}
    if not isinstance(found, Mapping) or len(found) > 1000 or not all(isinstance(key, str) for key in found):
        raise given.unsupported("dynamic", "patterns of names with what holds for them")
    rules: list[tuple[Pattern, Stored | None]] = []
    for key, values in found.items():
        if key.startswith("-:"):
            rules.append((Pattern(key[2:], "dynamic"), None))
            continue
        if not isinstance(values, Mapping):
            raise UnsupportedModel(f"{WHERE}.dynamic.{key}", values, "an object")
        own = Settings(values, ("mse", "damp_percent", "act_group_aware"), f"{WHERE}.dynamic.{key}")
        stored = replace(
            base,
            bits=own.one_of("bits", BITS, base.bits),
            group=own.group("group_size", base.group or -1),
            ordered=own.flag("desc_act", base.ordered),
        )
        own.flag("sym", True)
        own.done()
        rules.append((Pattern(key.removeprefix("+:"), "dynamic"), stored))
    return tuple(rules)


def _modules(given: Settings) -> tuple[str, ...]:
    """modules_in_block_to_quantize: lists of names within a block, in the order in which they were quantized."""
    key = "modules_in_block_to_quantize"
    found = given.get(key) or []
    if not isinstance(found, list):
        raise given.unsupported(key, "lists of module names")
    return tuple(
        name for each in found for name in Settings({key: [each] if isinstance(each, str) else each}).names(key)
    )
