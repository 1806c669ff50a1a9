"""Registration. Light: the implementation is imported when it is chosen."""

from collections.abc import Iterable

from lmkit.api import QuantizationSpec, hookimpl


@hookimpl
def lmkit_quantization_methods() -> Iterable[QuantizationSpec]:
    yield QuantizationSpec(
        name="gptq",
        summary="GPTQ weights of 2, 3, 4 or 8 bits, with or without act-order (quant_method: gptq)",
        target="lmkit_quantization_gptq.scheme:GptqScheme",
        checkpoint_methods=("gptq", "quantize_config.json"),
        weight_formats=("int4", "int8"),
        tensors=("qweight", "qzeros", "scales", "g_idx"),
    )
