"""Registration. Light: the implementation is imported when it is chosen."""

from lmkit.api import OpSpec, QuantizationSpec, Tier, hookimpl


@hookimpl
def lmkit_quantization_methods() -> list[QuantizationSpec]:
    return [
        QuantizationSpec(
            name="mxfp4",
            summary="experts in 4-bit floats with a power of two per 32 columns (quant_method: mxfp4)",
            target="lmkit_quantization_mxfp4.scheme:MxFp4Scheme",
            checkpoint_methods=("mxfp4",),
            weight_formats=("mxfp4",),
            tensors=("weight_packed", "weight_scale", "input_global_scale"),
        )
    ]


@hookimpl
def lmkit_ops() -> list[OpSpec]:
    return [
        OpSpec(
            name="fp4_torch",
            summary="linear over 4-bit floats, dequantised a slice of rows at a time",
            target="lmkit_quantization_mxfp4.kernel:Fp4Torch",
            op="linear",
            formats=frozenset({"mxfp4", "nvfp4"}),
            tier=Tier.PORTABLE,
        ),
        OpSpec(
            name="moe_fp4_torch",
            summary="mixtures whose experts are 4-bit floats, each as a linear of that kind",
            target="lmkit_quantization_mxfp4.experts:Fp4Experts",
            op="moe",
            formats=frozenset({"mxfp4", "nvfp4"}),
            tier=Tier.PORTABLE,
        ),
    ]
