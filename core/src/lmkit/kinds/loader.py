"""Readers of checkpoint files. `formats` are values of `Checkpoint.format`.

Example, entry point `[project.entry-points."lmkit.loader"] toyfile = "toy_loader.hooks"`::

    from lmkit.api import LoaderSpec, hookimpl


    @hookimpl
    def lmkit_loaders():
        yield LoaderSpec(
            name="toyfile", summary="Reads .toy files", target="toy_loader.loader:ToyLoader",
            formats=("toy",),
        )
"""

from __future__ import annotations

from dataclasses import dataclass

from lmkit.contracts.refusal import Refusal
from lmkit.contracts.specs import SelectRequest, Spec
from lmkit.kinds.base import Kind, Refusals, listed


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderSpec(Spec):
    """target: a Loader class."""

    formats: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderRequest(SelectRequest):
    kind: str = "loader"
    format: str


def refusals(spec: LoaderSpec, request: LoaderRequest) -> Refusals:
    if request.format not in spec.formats:
        yield Refusal("format", listed(spec.formats), request.format)


KIND = Kind(
    "loader",
    spec=LoaderSpec,
    hook="lmkit_loaders",
    used_by="lmkit_worker.loading.load",
    request=LoaderRequest,
    refusals=refusals,
    needs=("checkpoint",),
    ask=lambda known: [LoaderRequest(format=known.checkpoint.format)],
    setting="model.loader",
    words="auto or a loader plugin's name",
    doc=__doc__,
)
