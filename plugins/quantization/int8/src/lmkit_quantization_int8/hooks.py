"""Registration. Light: the implementation is imported when it is chosen."""

from collections.abc import Iterable
from dataclasses import dataclass

from lmkit.api import QuantizationSpec, hookimpl


@dataclass(frozen=True, slots=True)
class Options:
    """Options of quantization.int8."""

    group_size: int = 0  # columns that share a scale: 32, 64 or 128; 0 = one scale per output row

    def __post_init__(self) -> None:
        if self.group_size not in (0, 32, 64, 128):
            raise ValueError(f"group_size is {self.group_size}, needs 0, 32, 64 or 128")


@hookimpl
def lmkit_quantization_methods() -> Iterable[QuantizationSpec]:
    yield QuantizationSpec(
        name="int8",
        summary="weights of any checkpoint rounded to 8 bits while it is loaded",
        target="lmkit_quantization_int8.scheme:Int8Scheme",
        options="lmkit_quantization_int8.hooks:Options",
        weight_formats=("int8",),
        tensors=("weight",),
        online=True,
    )
    yield QuantizationSpec(
        name="w8a8",
        summary="weights of any checkpoint, and activations, rounded to 8 bits",
        target="lmkit_quantization_int8.scheme:W8A8Scheme",
        weight_formats=("w8a8",),
        tensors=("weight",),
        online=True,
    )
    yield QuantizationSpec(
        name="experts_int8",
        summary="experts of any mixture rounded to 8 bits while it is loaded, everything else as it is",
        target="lmkit_quantization_int8.scheme:ExpertsInt8Scheme",
        weight_formats=("int8",),
        tensors=("weight",),
        online=True,
    )
