"""Registration. Light: the implementation is imported when it is chosen."""

from collections.abc import Iterable

from lmkit.api import QuantizationSpec, hookimpl


@hookimpl
def lmkit_quantization_methods() -> Iterable[QuantizationSpec]:
    yield QuantizationSpec(
        name="auto-round",
        summary="integers of 2, 3, 4 or 8 bits in the words of GPTQ or AWQ (quant_method: auto-round)",
        target="lmkit_quantization_auto_round.scheme:AutoRoundScheme",
        checkpoint_methods=("auto-round", "intel/auto-round"),
        weight_formats=("int4", "int8"),
        tensors=("qweight", "qzeros", "scales", "g_idx"),
    )
