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

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from lmkit.contracts.errors import ConfigError
from lmkit.contracts.refusal import Refusal
from lmkit.contracts.specs import SelectRequest, Spec
from lmkit.kinds.base import Claim, Kind, Known, Refusals, listed

if TYPE_CHECKING:
    from lmkit.contracts.model import LinearSpec, ParamSpec
    from lmkit.contracts.operators import QuantFormat
    from lmkit.kinds.loader import Loader


class QuantScheme(Protocol):
    """A checkpoint format ("fp8", "gptq", ...)."""

    name: str

    @classmethod
    def parse(cls, quantization_config: Mapping[str, object]) -> QuantScheme:
        """Strict: an unknown key or unsupported value raises UnsupportedModel."""

    def for_layer(self, layer: LinearSpec) -> QuantFormat | None:
        """None = leave this layer unquantized."""

    def wrap(self, loader: Loader, wanted: Callable[[str], ParamSpec | None]) -> Loader:
        """`loader`, or one that makes parameters of what files hold; `wanted`: the model's, by a tensor's name."""
        return loader


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizationSpec(Spec):
    """target: a QuantScheme class. `checkpoint_methods`: values of quant_method it claims, or files beside config.json.

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
    """What quantization formats are asked for."""

    kind: str = "quantization"
    method: str  # quantization_config.quant_method; "" = the checkpoint is not quantized
    allowed: tuple[str, ...] | None = None  # names that the model runs with; None = any


def refusals(spec: QuantizationSpec, request: QuantizationRequest) -> Refusals:
    if not request.method and not spec.online:
        yield Refusal("format", "a checkpoint stored that way", "one that is not quantized", "--quantization auto")
    if request.method and request.method not in spec.checkpoint_methods:
        needed = listed(spec.checkpoint_methods) if spec.checkpoint_methods else "an unquantized checkpoint"
        yield Refusal("format", needed, request.method)
    if request.allowed is not None and spec.name not in request.allowed:
        yield Refusal("model", f"a model that runs with {spec.name}", f"one that runs with {listed(request.allowed)}")
    if request.dtype is not None and request.dtype not in spec.activation_dtypes:
        yield Refusal("dtype", listed(spec.activation_dtypes), request.dtype)


def claim(spec: QuantizationSpec, request: QuantizationRequest) -> Claim | None:
    return Claim(0, f"checkpoint says quant_method={request.method}") if request.method else None


def ask(known: Known) -> list[QuantizationRequest]:
    """None for plain weights, unless the user names one that quantizes them while they are loaded."""
    declared, user = known.checkpoint.config.get("quantization_config"), known.config.wants("quantization")
    method = str(declared.get("quant_method", "")) if isinstance(declared, Mapping) else ""
    if method and user == "none":
        raise ConfigError(f"the checkpoint's weights are stored as {method!r}", fix="--quantization auto")
    if not method and user in ("auto", "none"):
        return []
    allowed = None if known.quantization is None else tuple(sorted(known.quantization))
    return [QuantizationRequest(method=method, allowed=allowed, device=known.device, dtype=known.dtype)]


KIND = Kind(
    "quantization",
    spec=QuantizationSpec,
    hook="lmkit_quantization_methods",
    used_by="lmkit_worker.loading.load",
    request=QuantizationRequest,
    refusals=refusals,
    claim=claim,
    needs=("dtype",),
    ask=ask,
    setting="model.quantization",
    words="auto (what the checkpoint says), none, or a plugin's name",
    doc=__doc__,
)
