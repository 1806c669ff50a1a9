"""Registration. Light: the implementation is imported when it is chosen."""

from collections.abc import Iterable

from lmkit.api import QuantizationSpec, hookimpl


@hookimpl
def lmkit_quantization_methods() -> Iterable[QuantizationSpec]:
    yield QuantizationSpec(
        name="awq",
        summary="AWQ weights of 4 bits, with zero points or without (quant_method: awq)",
        target="lmkit_quantization_awq.scheme:AwqScheme",
        checkpoint_methods=("awq", "quant_config.json"),
        weight_formats=("int4",),
        tensors=("qweight", "qzeros", "scales"),
    )
