"""Registration. Light: the implementation is imported when it is chosen."""

from lmkit.api import OpSpec, QuantizationSpec, Range, Tier, hookimpl


@hookimpl
def lmkit_quantization_methods() -> list[QuantizationSpec]:
    return [
        QuantizationSpec(
            name="fp8",
            summary="float8 e4m3 weights with block or tensor scales, or rounded to such while they are loaded",
            target="lmkit_quantization_fp8.scheme:Fp8Scheme",
            checkpoint_methods=("fp8",),
            weight_formats=("fp8",),
            tensors=("weight", "weight_scale_inv", "weight_scale", "input_scale", "activation_scale"),
            online=True,
        )
    ]


@hookimpl
def lmkit_ops() -> list[OpSpec]:
    return [
        OpSpec(
            name="fp8_scaled_mm",
            summary="linear over float8 weights and activations by torch's float8 product, scales per row",
            target="lmkit_quantization_fp8.scaled:Fp8ScaledMM",
            op="linear",
            formats=frozenset({"fp8"}),
            dtypes=frozenset({"bfloat16"}),  # all that its result can be
            platforms=("cuda",),
            capability=Range((8, 9), None),
            tier=Tier.OPTIMIZED,
            bits=8,
        ),
        OpSpec(
            name="fp8_torch",
            summary="linear over float8 weights, activations rounded as the checkpoint says",
            target="lmkit_quantization_fp8.kernel:Fp8Torch",
            op="linear",
            formats=frozenset({"fp8"}),
            tier=Tier.PORTABLE,
            bits=8,
        ),
        OpSpec(
            name="fp8_weights",
            summary="linear over float8 weights, activations as they are",
            target="lmkit_quantization_fp8.kernel:Fp8Weights",
            op="linear",
            formats=frozenset({"fp8"}),
            tier=Tier.PORTABLE,  # of two equal ones the first name comes first
            bits=8,
        ),
    ]
