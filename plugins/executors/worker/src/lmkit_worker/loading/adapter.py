"""PEFT adapters (LoRA, arXiv:2106.09685): read strictly, checked against the base model from headers alone.

adapter_config.json says rank, scale and targets; adapter_model.safetensors has, for each target, A [rank, in] and
B [out, rank]. Token embedding and output head may also be there whole: trained, or beside their A and B.
A module of the checkpoint goes where the weight rules of the model say, so that fused and stacked ones, and those
that are stored the other way round, have adapters too. DoRA (arXiv:2402.09353) scales each output to a length that was
learned. What would change the arithmetic in another way is refused by name.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lmkit.api import CheckpointError, LinearSpec, ModelInfo, UnsupportedModel, WeightMismatch, nearest
from lmkit.checkpoint import read_json
from lmkit_layers.adapter_tables import Delta

from lmkit_worker.loading.adapter_files import CONFIG, WEIGHTS, check_files
from lmkit_worker.loading.patterns import Patterns
from lmkit_worker.loading.rules import Rules
from lmkit_worker.loading.safetensors import SafetensorsLoader

if TYPE_CHECKING:
    import torch
    from lmkit.api import Loader, TensorEntry
    from torch import Tensor

MAX_ALPHA = 1e6
MAX_NAME = 512  # characters of a tensor's name
SHOWN = 4  # tensors that an error names
EMBED, HEAD = "embed", "lm_head"  # modules of a model
TENSOR = re.compile(
    r"^base_model\.model\.(?P<module>.+?)"
    r"(?:\.lora_(?P<side>A|B|magnitude_vector)(?:\.default)?(?:\.weight)?|\.lora_embedding_(?P<row>A|B)(?:\.default)?"
    r"|(?:\.base_layer|\.modules_to_save(?:\.default)?)?\.weight)$"
)
WHOLE, LENGTHS = "whole", "magnitude_vector"  # in place of a side: the weight itself, the lengths of DoRA
# Keys of adapter_config.json whose only supported values are these.
FIXED: Mapping[str, tuple[object, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none", None),
    "use_dora": (False, True, None),
    "fan_in_fan_out": (False, True, None),  # how the base stores its weights, which its rules know
    "lora_bias": (False, None),
    "layer_replication": ([], None),
    "trainable_token_indices": ([], {}, None),
    "use_qalora": (False, None),
    "alora_invocation_tokens": ([], None),
    "arrow_config": (None,),
    "megatron_config": (None,),
}


@dataclass(frozen=True, slots=True)
class Place:
    """The part of a linear that a checkpoint module became: outputs [low, high) of `linear`, or the embedding.

    `order`: which of the module's outputs is each of these, where they are not in order. `experts`: the module is a
    stack of so many, each with its own outputs, one after another.
    """

    linear: str
    in_features: int
    low: int
    high: int
    order: tuple[int, ...] = ()
    experts: int = 0

    def shape(self, side: str, rank: int) -> tuple[int, ...]:
        """The shape of the tensor of that side; an embedding's weight is [in, out]."""
        whole = (self.high - self.low, self.in_features)
        if side == LENGTHS:
            return whole[:1]
        if side == WHOLE:
            return whole[::-1] if self.linear == EMBED else whole
        rank *= self.experts or 1
        return (rank, whole[1]) if side == "A" else (whole[0] // (self.experts or 1), rank)


@dataclass(frozen=True, slots=True)
class BaseModel:
    """Where the base model's tensors are and where they go."""

    rules: Rules
    loader: Loader
    entries: Mapping[str, TensorEntry]

    def order(self, module: str) -> tuple[int, ...]:
        """Which output of a checkpoint module is each output of the model's; () when they are in order."""
        import torch

        match, entry = self.rules.match(f"{module}.weight"), self.entries.get(f"{module}.weight")
        if match is None or match.rule.transform is None or entry is None:
            return ()
        for axis in range(len(entry.shape)):  # along which the file has the outputs
            numbers = torch.arange(entry.shape[axis])
            shape = [1] * len(entry.shape)
            shape[axis] = -1
            moved = match.rule.transform(numbers.view(shape).expand(entry.shape).contiguous())
            if moved.dim() == 2 and len(moved) == len(numbers) and torch.equal(moved, moved[:, :1].expand_as(moved)):
                found = moved[:, 0].tolist()
                return () if found == list(range(len(numbers))) else tuple(found)
        raise UnsupportedModel("adapter module", module, "one whose weight is stored output by output")

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


@dataclass(frozen=True, slots=True)
class AdapterWeights:
    """Both by module of the model; `whole` replaces a weight before deltas are added to what it gives."""

    deltas: dict[str, list[Delta]]
    whole: dict[str, Tensor]


@dataclass(frozen=True, slots=True)
class Pair:
    """A and B of one module; `lengths` are DoRA's."""

    module: str
    place: Place
    a: TensorEntry
    b: TensorEntry
    scale: float
    lengths: TensorEntry | None = None


@dataclass(frozen=True, slots=True)
class AdapterFiles:
    """An adapter that fits: nothing but headers has been read."""

    path: Path
    entries: tuple[Pair, ...]
    whole: tuple[tuple[Place, TensorEntry], ...]
    loader: SafetensorsLoader
    base: BaseModel | None = None

    @property
    def nbytes(self) -> int:
        return sum(pair.a.nbytes + pair.b.nbytes for pair in self.entries) + sum(e.nbytes for _, e in self.whole)

    def read(self, dtype: torch.dtype) -> AdapterWeights:
        """The weights on the host, ready to multiply. Raises CheckpointError for values that are not finite."""
        deltas: dict[str, list[Delta]] = {}
        for pair in self.entries:
            for low, a, b, gain in self._parts(pair):
                ready = [t.to(dtype).contiguous() for t in (a.T, b.T)]
                if not all(t.isfinite().all() for t in ready):
                    raise CheckpointError(f"{pair.a.name} or its lora_B has values that are not finite in {dtype}")
                delta = Delta(low, low + len(b), ready[0], ready[1], gain if gain is None else gain.to(dtype))
                deltas.setdefault(pair.place.linear, []).append(delta)
        whole = {}
        for place, entry in self.whole:
            weight = whole[place.linear] = self.loader.read(entry).to(dtype).contiguous()
            if not weight.isfinite().all():
                raise CheckpointError(f"{entry.name} has values that are not finite in {dtype}")
        return AdapterWeights(deltas, whole)

    def _parts(self, pair: Pair) -> Iterator[tuple[int, Tensor, Tensor, Tensor | None]]:
        """First output, A [rank, in], B [out, rank] and gain [out] of each part of a linear that `pair` changes."""
        place, a, b = pair.place, self.loader.read(pair.a).float(), self.loader.read(pair.b).float() * pair.scale
        if place.experts:  # PEFT stacks the ranks of A by expert, those of B by rank
            size = len(b)
            a, b = a.unflatten(0, (place.experts, -1)), b.unflatten(1, (-1, place.experts))
            yield from ((place.low + e * size, a[e], b[..., e], None) for e in range(place.experts))
            return
        order = list(place.order)
        b, gain = b[order] if order else b, None
        if pair.lengths is not None:
            assert self.base is not None
            lengths = self.loader.read(pair.lengths).float().flatten()
            if not lengths.isfinite().all():
                raise CheckpointError(f"{pair.lengths.name} has values that are not finite")
            sum_ = self.base.weight(pair.module, place) + b @ a
            gain = (lengths[order] if order else lengths) / sum_.norm(dim=1).clamp(min=1e-30)
        yield place.low, a, b, gain


def open_adapter(path: str | Path, info: ModelInfo, max_rank: int, base: BaseModel | None = None) -> AdapterFiles:
    """Raises CheckpointError, UnsupportedModel or WeightMismatch naming the key or tensor, before weights are read.

    Without `base`, modules that are fused or stacked in the checkpoint have none.
    """
    path = Path(path)
    check_files(path, _most_bytes(info, max_rank))
    config = read_json(path / CONFIG)
    ranks = Ranks(config, max_rank)
    places = Places(info, base)
    saved = _saved(config, places)
    loader = SafetensorsLoader()
    made_for = f"made for {config.get('base_model_name_or_path')!r:.200}"
    sides = _matched(list(loader.header(path / WEIGHTS)), places, info, ranks, made_for)
    if lost := saved - {module.rpartition(".")[2] for (module, _), s in sides.items() if WHOLE in s}:
        raise WeightMismatch(f"the adapter has no weight for modules_to_save {', '.join(sorted(lost))}")
    entries = tuple(
        Pair(module, place, s["A"], s["B"], ranks.scale(module, place), s.get(LENGTHS))
        for (module, place), s in sides.items()
        if "A" in s
    )
    whole = tuple((place, s[WHOLE]) for (_, place), s in sides.items() if WHOLE in s)
    return AdapterFiles(path, entries, whole, loader, base)


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


class Places:
    """Finds where the modules of an adapter went."""

    def __init__(self, info: ModelInfo, base: BaseModel | None) -> None:
        self.info, self.base, self.known = info, base, places_of(info)
        self.specs = {spec.name: spec for spec in info.linears}
        self.stacks = [spec for spec in info.linears if spec.experts and spec.sources]

    def find(self, module: str, side: str, shape: tuple[int, ...]) -> Place | None:
        if module in self.known:
            return self.known[module]
        if self.base is None:
            return None
        layer, name = module.rpartition(".")[0].rpartition(".")[0], module.rpartition(".")[2]
        stacks = [spec for spec in self.stacks if spec.sources[0].startswith(f"{layer}.")]
        for spec in stacks if name == "experts" and len(shape) == 2 else ():  # both stacks are under one name
            size = spec.in_features if side == "A" else spec.total_out // spec.experts
            if size == shape[side == "A"]:
                return Place(spec.name, spec.in_features, 0, spec.total_out, experts=spec.experts)
        # the library may call the block that holds the experts otherwise than the file
        blocks = {spec.sources[0].partition(".experts")[0] for spec in stacks}
        found = (self._stored(at) for at in (module, *(f"{block}.{name}" for block in sorted(blocks))))
        return next((place for place in found if place is not None), None)

    def _stored(self, module: str) -> Place | None:
        """Where a module went that the checkpoint has under this name."""
        assert self.base is not None
        match = self.base.rules.match(f"{module}.weight")
        entry = self.base.entries.get(f"{module}.weight")
        if match is None or match.rule.ignore or entry is None:
            return None
        one = len(entry.shape) == 2 and match.rule.transform is None
        if one and match.target.endswith((".router.weight", ".shared_gate")):
            return Place(match.target.removesuffix(".weight"), entry.shape[1], 0, entry.shape[0])
        name = match.target.removesuffix(".weight")
        spec_found, target = self.specs.get(name), module.rpartition(".")[2]
        if spec_found is None or target not in self.info.adapter_targets:
            return None
        found = self._part(spec_found, match.part)
        return found and replace(found, order=self.base.order(module))

    def _part(self, spec: LinearSpec, part: str | int | None) -> Place | None:
        """Outputs of the one part, or of all."""
        parts = spec.parts or (None,)
        chosen = range(len(parts)) if part == "*" else [i for i, each in enumerate(parts) if each == part]
        if not chosen:
            return None
        low = sum(spec.out_features[: chosen[0]])
        return Place(spec.name, spec.in_features, low, low + sum(spec.out_features[i] for i in chosen))


class Ranks:
    """Rank and scale of each module."""

    def __init__(self, config: Mapping[str, Any], max_rank: int) -> None:
        for key, allowed in FIXED.items():
            value = config.get(key, allowed[0])
            if value not in allowed:
                raise UnsupportedModel(f"{CONFIG} {key}", _short(value), ", ".join(map(repr, allowed)))
        stacks = config.get("target_parameters") or []  # what they are is known from the tensors, as of other modules
        if not (isinstance(stacks, list) and all(isinstance(name, str) for name in stacks)):
            raise UnsupportedModel(f"{CONFIG} target_parameters", _short(stacks), "a list of names")
        self.root, self.dora = bool(config.get("use_rslora")), bool(config.get("use_dora"))
        self.usual = self._rank("r", config.get("r"), max_rank), self._alpha("lora_alpha", config.get("lora_alpha"))
        self.ranks = Patterns(f"{CONFIG} rank_pattern", config.get("rank_pattern"))
        self.alphas = Patterns(f"{CONFIG} alpha_pattern", config.get("alpha_pattern"))
        for value in self.ranks.values:
            self._rank("rank_pattern", value, max_rank)
        for value in self.alphas.values:
            self._alpha("alpha_pattern", value)

    def rank(self, module: str, place: Place) -> int:
        return int(self.ranks.find(_names(module, place), self.usual[0]))

    def scale(self, module: str, place: Place) -> float:
        rank, alpha = self.rank(module, place), self.alphas.find(_names(module, place), self.usual[1])
        return float(alpha) / (math.sqrt(rank) if self.root else rank)

    def _rank(self, key: str, rank: Any, most: int) -> int:
        if isinstance(rank, bool) or not isinstance(rank, int) or not 1 <= rank <= most:
            fix = "raise --max-lora-rank"
            raise UnsupportedModel(f"{CONFIG} {key}", _short(rank), f"a rank from 1 to {most}", fix=fix)
        return rank

    def _alpha(self, key: str, alpha: Any) -> float:
        if isinstance(alpha, bool) or not isinstance(alpha, int | float) or not abs(alpha) <= MAX_ALPHA:
            raise UnsupportedModel(f"{CONFIG} {key}", _short(alpha), f"a number up to {MAX_ALPHA:g}")
        return float(alpha)


def _names(module: str, place: Place) -> tuple[str, ...]:
    """What patterns may call a module: a stack of experts is a parameter of it."""
    if not place.experts:
        return (module, f"{module}.weight")
    return (f"{module}.{'gate_up_proj' if place.linear.endswith('.up') else 'down_proj'}", module)


def _most_bytes(info: ModelInfo, max_rank: int) -> int:
    """What an adapter that fits has at most: all linears in float32 at the largest rank, embedding and head whole."""
    rows = [spec.total_out + (spec.experts or 1) * spec.in_features for spec in info.linears]
    largest = info.vocab_size * info.hidden_size
    routers = sum((spec.experts + spec.in_features) * max_rank for spec in info.linears if spec.experts)
    pairs = max_rank * (sum(rows) + sum(len(s.out_features) * s.in_features for s in info.linears)) + routers
    lengths = sum(spec.total_out for spec in info.linears)
    return 4 * (pairs + lengths + 2 * largest + 2 * max_rank * (info.vocab_size + info.hidden_size))


def _saved(config: Mapping[str, Any], places: Places) -> set[str]:
    """Modules that are there whole: only embedding and head may be."""
    able = [source.rpartition(".")[2] for source, place in places.known.items() if place.linear in (EMBED, HEAD)]
    saved = config.get("modules_to_save") or []
    if not (isinstance(saved, list) and all(isinstance(name, str) and name in able for name in saved)):
        raise UnsupportedModel(
            f"{CONFIG} modules_to_save", _short(saved), ", ".join(able) or "[], as the embeddings are tied"
        )
    return set(saved)


def _spans(spec: LinearSpec) -> list[tuple[str, int, int]]:
    if len(spec.sources) != len(spec.out_features):
        return []
    ends = [sum(spec.out_features[: i + 1]) for i in range(len(spec.out_features))]
    return [(s, end - size, end) for s, end, size in zip(spec.sources, ends, spec.out_features, strict=True)]


def _matched(
    entries: Sequence[TensorEntry], places: Places, info: ModelInfo, ranks: Ranks, base: str
) -> dict[tuple[str, Place], dict[str, TensorEntry]]:
    """A and B, and the whole weight, of each target. Raises WeightMismatch with all that is wrong."""
    sides: dict[tuple[str, Place], dict[str, TensorEntry]] = {}
    wrong: list[str] = []
    for entry in entries:
        found = TENSOR.match(entry.name) if len(entry.name) <= MAX_NAME else None
        module = found["module"] if found else ""
        while module.endswith(".base_layer"):  # stacks of experts are wrapped one by one
            module = module.removesuffix(".base_layer")
        side = (found["side"] or found["row"] or WHOLE) if found else ""
        place = places.find(module, side, entry.shape) if found else None
        if found is None or place is None or not _belongs(place, found["row"], side):
            named = len(wrong) < SHOWN
            wrong.append(_stranger(entry.name[:MAX_NAME], module, places.known, info) if named else "")
            continue
        expected = place.shape(side, ranks.rank(module, place))
        if entry.shape != expected:
            wrong.append(f"{entry.name} has shape {list(entry.shape)}, needs {list(expected)}")
        elif entry.dtype not in ("float32", "float16", "bfloat16"):
            wrong.append(f"{entry.name} has dtype {entry.dtype}, needs float32, float16 or bfloat16")
        if side in sides.setdefault((module, place), {}):
            wrong.append(f"{entry.name} and {sides[module, place][side].name} are the same")
        sides[module, place][side] = entry
    for (module, _), s in sides.items():
        wrong += [f"{module} has lora_{side} only" for side in "AB" if {"A", "B"} & s.keys() == {side}]
        if "A" in s and ranks.dora != (LENGTHS in s):
            wrong.append(f"{module} has {'no' if ranks.dora else 'a'} lora_magnitude_vector")
    if wrong or not sides:
        more = f" and {len(wrong) - SHOWN} more" if len(wrong) > SHOWN else ""
        raise WeightMismatch(
            f"the adapter does not fit this model ({base}): {'; '.join(wrong[:SHOWN]) or 'it has no tensors'}{more}",
            fix="use an adapter made for this base model",
        )
    return dict(sorted(sides.items(), key=lambda item: (item[0][0], item[0][1].linear)))


def _belongs(place: Place, row: str | None, side: str) -> bool:
    """Embeddings call their A and B so; only they and the head may be there whole."""
    if side == LENGTHS:
        return place.linear != EMBED and not place.experts and not place.linear.endswith((".router", ".shared_gate"))
    return place.linear in (EMBED, HEAD) if side == WHOLE else (place.linear == EMBED) == (row is not None)


def _stranger(name: str, module: str, places: Mapping[str, Place], info: ModelInfo) -> str:
    if module and module.rpartition(".")[2] not in info.adapter_targets:
        return f"{name}: adapters may target {', '.join(info.adapter_targets) or 'nothing in this model'}"
    for layer in info.layers:
        shared = module.replace(f".{layer.index}.", f".{layer.kv_of}.")
        if layer.kv_of is not None and shared != module and shared in places:
            return f"{name}: layer {layer.index} has none of its own, it reads the keys and values of {shared}"
    like = nearest(module, places)
    return f"{name} belongs to nothing in this model" + (f", nearest: {like}" if like else "")


def _short(value: object) -> object:
    """As much of a value as an error may show."""
    shown = repr(value)
    return value if len(shown) <= 80 else f"{shown[:77]}..."
