"""Registration. Light: the implementation is imported when it is chosen."""

from collections.abc import Iterable

from lmkit.api import QuantizationSpec, hookimpl


@hookimpl
def lmkit_quantization_methods() -> Iterable[QuantizationSpec]:
    yield QuantizationSpec(
        name="compressed-tensors",
        summary="integers of 2, 3, 4 or 8 bits, float8, 4-bit floats, by groups (quant_method: compressed-tensors)",
        target="lmkit_quantization_compressed_tensors.scheme:CompressedTensorsScheme",
        checkpoint_methods=("compressed-tensors",),
        weight_formats=("int4", "int8", "w8a8", "fp8", "mxfp4", "nvfp4"),
        tensors=(
            "weight_packed", "weight", "weight_scale", "weight_zero_point", "weight_g_idx", "weight_shape",
            "input_scale", "input_zero_point", "activation_scale", "weight_scale_inv", "weight_global_scale",
            "input_global_scale",
        ),
    )  # fmt: skip
