"""How one linear is stored, as `QLayerConfig.to_dict` of Quark says it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from lmkit.api import QuantFormat, UnsupportedModel
from lmkit_layouts import AwqWords, ByteRows, Fp8Format, MxFp4, Settings
from lmkit_layouts.fp4 import MX_GROUP

# How numbers were found; nothing of how they are stored.
IGNORED = (
    "observer_cls", "round_method", "scale_type", "scale_calculation_mode", "enable_buffer_reuse", "max_input_numel",
)  # fmt: skip
SCHEMES: dict[str, tuple[str, ...]] = {
    "fp8_e4m3": ("per_tensor", "per_channel", "per_block"),
    "int8": ("per_tensor", "per_channel"),
    "int4": ("per_group",),
    "uint4": ("per_group",),
    "fp4": ("per_group",),
}


@dataclass(frozen=True, slots=True)
class Stored:
    """`dtype` and `scale` in Quark's words."""

    dtype: str
    scale: str
    group: int = 0
    block: tuple[int, int] | None = None
    activations: Literal["float", "int8"] = "float"  # int8: the checkpoint is made for those of 8 bits

    def layout(self, parts: tuple[int, ...], width: int) -> QuantFormat:
        """The format of merged parts with so many rows, and columns."""
        if self.dtype == "fp8_e4m3":
            return Fp8Format(self.block, parts, width, self.scale == "per_channel", "weight_scale")
        if self.dtype == "fp4":
            return MxFp4(parts=parts, width=width, codes="weight")
        if self.dtype != "int8":
            return AwqWords(group=self.group, parts=parts, width=width)
        return ByteRows(
            group=0, parts=parts, width=width, bits=8, zeros=True, whole=self.scale == "per_tensor",
            activations=self.activations, name="w8a8" if self.activations == "int8" else "int8",
        )  # fmt: skip


def read(values: object, where: str) -> Stored | None:
    """None: plainly. Raises UnsupportedModel."""
    if values is None:
        return None
    if not isinstance(values, Mapping):
        raise UnsupportedModel(where, values, "an object, or null")
    given = Settings(values, ("target_device",), where)
    for key in ("bias", "output_tensors"):
        given.one_of(key, (None,), None)
    weight, inputs = given.get("weight"), given.get("input_tensors")
    if not isinstance(weight, Mapping | None):
        raise given.unsupported("weight", "an object that says how weights are stored, or null")
    if not isinstance(inputs, Mapping | None):
        raise given.unsupported("input_tensors", "an object that says how activations are rounded, or null")
    given.done()
    activations = "float" if inputs is None else _activations(inputs, f"{where}.input_tensors")
    return None if weight is None else _weight(weight, f"{where}.weight", activations)


def _weight(values: Mapping[str, object], where: str, activations: Literal["float", "int8"]) -> Stored:
    given = Settings(values, IGNORED, where)
    dtype = given.one_of("dtype", tuple(SCHEMES), "")
    scale = given.one_of("qscheme", SCHEMES[dtype], "")
    integers, block = "int" in dtype, None
    given.one_of("symmetric", (True, False, None) if integers else (True, None), None)  # zeros are read either way
    given.one_of("is_dynamic", (False,), False)
    given.one_of("is_scale_quant", (False, None), None)
    given.one_of("mx_element_dtype", (None,), None)
    given.one_of("zero_point_type", ("int32", None), None)
    given.one_of("scale_format", ("e8m0",) if dtype == "fp4" else (None, "float32"), None)
    given.one_of("ch_axis", {"per_channel": (0,), "per_group": (1, -1)}.get(scale, (None, 0, 1, -1)), None)
    group = given.group("group_size", 0) if scale == "per_group" else 0
    if dtype == "fp4":
        given.one_of("group_size", (MX_GROUP,), None)
    given.get("group_size")
    found = given.get("block_size")
    if scale == "per_block":
        if not isinstance(found, list) or len(found) != 2 or not all(type(n) is int and n > 0 for n in found):
            raise given.unsupported("block_size", "two positive numbers")
        block = (found[0], found[1])
    given.done()
    return Stored(dtype, scale, group, block, activations if dtype == "int8" else "float")


def _activations(values: Mapping[str, object], where: str) -> Literal["float", "int8"]:
    """int8 where kernels that round as they go do what the checkpoint is made for."""
    unread = ("qscheme", "ch_axis", "group_size", "block_size", "scale_format", "zero_point_type", "is_scale_quant")
    given = Settings(values, (*IGNORED, *unread), where)
    dtype = given.one_of("dtype", ("fp8_e4m3", "int8", "fp4"), "")
    given.one_of("mx_element_dtype", (None,), None)
    symmetric, dynamic = given.get("symmetric"), given.one_of("is_dynamic", (True, False), False)
    given.done()
    return "int8" if dtype == "int8" and dynamic and symmetric is not False else "float"
