"""Registration. Light: the implementation is imported when it is chosen."""

from collections.abc import Iterable

from lmkit.api import QuantizationSpec, hookimpl


@hookimpl
def lmkit_quantization_methods() -> Iterable[QuantizationSpec]:
    yield QuantizationSpec(
        name="quark",
        summary="AMD Quark's integers of 4 and 8 bits, float8 and MXFP4 (quant_method: quark)",
        target="lmkit_quantization_quark.scheme:QuarkScheme",
        checkpoint_methods=("quark",),
        weight_formats=("int4", "int8", "w8a8", "fp8", "mxfp4"),
        tensors=(
            "weight", "weight_scale", "weight_zero_point", "qweight", "qzeros", "scales", "input_scale",
            "input_zero_point", "activation_scale", "weight_scale_inv", "input_global_scale",
        ),
    )  # fmt: skip
