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
from typing import TYPE_CHECKING, Protocol

import msgspec

from lmkit.contracts.refusal import Refusal
from lmkit.contracts.specs import SelectRequest, Spec
from lmkit.kinds.base import Kind, Refusals, listed

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from lmkit.contracts.checkpoint import Checkpoint


class TensorEntry(msgspec.Struct, frozen=True):
    """One tensor of a checkpoint, from its header."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    nbytes: int
    file: str


class Loader(Protocol):
    """Reads one checkpoint format."""

    def tensors(self, checkpoint: Checkpoint) -> Sequence[TensorEntry]:
        """Headers only. Raises CheckpointError naming the file when it is damaged."""

    def read(self, entry: TensorEntry) -> Tensor:
        """A memory-mapped CPU tensor where the format allows it. It may become a parameter as it is."""

    def release(self) -> None:
        """What was read so far has been packed or copied, or is read seldom: memory that maps a file may go."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderSpec(Spec):
    """target: a Loader class."""

    formats: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderRequest(SelectRequest):
    """What loaders are asked for."""

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
