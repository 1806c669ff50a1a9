"""Registration. Light: the implementation is imported when it is chosen."""

from collections.abc import Iterable

from lmkit.api import QuantizationSpec, hookimpl


@hookimpl
def lmkit_quantization_methods() -> Iterable[QuantizationSpec]:
    yield QuantizationSpec(
        name="torchao",
        summary="torchao's integers of 1 to 8 bits and float8, saved as safetensors (quant_method: torchao)",
        target="lmkit_quantization_torchao.scheme:TorchaoScheme",
        checkpoint_methods=("torchao",),
        weight_formats=("int4", "int8", "w8a8", "fp8"),
        tensors=(
            "weight", "weight_scale", "weight_zero_point", "weight_offset", "input_scale", "input_zero_point",
            "activation_scale", "weight_scale_inv",
        ),
    )  # fmt: skip
