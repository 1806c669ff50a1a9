"""PEFT adapters (LoRA, arXiv:2106.09685): read strictly, checked against the base model from headers alone.

adapter_config.json says rank, scale and targets; adapter_model.safetensors has, for each target, A [rank, in] and
B [out, rank]. Token embedding and output head may also be there whole: trained, or beside their A and B.
A module of the checkpoint goes where the weight rules of the model say, so that fused and stacked ones, and those
that are stored the other way round, have adapters too. DoRA (arXiv:2402.09353) scales each output to a length that was
learned. What would change the arithmetic in another way is refused by name.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lmkit.api import CheckpointError, ModelInfo, UnsupportedModel, WeightMismatch, nearest
from lmkit.checkpoint import read_json
from lmkit_layers.adapter_tables import Delta

from lmkit_worker.loading.adapter_config import AdapterConfig, short
from lmkit_worker.loading.adapter_files import CONFIG, WEIGHTS, check_files
from lmkit_worker.loading.adapter_places import EMBED, HEAD, LENGTHS, WHOLE, AdapterTarget, BaseModel, Place, Places
from lmkit_worker.loading.safetensors import SafetensorsLoader

if TYPE_CHECKING:
    import torch
    from lmkit.api import TensorEntry
    from torch import Tensor

MAX_NAME = 512  # characters of a tensor's name
SHOWN = 4  # tensors that an error names
TENSOR = re.compile(
    r"^base_model\.model\.(?P<module>.+?)"
    r"(?:\.lora_(?P<side>A|B|magnitude_vector)(?:\.default)?(?:\.weight)?|\.lora_embedding_(?P<row>A|B)(?:\.default)?"
    r"|(?:\.base_layer|\.modules_to_save(?:\.default)?)?\.weight)$"
)
WRAPPED = ".base_layer"  # in names of what another wrapper of the same module is around


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
        order = list(place.order)
        if place.experts:  # PEFT stacks the ranks of A by expert, those of B by rank
            of_a, of_b = a.unflatten(0, (place.experts, -1)), b.unflatten(1, (-1, place.experts))
            for expert in range(place.experts):
                a, b = of_a[expert], of_b[..., expert]
                a, b = (b.T, a.T) if place.turned else (a, b)
                yield place.low + expert * place.stride, a, b[order] if order else b, None
            return
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
    said = read_json(path / CONFIG)
    config = AdapterConfig(said, max_rank)
    places = Places(info, base)
    saved = _saved(said, places)
    loader = SafetensorsLoader()
    made_for = f"made for {said.get('base_model_name_or_path')!r:.200}"
    matched = _matched(list(loader.header(path / WEIGHTS)), places, info, config, made_for)
    if lost := saved - {module.rpartition(".")[2] for module, _, sides in matched if WHOLE in sides}:
        raise WeightMismatch(f"the adapter has no weight for modules_to_save {', '.join(sorted(lost))}")
    entries = tuple(
        Pair(module, candidate.place, sides["A"], sides["B"], config.scale(candidate.name), sides.get(LENGTHS))
        for module, candidate, sides in matched
        if "A" in sides
    )
    whole = tuple((candidate.place, sides[WHOLE]) for _, candidate, sides in matched if WHOLE in sides)
    return AdapterFiles(path, entries, whole, loader, base)


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
            f"{CONFIG} modules_to_save", short(saved), ", ".join(able) or "[], as the embeddings are tied"
        )
    return set(saved)


Group = tuple[str, int]  # a module of the checkpoint, and how many wrappers are around this A and B


def _matched(
    entries: Sequence[TensorEntry], places: Places, info: ModelInfo, config: AdapterConfig, base: str
) -> list[tuple[str, AdapterTarget, dict[str, TensorEntry]]]:
    """A and B, and the whole weight, of each target. Raises WeightMismatch with all that is wrong."""
    groups: dict[Group, dict[str, TensorEntry]] = {}
    found: dict[str, list[AdapterTarget]] = {}
    wrong: list[str] = []
    for entry in entries:
        match = TENSOR.match(entry.name) if len(entry.name) <= MAX_NAME else None
        module, depth = _unwrapped(match["module"]) if match else ("", 0)
        if module and module not in found:
            found[module] = places.find(module, config)
        side = (match["side"] or match["row"] or WHOLE) if match else ""
        candidates = found.get(module, [])
        if match is None or not any(_belongs(c.place, match["row"], side) for c in candidates):
            named = len(wrong) < SHOWN
            wrong.append(_stranger(entry.name[:MAX_NAME], module, places.known, info) if named else "")
        elif entry.dtype not in ("float32", "float16", "bfloat16"):
            wrong.append(f"{entry.name} has dtype {entry.dtype}, needs float32, float16 or bfloat16")
        elif side in groups.setdefault((module, depth), {}):
            wrong.append(f"{entry.name} and {groups[module, depth][side].name} are the same")
        else:
            groups[module, depth][side] = entry
    for (module, _), sides in groups.items():
        wrong += [f"{module} has lora_{side} only" for side in "AB" if {"A", "B"} & sides.keys() == {side}]
        if "A" in sides and config.dora != (LENGTHS in sides):
            wrong.append(f"{module} has {'no' if config.dora else 'a'} lora_magnitude_vector")
    matched: list[tuple[str, AdapterTarget, dict[str, TensorEntry]]] = []
    if not wrong:
        by_module: dict[str, dict[int, dict[str, TensorEntry]]] = {}
        for (module, depth), sides in groups.items():
            by_module.setdefault(module, {})[depth] = sides
        for module, of_module in by_module.items():
            chosen = _assigned(module, of_module, found[module], config, wrong)
            matched += [(module, chosen[depth], sides) for depth, sides in sorted(of_module.items()) if depth in chosen]
    if wrong or not matched:
        more = f" and {len(wrong) - SHOWN} more" if len(wrong) > SHOWN else ""
        raise WeightMismatch(
            f"the adapter does not fit this model ({base}): {'; '.join(wrong[:SHOWN]) or 'it has no tensors'}{more}",
            fix="use an adapter made for this base model",
        )
    return sorted(matched, key=lambda each: (each[0], each[1].place.linear))


def _assigned(
    module: str, groups: Mapping[int, Mapping[str, TensorEntry]], candidates: Sequence[AdapterTarget],
    config: AdapterConfig, wrong: list[str],
) -> dict[int, AdapterTarget]:  # fmt: skip
    """The candidate of each group of a module, by depth; what fits none, or more than one, is told in `wrong`.

    Shapes of A and B together tell the parameters of a module apart, and where they do not, the order in which PEFT
    wraps them: the first one is innermost.
    """
    ranks = {candidate.name: config.rank(candidate.name) for candidate in candidates}
    fitting: dict[int, list[AdapterTarget]] = {}
    for depth, sides in groups.items():
        fits = [c for c in candidates if all(c.place.shape(s, ranks[c.name]) == e.shape for s, e in sides.items())]
        if not fits:
            wrong += _misfits(sides, candidates, ranks)
        fitting[depth] = [c for c in fits if config.targeted(c.name)] or fits
    if not all(fitting.values()):
        return {}
    if all(len(fits) == 1 for fits in fitting.values()):
        chosen = {depth: fits[0] for depth, fits in fitting.items()}
    else:
        options = [c for c in candidates if config.targeted(c.name)]
        chosen = dict(zip(sorted(groups, reverse=True), options, strict=False))
        if len(options) != len(groups) or any(chosen[depth] not in fits for depth, fits in fitting.items()):
            names = ", ".join(candidate.name.rpartition(".")[2] for candidate in candidates)
            wrong.append(
                f"{module}: its shapes do not tell which of {names} it changes; name them as target_parameters"
            )
            return {}
    if len({candidate.name for candidate in chosen.values()}) < len(chosen):
        wrong.append(f"{module} has A and B twice")
    for depth, candidate in chosen.items():
        if "A" in groups[depth] and not (config.targeted(candidate.name) or config.targets.include(module)):
            wrong.append(f"{candidate.name}: adapter_config.json does not target it, and peft would leave it out")
    return chosen


def _misfits(
    sides: Mapping[str, TensorEntry], candidates: Sequence[AdapterTarget], ranks: Mapping[str, int]
) -> list[str]:
    """The complaints about the shapes of one module, one for each tensor that fits no candidate."""
    messages = []
    for side, entry in sides.items():
        shapes = [list(c.place.shape(side, ranks[c.name])) for c in candidates]
        if list(entry.shape) not in shapes:
            needed = " or ".join(str(shape) for i, shape in enumerate(shapes) if shape not in shapes[:i])
            messages.append(f"{entry.name} has shape {list(entry.shape)}, needs {needed}")
    names = ", ".join(candidate.name for candidate in candidates)
    return messages or [f"{next(iter(sides.values())).name} and what belongs to it fit none of {names} together"]


def _unwrapped(module: str) -> tuple[str, int]:
    """A module, and the number of wrappers around it: parameters of one module are wrapped one by one."""
    depth = 0
    while module.endswith(WRAPPED):
        module, depth = module.removesuffix(WRAPPED), depth + 1
    return module, depth


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
