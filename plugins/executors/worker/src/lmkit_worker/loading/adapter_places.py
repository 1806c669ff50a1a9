"""Places of an adapter's modules, found by the weight rules that also place the base model's weights."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from lmkit.api import LinearSpec, ModelInfo, TensorEntry, UnsupportedModel, WeightRule

from lmkit_worker.loading.adapter_config import AdapterConfig
from lmkit_worker.loading.adapter_files import CONFIG
from lmkit_worker.loading.moves import layouts, stored_outputs
from lmkit_worker.loading.rules import Match, Rules

if TYPE_CHECKING:
    from lmkit.api import Loader
    from torch import Tensor

EMBED, HEAD = "embed", "lm_head"  # modules of a model
WHOLE, LENGTHS = "whole", "magnitude_vector"  # in place of a side: the weight itself, the lengths of DoRA
LAYER = re.compile(r".*?\.\d+\.")  # the beginning of names within a layer
SHARED = "shared_experts"  # what the library calls the expert that every token has
ALL = "*"  # a rule's part: all, or with a name behind it all of that name


@dataclass(frozen=True, slots=True)
class Place:
    """The part of a linear that a checkpoint module became: outputs [low, high) of `linear`, or the embedding.

    `order`: which of the module's outputs is each of these, where they are not in order. `experts`: the module is a
    stack of so many, of each of which [low, high) are outputs, and those of the next one are `stride` further.
    `turned`: A has the outputs and B the inputs, see ModelInfo.turned_experts.
    """

    linear: str
    in_features: int
    low: int
    high: int
    order: tuple[int, ...] = ()
    experts: int = 0
    stride: int = 0
    turned: bool = False

    def shape(self, side: str, rank: int) -> tuple[int, ...]:
        """The shape of the tensor of that side; an embedding's weight is [in, out]."""
        whole = (self.high - self.low, self.in_features)
        if side == LENGTHS:
            return whole[:1]
        if side == WHOLE:
            return whole[::-1] if self.linear == EMBED else whole
        rank *= self.experts or 1
        outputs, inputs = whole[::-1] if self.turned else whole
        return (rank, inputs) if side == "A" else (outputs, rank)


@dataclass(frozen=True, slots=True)
class AdapterTarget:
    """A place that a module of an adapter may mean, and the name by which PEFT knows it: its own or a parameter's."""

    name: str
    place: Place


@dataclass(frozen=True, slots=True)
class BaseModel:
    """The base model's tensors, and the rules that place them."""

    rules: Rules
    loader: Loader
    entries: Mapping[str, TensorEntry]
    _orders: dict[tuple[object, ...], tuple[int, ...] | None] = field(default_factory=dict)

    def order(self, what: str, rule: WeightRule, outputs: int, inputs: int, experts: int = 0) -> tuple[int, ...]:
        """Which output of the module `what`, or of each expert of a stack, is each output of the model's; () when they
        are in order.

        Raises UnsupportedModel where the rule of its weight does more than put outputs in another order.
        """
        if rule.transform is None and not experts:
            return ()
        key = (rule.source, outputs, inputs, experts)
        if key not in self._orders:
            self._orders[key] = _order(rule.transform, outputs, inputs, experts)
        order = self._orders[key]
        if order is None:
            stored = "expert by expert and output by output" if experts else "output by output"
            raise UnsupportedModel("adapter module", what, f"one whose weight is stored {stored}")
        return order

    def weight(self, module: str, place: Place) -> Tensor:
        """[out, in] float32 as the model has it. Raises UnsupportedModel where it is not stored plainly."""
        name = f"{module}.weight"
        match, entry = self.rules.match(name), self.entries.get(name)
        if match is None or entry is None or not entry.dtype.startswith(("float", "bfloat")):
            raise UnsupportedModel(f"{CONFIG} use_dora", True, "False: the base model's weights are not stored plainly")
        weight = self.loader.read(entry).float()
        weight = weight if match.rule.transform is None else match.rule.transform(weight)
        if tuple(weight.shape) != place.shape(WHOLE, 0):
            raise UnsupportedModel(f"{CONFIG} use_dora", True, f"False: {name} has not one row for each output")
        return weight


