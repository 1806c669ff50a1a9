"""Registration. Light: the implementation is imported when it is chosen."""

from collections.abc import Iterable
from dataclasses import dataclass

from lmkit.api import QuantizationSpec, hookimpl


@dataclass(frozen=True, slots=True)
class Options:
    """Options of quantization.int4."""

    group_size: int = 64  # columns that share a scale: 32, 64 or 128
    zero_points: bool = True  # a zero point per group: the 16 values need not lie around zero
    head: str = "int8"  # the output head, also a tied one: int8, int4, or none (as it is)
    activations: str = "int8"  # rounded to 8 bits per group, far finer than the weights; or "float"

    def __post_init__(self) -> None:
        if self.activations not in ("int8", "float"):
            raise ValueError(f"activations is {self.activations!r}, needs int8 or float")
        if self.head not in ("int8", "int4", "none"):
            raise ValueError(f"head is {self.head!r}, needs int8, int4 or none")
        if self.group_size not in (32, 64, 128):
            raise ValueError(f"group_size is {self.group_size}, needs 32, 64 or 128")


@hookimpl
def lmkit_quantization_methods() -> Iterable[QuantizationSpec]:
    yield QuantizationSpec(
        name="int4",
        summary="weights of any checkpoint rounded to 4 bits while it is loaded",
        target="lmkit_quantization_int4.scheme:Int4Scheme",
        options="lmkit_quantization_int4.hooks:Options",
        weight_formats=("int4", "int8"),
        tensors=("weight",),
        online=True,
    )
