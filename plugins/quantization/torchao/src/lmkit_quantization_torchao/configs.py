"""What `config_to_dict` of torchao writes: {"_type": name of a class, "_version": n, "_data": {its fields}}."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from lmkit.api import QuantFormat, UnsupportedModel
from lmkit_layouts import ByteRows, Fp8Format, OffsetRows, Settings
from lmkit_layouts.settings import MAX_NAMES, PLAIN_NAME, Pattern

# How the weights were found, and what programs do with them; nothing of how they are stored. The second line are fields
# of version 1, which later versions wrote too, and did not use.
IGNORED = (
    "set_inductor_config", "int4_choose_qparams_algorithm", "intx_choose_qparams_algorithm", "weight_only_decode",
    "layout", "use_hqq", "zero_point_domain", "preserve_zero", "act_mapping_type", "mapping_type",
    "weight_mapping_type", "scale_dtype", "weight_scale_dtype", "reduce_range", "activation_dtype",
    "activation_value_lb", "activation_value_ub", "kernel_preference", "mm_config", "alg_id",
)  # fmt: skip
INTEGERS = tuple(f"int{bits}" for bits in range(1, 9))
MAX_PATTERNS = 1000
SIXTEEN = (16, 16)  # float8 is not multiplied with float8 where a size is no multiple of this
TENSOR, ROW = (0, 0), (1, 0)  # blocks


@dataclass(frozen=True, slots=True)
class Stored:
    """How a weight is stored. `block`: rows and columns that share a scale, 0 = all."""

    kind: Literal["int4", "tiles", "integers", "float8"]
    block: tuple[int, int]
    bits: int = 8
    activations: Literal["float", "int8"] = "float"  # int8: the checkpoint is made for those of 8 bits
    multiple: tuple[int, int] = (1, 1)  # weights whose sizes are no multiples of these are left plain

    @property
    def by_block(self) -> bool:
        """Whether more than one scale is for a row."""
        return self.block not in (TENSOR, ROW)

    def layout(self, parts: tuple[int, ...], width: int) -> QuantFormat:
        """The format of merged parts with so many rows, and columns. The scale of a tensor is that of each row here."""
        if self.kind == "float8":
            return Fp8Format(self.block if self.by_block else None, parts, width, not self.by_block, "weight_scale")
        four = self.bits <= 4
        common: dict[str, Any] = {
            "group": self.block[1], "parts": parts, "width": width, "stored_bits": 4 if four else 8,
            "bits": 4 if four else 8, "activations": "int8" if four else self.activations,
            "name": "int4" if four else "w8a8" if self.activations == "int8" else "int8",
        }  # fmt: skip
        return ByteRows(zeros=True, **common) if self.kind == "integers" else OffsetRows(**common)


Rules = tuple[tuple[str | Pattern, Stored | None], ...]


def read(found: object, where: str) -> tuple[Stored | None, Rules]:
    """How weights are stored: usually, and those that are named. Raises UnsupportedModel."""
    if isinstance(found, Mapping) and found.get("_type") in ("FqnToConfig", "ModuleFqnToConfig"):
        return _by_name(found, where)
    return _one(found, where), ()


def _one(found: object, where: str) -> Stored:
    if not isinstance(found, Mapping) or not isinstance(found.get("_data"), Mapping):
        raise UnsupportedModel(where, found, "an object with _type, _version and _data")
    outer = Settings(found, ("_data",), where)
    reader = READERS[outer.one_of("_type", tuple(READERS), "")]
    outer.one_of("_version", (2,), 1)
    outer.done()
    given = Settings(found["_data"], IGNORED, f"{where}._data")
    stored = reader(given)
    given.done()
    return stored


def _by_name(found: Mapping[str, object], where: str) -> tuple[Stored | None, Rules]:
    """The rules in the order in which they count: names first, then patterns."""
    data = found.get("_data")
    given = Settings(data if isinstance(data, Mapping) else {}, (), f"{where}._data")
    key = "fqn_to_config" if given.get("fqn_to_config") else "module_fqn_to_config"
    rules, again = given.get(key), given.get("module_fqn_to_config")
    given.done()
    if not isinstance(rules, Mapping) or len(rules) > MAX_NAMES or not all(isinstance(name, str) for name in rules):
        raise given.unsupported(key, f"at most {MAX_NAMES} names of modules, each with how it is stored")
    if again not in (rules, {}, None):
        raise given.unsupported(key, "the same as module_fqn_to_config")
    if sum(name.startswith("re:") for name in rules) > MAX_PATTERNS:
        raise given.unsupported(key, f"at most {MAX_PATTERNS} patterns (re:)")
    names: list[tuple[str | Pattern, Stored | None]] = []
    patterns: list[tuple[str | Pattern, Stored | None]] = []
    usual = None
    for name, value in rules.items():
        stored = None if value is None else _one(value, f"{where}._data.{key}.{name[:200]}")
        if name == "_default":
            usual = stored
        elif name.startswith("re:"):
            patterns.append((Pattern(f"(?:{name[3:]})\\Z", f"quant_type.default._data.{key}"), stored))
        elif PLAIN_NAME.match(name):
            names.append((name, stored))
        else:
            raise given.unsupported(key, "names of modules, and patterns (re:)")
    return usual, (*names, *patterns)


def _said(given: Settings, key: str, values: tuple[str, ...], default: str) -> str:
    """One of `values`, which an enumeration or a dtype is written as."""
    found = given.get(key)
    name = found.get("_data") if isinstance(found, Mapping) else default if found is None else found
    if name not in values:
        raise given.unsupported(key, ", ".join(values))
    return str(name)


def _block(given: Settings, key: str, kinds: tuple[str, ...]) -> tuple[int, int]:
    """What shares a scale. Of two the first is for activations."""
    found = given.get(key)
    if isinstance(found, list) and len(found) == 2:
        found = found[1]
    kind, data = (found.get("_type"), found.get("_data")) if isinstance(found, Mapping) else ("PerRow", {})
    if (found is not None and not isinstance(found, Mapping)) or kind not in kinds or not isinstance(data, Mapping):
        raise given.unsupported(key, ", ".join(kinds))
    if kind in ("PerRow", "PerAxis"):
        if data.get("dim", -1) not in (-1, 1) or data.get("axis", 0) != 0:
            raise given.unsupported(key, "a scale for each row")
        return ROW
    if kind == "PerTensor":
        return TENSOR
    block = data.get("block_size") if kind == "PerBlock" else [1, data.get("group_size")]
    if not isinstance(block, list) or len(block) != 2 or not all(type(n) is int and n > 0 for n in block):
        raise given.unsupported(key, "positive sizes")
    if kind == "PerGroup":
        _group(given, block[1], key)
    return block[0], block[1]


def _group(given: Settings, size: object, key: str) -> int:
    if type(size) is not int or size <= 0 or size % 8:
        raise given.unsupported(key, "groups of a multiple of 8 columns")
    return size


def _int4(given: Settings) -> Stored:
    group = _group(given, given.get("group_size", 128), "group_size")
    key = "int4_packing_format" if given.get("int4_packing_format") is not None else "packing_format"
    given.get("packing_format")
    packing = _said(given, key, ("PLAIN", "TILE_PACKED_TO_4D"), "PLAIN")
    given.one_of("int4_tile_packed_ntile", (8,), 8)
    return Stored("int4" if packing == "PLAIN" else "tiles", (1, group), 4, multiple=(1, group))


def _int8(given: Settings) -> Stored:
    given.one_of("group_size", (None,), None)
    return Stored("integers", _block(given, "granularity", ("PerRow", "PerTensor", "PerGroup")))


def _w8a8(given: Settings) -> Stored:
    symmetric = _said(given, "act_mapping_type", ("SYMMETRIC", "ASYMMETRIC"), "SYMMETRIC") == "SYMMETRIC"
    block = _block(given, "granularity", ("PerRow", "PerTensor"))
    return Stored("integers", block, activations="int8" if symmetric else "float")


def _intx(given: Settings, prefix: str = "") -> Stored:
    bits = int(_said(given, "weight_dtype", INTEGERS, "int8")[3:])
    key = "intx_packing_format" if given.get("intx_packing_format") is not None else "packing_format"
    given.get("packing_format")
    _said(given, key, ("UNPACKED_TO_INT8",), "UNPACKED_TO_INT8")
    return Stored("integers", _block(given, f"{prefix}granularity", ("PerAxis", "PerGroup")), bits)


def _float8(given: Settings) -> Stored:
    _said(given, "weight_dtype", ("float8_e4m3fn",), "float8_e4m3fn")
    return Stored("float8", _block(given, "granularity", ("PerRow", "PerTensor", "PerGroup", "PerBlock")))


def _float8_both(given: Settings) -> Stored:
    _said(given, "packing_format", ("PLAIN",), "PLAIN")
    return Stored("float8", _float8(given).block, multiple=SIXTEEN)


READERS: dict[str, Callable[[Settings], Stored]] = {
    "Int4WeightOnlyConfig": _int4,
    "Float8DynamicActivationInt4WeightConfig": _int4,
    "Int8WeightOnlyConfig": _int8,
    "Int8DynamicActivationInt8WeightConfig": _w8a8,
    "IntxWeightOnlyConfig": _intx,
    "Int8DynamicActivationIntxWeightConfig": lambda given: _intx(given, "weight_"),
    "Float8WeightOnlyConfig": _float8,
    "Float8DynamicActivationFloat8WeightConfig": _float8_both,
}
