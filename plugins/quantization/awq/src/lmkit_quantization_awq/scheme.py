"""The checkpoint format: which layers are quantized, and how one is stored."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from lmkit.api import LinearSpec, QuantScheme
from lmkit_layouts import AwqWords, Settings
from lmkit_layouts.settings import agreed, names_module, of_layer

# What programs of their time did with the weights; nothing of how they are stored.
IGNORED = (
    "quant_method", "do_fuse", "fuse_max_seq_len", "modules_to_fuse", "backend", "exllama_config", "pre_quantized",
    "meta",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class AwqScheme(QuantScheme):
    """`skipped`: parts of names of modules that are not quantized."""

    group: int = 128  # columns per scale; 0 = all
    skipped: tuple[str, ...] = ()
    name: str = "awq"

    @classmethod
    def parse(cls, quantization_config: Mapping[str, object]) -> AwqScheme:
        given = Settings(quantization_config, IGNORED)
        for key in ("bits", "w_bit"):  # either name is in use
            given.one_of(key, (4,), 4)
        group = given.group("q_group_size", given.group("group_size", 128) or -1)
        for key in ("zero_point", "sym"):  # zeros are read either way
            given.flag(key, True)
        for key in ("version", "format", "checkpoint_format"):  # older producers know the first, in capitals at times
            if str(given.get(key, "gemm")).lower() != "gemm":
                raise given.unsupported(key, "'gemm'")
        given.one_of("method", ("awq",), "awq")
        given.one_of("pack_dtype", ("int32",), "int32")
        for key in ("desc_act", "lm_head"):
            given.one_of(key, (False,), False)
        scheme = cls(group, given.names("modules_to_not_convert"))
        given.done()
        return scheme

    def for_layer(self, layer: LinearSpec) -> AwqWords | None:
        if layer.is_head:
            return None
        kept = [any(_skips(entry, name) for entry in self.skipped) for name in of_layer(layer)]
        if agreed(layer, kept, "modules_to_not_convert"):
            return None
        return AwqWords(group=self.group, parts=layer.out_features, width=layer.in_features)


def _skips(entry: str, module: str) -> bool:
    """As producers do: a name, or any part of one that begins and ends at a dot or at a name's edge."""
    return f".{entry}." in f".{module}." or names_module(entry, module)