class Places:
    """Finds where the modules of an adapter went."""

    def __init__(self, info: ModelInfo, base: BaseModel | None) -> None:
        self.info, self.base = info, base
        self.known = places_of(info)
        self.specs = {spec.name: spec for spec in info.linears}
        self.mixtures = {spec.name.rpartition(".experts.")[0] for spec in info.linears if spec.experts}
        self.stacks = [spec for spec in info.linears if spec.experts and spec.sources]

    def find(self, module: str, config: AdapterConfig) -> list[AdapterTarget]:
        """The places where a module may be; several where it holds stacks of experts, whose parameters the file leaves
        unnamed."""
        name = f"{module}.weight" if config.targeted(f"{module}.weight") else module
        place = self.known.get(module)
        if self.base is None:
            return [] if place is None else [AdapterTarget(name, place)]
        if place is not None:
            return [AdapterTarget(name, self._ordered(module, place))]
        layer, last = LAYER.match(module), module.rpartition(".")[2]
        stacks = [spec for spec in self.stacks if layer and spec.sources[0].startswith(layer[0])]
        # the library may call the block that holds the experts otherwise than the file
        blocks = {spec.sources[0].partition(".experts")[0] for spec in stacks}
        for at in (module, *(f"{block}.{last}" for block in sorted(blocks))):
            if (place := self._stored(at)) is not None:
                return [AdapterTarget(name, place)]
        if (place := self._shared(module, layer[0] if layer else "")) is not None:
            return [AdapterTarget(name, place)]
        if last != "experts":
            return []
        return [candidate for spec in stacks for candidate in self._stacked(module, spec, config)]

    def _ordered(self, module: str, place: Place) -> Place:
        """With the order of its outputs, where the rule of its weight changes it."""
        assert self.base is not None
        match = self.base.rules.match(f"{module}.weight")
        if match is None or place.linear == EMBED:
            return place
        return replace(place, order=self.base.order(module, match.rule, place.high - place.low, place.in_features))

    def _stored(self, module: str) -> Place | None:
        """The place of the weight of this name."""
        assert self.base is not None
        match = self.base.rules.match(f"{module}.weight")
        entry = self.base.entries.get(f"{module}.weight")
        if match is None or match.rule.ignore:
            return None
        target = match.target.removesuffix(".weight")
        if target.rpartition(".")[2] in ("router", "shared_gate") and target.rpartition(".")[0] in self.mixtures:
            plain = entry is not None and len(entry.shape) == 2 and match.rule.transform is None
            return Place(target, entry.shape[1], 0, entry.shape[0]) if entry is not None and plain else None
        spec = self.specs.get(target)
        if spec is None:
            return None
        if spec.experts and isinstance(match.part, str) and match.part.startswith(ALL):
            return self._of_stack(module, spec, match.rule, match.part)
        if module.rpartition(".")[2] not in self.info.adapter_targets:
            return None
        place = self._part(spec, match)
        return None if place is None else self._ordered(module, place)

    def _shared(self, module: str, layer: str) -> Place | None:
        """The linear of the shared expert of a layer, whose block the library calls otherwise than the file."""
        *_, block, linear = ("", "", *module.split("."))
        if not layer or block != SHARED:
            return None
        sources = [s for s in self.known if s.startswith(layer) and s.endswith(f".{linear}") and ".shared_" in s]
        return self._ordered(sources[0], self.known[sources[0]]) if len(sources) == 1 else None

    def _part(self, spec: LinearSpec, match: Match) -> Place | None:
        """Outputs of the one part, or of all."""
        parts = spec.parts or (None,)
        chosen = range(len(parts)) if match.part == ALL else [i for i, part in enumerate(parts) if part == match.part]
        if not chosen:
            return None
        low = sum(spec.out_features[: chosen[0]])
        return Place(spec.name, spec.in_features, low, low + sum(spec.out_features[i] for i in chosen))

    def _stacked(self, module: str, spec: LinearSpec, config: AdapterConfig) -> Iterator[AdapterTarget]:
        """Stacks of experts, or of one part of each, as parameters of `module`: by the rules of stacks that files hold,
        or as the library joins experts that files hold one by one."""
        assert self.base is not None
        target, gated = f"{spec.name}.weight", len(spec.parts) > spec.experts
        usual = "gate_up_proj" if gated else "up_proj" if spec.name.endswith(".up") else "down_proj"
        of_first = spec.parts[: len(spec.parts) // spec.experts]
        parts = (ALL, *(f"{ALL}.{part.partition('.')[2]}" for part in of_first if "." in part))
        places: dict[str, Place] = {}
        for part in parts:
            for source, rule in self.base.rules.sources(target, part):
                if rule.part == part and (place := self._of_stack(source, spec, rule, part)) is not None:
                    parameter = source.removesuffix(".weight").rpartition(".")[2]
                    usual_too = part == ALL and not config.targeted(f"{module}.{parameter}")
                    places.setdefault(usual if usual_too else parameter, place)
        if not any(place.high - place.low == _per_expert(spec) for place in places.values()):
            self._check_single(spec)
            size = _per_expert(spec)
            places[usual] = Place(spec.name, spec.in_features, 0, size, (), spec.experts, size)
        yield from (AdapterTarget(f"{module}.{parameter}", place) for parameter, place in places.items())

    def _check_single(self, spec: LinearSpec) -> None:
        """Raises UnsupportedModel where the outputs of single experts are put in another order."""
        assert self.base is not None
        num = len(spec.parts) // spec.experts
        for part, outputs in zip(spec.parts[:num], spec.out_features[:num], strict=True):
            for source, rule in self.base.rules.sources(f"{spec.name}.weight", part):
                if rule.part != ALL and self.base.order(source, rule, outputs, spec.in_features):
                    raise UnsupportedModel("adapter module", source, "experts whose outputs are stored in order")

    def _of_stack(self, module: str, spec: LinearSpec, rule: WeightRule, part: str) -> Place | None:
        """The place of a stack, or of a part of each of its experts, as a file has it."""
        assert self.base is not None
        num = len(spec.parts) // spec.experts
        chosen = [i for i in range(num) if part == ALL or spec.parts[i].endswith(part[1:])]
        if not chosen or chosen != list(range(chosen[0], chosen[-1] + 1)):
            return None
        low = sum(spec.out_features[: chosen[0]])
        high = low + sum(spec.out_features[i] for i in chosen)
        order = self.base.order(module, rule, high - low, spec.in_features, spec.experts)
        turned = self.info.turned_experts
        return Place(spec.name, spec.in_features, low, high, order, spec.experts, _per_expert(spec), turned)


def places_of(info: ModelInfo) -> dict[str, Place]:
    """Checkpoint module -> where it went, of the linears that may have an adapter."""
    found: dict[str, Place] = {}
    for spec in info.linears:
        for source, low, high in _spans(spec):
            if source.rpartition(".")[2] in info.adapter_targets:
                found[source] = Place(spec.name, spec.in_features, low, high)
    if info.embedding:
        found[info.embedding] = Place(EMBED, info.vocab_size, 0, info.hidden_size)
    return found


def _per_expert(spec: LinearSpec) -> int:
    return spec.total_out // spec.experts


def _spans(spec: LinearSpec) -> list[tuple[str, int, int]]:
    if len(spec.sources) != len(spec.out_features):
        return []
    ends = [sum(spec.out_features[: i + 1]) for i in range(len(spec.out_features))]
    return [(s, end - size, end) for s, end, size in zip(spec.sources, ends, spec.out_features, strict=True)]


def _order(
    transform: Callable[[Tensor], Tensor] | None, outputs: int, inputs: int, experts: int
) -> tuple[int, ...] | None:
    """The order in which a transform puts outputs, the same in each expert; () as they are, None where it does more."""
    numbers = stored_outputs(transform, layouts(outputs, experts), inputs)
    if numbers is None:
        return None
    order = numbers[:outputs]
    if numbers != [expert * outputs + output for expert in range(experts or 1) for output in order]:
        return None
    return () if order == list(range(outputs)) else tuple(order)
