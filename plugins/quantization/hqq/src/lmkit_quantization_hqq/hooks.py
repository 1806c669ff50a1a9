"""Registration. Light: the implementation is imported when it is chosen."""

from collections.abc import Iterable

from lmkit.api import QuantizationSpec, hookimpl


@hookimpl
def lmkit_quantization_methods() -> Iterable[QuantizationSpec]:
    yield QuantizationSpec(
        name="hqq",
        summary="HQQ's integers of 1, 2, 3, 4 or 8 bits, by groups of columns (quant_method: hqq)",
        target="lmkit_quantization_hqq.scheme:HqqScheme",
        checkpoint_methods=("hqq",),
        weight_formats=("int4", "int8"),
        tensors=("weight", "weight_scale", "weight_offset"),
    )
