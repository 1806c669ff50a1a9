"""Registration. Light: the implementation is imported when it is chosen."""

from collections.abc import Iterable

from lmkit.api import QuantizationSpec, hookimpl


@hookimpl
def lmkit_quantization_methods() -> Iterable[QuantizationSpec]:
    yield QuantizationSpec(
        name="modelopt",
        summary="ModelOpt's float8 and NVFP4 weights, activations in float8 (quant_method: modelopt)",
        target="lmkit_quantization_modelopt.scheme:ModelOptScheme",
        checkpoint_methods=("modelopt", "modelopt_fp4", "hf_quant_config.json"),
        weight_formats=("fp8", "nvfp4"),
        tensors=(
            "weight", "weight_scale", "weight_scale_2", "input_scale", "weight_scale_inv", "activation_scale",
        ),
    )  # fmt: skip
