"""Checkpoint formats of quantized weights, claimed by `quantization_config.quant_method`.

Example, entry point `[project.entry-points."lmkit.quantization"] toy4 = "toy_quant.hooks"`::

    from lmkit.api import QuantizationSpec, Tier, hookimpl


    @hookimpl
    def lmkit_quantization_methods():
        yield QuantizationSpec(
            name="toy4", summary="Four bits, toy layout", target="toy_quant.scheme:Toy4",
            tier=Tier.PORTABLE, checkpoint_methods=("toy4",), weight_formats=("toy4_packed",),
        )
"""

from __future__ import annotations

from dataclasses import dataclass

from lmkit.contracts.refusal import Refusal
from lmkit.contracts.specs import SelectRequest, Spec
from lmkit.kinds.base import Kind, Refusals, listed


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizationSpec(Spec):
    """target: a QuantScheme class. `checkpoint_methods`: values of quantization_config.quant_method it claims.

    `online`: it quantizes a checkpoint that is not quantized, while it is loaded, when the user names it. `parse` then
    gets the plugin's options, and the formats store a plain weight.
    """

    checkpoint_methods: tuple[str, ...] = ()
    weight_formats: tuple[str, ...] = ()
    activation_dtypes: frozenset[str] = frozenset({"bfloat16", "float16", "float32"})
    tensors: tuple[str, ...] = ()  # suffixes it consumes
    online: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizationRequest(SelectRequest):
    kind: str = "quantization"
    method: str  # quantization_config.quant_method; "" = the checkpoint is not quantized


def refusals(spec: QuantizationSpec, request: QuantizationRequest) -> Refusals:
    if not request.method and not spec.online:
        yield Refusal("format", "a checkpoint stored that way", "one that is not quantized", "--quantization auto")
    if request.method and request.method not in spec.checkpoint_methods:
        needed = listed(spec.checkpoint_methods) if spec.checkpoint_methods else "an unquantized checkpoint"
        yield Refusal("format", needed, request.method)
    if request.dtype is not None and request.dtype not in spec.activation_dtypes:
        yield Refusal("dtype", listed(spec.activation_dtypes), request.dtype)


KIND = Kind(
    "quantization",
    spec=QuantizationSpec,
    hook="lmkit_quantization_methods",
    used_by="lmkit_worker.loading.load",
    request=QuantizationRequest,
    refusals=refusals,
    needs=("dtype",),
    setting="model.quantization",
    words="auto (what the checkpoint says), none, or a plugin's name",
    doc=__doc__,
)
