"""Model families. One entry point per architecture string; its name must be in `architectures`.

Example, entry point `[project.entry-points."lmkit.model"] ToyForCausalLM = "toy_model.hooks"`::

    from lmkit.api import ModelSpec, hookimpl


    @hookimpl
    def lmkit_models():
        yield ModelSpec(
            name="toy", summary="Toy decoder", target="toy_model.model:Toy",
            architectures=("ToyForCausalLM",),
        )
"""

from __future__ import annotations

from dataclasses import dataclass

from lmkit.contracts.refusal import Refusal
from lmkit.contracts.specs import SelectRequest, Spec
from lmkit.kinds.base import Kind, Refusals


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec(Spec):
    """target: an Architecture class (its module is torch-free; `build` imports torch).

    A plugin that runs any architecture has one entry point, with the plugin's own name, which is in lower case.
    """

    architectures: tuple[str, ...]
    features: frozenset[str] = frozenset({"causal"})  # attention features it may need, for lists
    supports_tp: bool = True
    supports_pp: bool = True
    quantization: frozenset[str] | None = None  # names of the plugins for it that it runs with; None = any


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelRequest(SelectRequest):
    """What model families are asked for."""

    kind: str = "model"
    architecture: str
    tp: int = 1
    pp: int = 1

    def facts(self) -> dict[str, object]:
        return {"architecture": self.architecture}


def refusals(spec: ModelSpec, request: ModelRequest) -> Refusals:
    if request.tp > 1 and not spec.supports_tp:
        yield Refusal("ranks", "tensor-parallel size 1", str(request.tp), "--tp 1")
    if request.pp > 1 and not spec.supports_pp:
        yield Refusal("ranks", "pipeline-parallel size 1", str(request.pp), "--pp 1")


KIND = Kind(
    "model",
    spec=ModelSpec,
    hook="lmkit_models",
    used_by="lmkit_worker.loading.convert",
    request=ModelRequest,
    refusals=refusals,
    needs=("checkpoint",),
    doc=__doc__,
)
