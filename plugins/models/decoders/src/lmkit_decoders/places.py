"""Where the tensors of a decoder go: one class for each way in which a file may hold a part. Torch-free."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

from lmkit.api import WeightRule

if TYPE_CHECKING:
    from torch import Tensor

Transform = Callable[["Tensor"], "Tensor"] | None


@dataclass(frozen=True, slots=True)
class Place:
    """A module of the model ("layers.{i}.attn.o"; "{mixer}.conv" is in the mixer), or a part of one ("q")."""

    target: str
    part: str | None = None
    order: ClassVar[int] = 2  # the first rule that matches a name wins: those for single tensors come before the others

    def rules(self, source: str, transform: Transform) -> list[WeightRule]:
        """How the tensors of module `source` of the file get there, each through `transform`."""
        return [WeightRule(f"{source}.{{p}}", f"{self.target}.{{p}}", part=self.part, transform=transform)]

    def within(self, mixer: str) -> Place:
        """The same with the mixer's module filled in."""
        return replace(self, target=self.target.replace("{mixer}", mixer))

    def at(self, layer: int) -> Place:
        """The same in one layer."""
        return replace(self, target=self.target.replace("{i}", str(layer)))


class OneTensor(Place):
    """A single tensor: neither the role nor the target is a module."""

    order = 1

    def rules(self, source: str, transform: Transform) -> list[WeightRule]:
        return [WeightRule(source, self.target, part=self.part, transform=transform)]


class OffsetNorm(Place):
    """A norm whose weight is stored as its difference from 1."""

    def rules(self, source: str, transform: Transform) -> list[WeightRule]:
        weight = WeightRule(f"{source}.weight", f"{self.target}.weight", transform=one_more)
        return [weight, *super().rules(source, transform)]


class HeadNorms(Place):
    """Norms with a weight for each head, stored together or head by head ("{n}" in the name)."""

    def rules(self, source: str, transform: Transform) -> list[WeightRule]:
        part, change = ("{n}", one_row) if "{n}" in source else ("*", None)
        return [WeightRule(f"{source}.weight", f"{self.target}.weight", part=part, transform=change)]


Target = str | tuple[str, str] | Place  # a module, a part of one, or what is stored in another way


def as_place(target: Target) -> Place:
    """The place that a family's table means."""
    if isinstance(target, Place):
        return target
    return Place(target) if isinstance(target, str) else Place(*target)


def mlp_places(path: str, gated: bool, role: str = "") -> dict[str, Place]:
    """Where the tensors of an MLP at module `path` go; `role` precedes the names of its roles."""
    down = {f"{role}down": Place(f"{path}.down")}
    if not gated:
        return {f"{role}up": Place(f"{path}.up"), **down}
    to = f"{path}.gate_up"
    return {f"{role}gate": Place(to, "gate"), f"{role}up": Place(to, "up"), f"{role}gate_up": Place(to, "*"), **down}


def one_more(weight: Tensor) -> Tensor:
    """A norm's weight that is stored as its difference from 1, in float32: sums near 1 lose it in half precision."""
    return weight.float() + 1


def one_row(weight: Tensor) -> Tensor:
    """[D] -> [1, D]."""
    return weight[None]
