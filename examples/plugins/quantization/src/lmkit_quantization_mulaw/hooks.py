"""Registers the quantization method `mulaw`. Light: no torch here."""

from lmkit.api import QuantizationSpec, hookimpl


@hookimpl
def lmkit_quantization_methods():
    yield QuantizationSpec(
        name="mulaw",
        interface=1,
        summary="Weights as bytes on a logarithmic scale, as telephones send speech",
        target="lmkit_quantization_mulaw.scheme:MuLaw",
        checkpoint_methods=("mulaw",),  # values of quantization_config.quant_method in config.json that it reads
        weight_formats=("mulaw",),  # what kernels of the kind `op` may name to run them
        tensors=("codes", "scales"),  # how a layer's tensors are called in files
    )
