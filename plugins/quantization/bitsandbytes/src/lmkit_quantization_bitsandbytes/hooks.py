"""Registration. Light: the implementation is imported when it is chosen."""

from collections.abc import Iterable

from lmkit.api import QuantizationSpec, hookimpl


@hookimpl
def lmkit_quantization_methods() -> Iterable[QuantizationSpec]:
    yield QuantizationSpec(
        name="bitsandbytes",
        summary="NF4, FP4 and int8 (quant_method: bitsandbytes)",
        target="lmkit_quantization_bitsandbytes.scheme:BitsandbytesScheme",
        checkpoint_methods=("bitsandbytes",),
        weight_formats=("nf4", "fp4", "int8"),
        tensors=("weight", "weight_absmax", "weight_scale", "input_scale", "input_zero_point"),
    )
    yield QuantizationSpec(
        name="nf4",
        summary="weights of any checkpoint rounded to NF4 while it is loaded",
        target="lmkit_quantization_bitsandbytes.scheme:Nf4Scheme",
        weight_formats=("nf4",),
        tensors=("weight",),
        online=True,
    )
