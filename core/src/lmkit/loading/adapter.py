"""PEFT adapters (LoRA, arXiv:2106.09685): read strictly, checked against the base model from headers alone.

adapter_config.json says rank, scale and targets; adapter_model.safetensors has, for each target, A [rank, in] and
B [out, rank]. Token embedding and output head may also be there whole: trained, or beside their A and B.
What would change the arithmetic in another way is refused by name.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lmkit.api import CheckpointError, LinearSpec, ModelInfo, UnsupportedModel, WeightMismatch, nearest
from lmkit.loading.adapter_files import CONFIG, WEIGHTS, check_files
from lmkit.loading.checkpoint import read_json
from lmkit.loading.safetensors import SafetensorsLoader

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from lmkit.api import TensorEntry

MAX_ALPHA = 1e6
MAX_NAME = 512  # characters of a tensor's name
SHOWN = 4  # tensors that an error names
EMBED, HEAD = "embed", "lm_head"  # modules of a model
TENSOR = re.compile(
    r"^base_model\.model\.(?P<module>.+?)"
    r"(?:\.lora_(?P<side>A|B)(?:\.default)?\.weight|\.lora_embedding_(?P<row>A|B)(?:\.default)?"
    r"|(?:\.base_layer|\.modules_to_save(?:\.default)?)?\.weight)$"
)
WHOLE = "whole"  # in place of a side: the weight itself
# Keys of adapter_config.json whose only supported values are these.
FIXED: Mapping[str, tuple[object, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none", None),
    "use_dora": (False, None),
    "fan_in_fan_out": (False, None),
    "lora_bias": (False, None),
    "rank_pattern": ({}, None),
    "alpha_pattern": ({}, None),
    "layer_replication": ([], None),
    "trainable_token_indices": ([], {}, None),
    "target_parameters": ([], None),
    "use_qalora": (False, None),
    "alora_invocation_tokens": ([], None),
    "arrow_config": (None,),
    "megatron_config": (None,),
}


@dataclass(frozen=True, slots=True)
class Place:
    """The part of a linear that a checkpoint module became: outputs [low, high) of `linear`, or the embedding."""

    linear: str
    in_features: int
    low: int
    high: int

    def shape(self, side: str, rank: int) -> tuple[int, int]:
        """Of the tensor of that side; an embedding's weight is [in, out]."""
        whole = (self.high - self.low, self.in_features)
        if side == WHOLE:
            return whole[::-1] if self.linear == EMBED else whole
        return (rank, whole[1]) if side == "A" else (whole[0], rank)


@dataclass(slots=True)
class Delta:
    """What one adapter adds to one part of a linear: x @ a @ b, the scale already in b. Embeddings take rows of a."""

    low: int
    high: int
    a: Tensor  # [in, rank]
    b: Tensor  # [rank, high - low]


@dataclass(frozen=True, slots=True)
class AdapterWeights:
    """Both by module of the model; `whole` replaces a weight before deltas are added to what it gives."""

    deltas: dict[str, list[Delta]]
    whole: dict[str, Tensor]


@dataclass(frozen=True, slots=True)
class AdapterFiles:
    """An adapter that fits: nothing but headers has been read."""

    path: Path
    rank: int
    scale: float
    entries: tuple[tuple[Place, TensorEntry, TensorEntry], ...]  # place, A, B
    whole: tuple[tuple[Place, TensorEntry], ...]
    loader: SafetensorsLoader

    @property
    def nbytes(self) -> int:
        return sum(a.nbytes + b.nbytes for _, a, b in self.entries) + sum(entry.nbytes for _, entry in self.whole)

    def read(self, dtype: torch.dtype, device: torch.device) -> AdapterWeights:
        """The weights, ready to multiply. Raises CheckpointError for values that are not finite."""
        deltas: dict[str, list[Delta]] = {}
        for place, first, second in self.entries:
            a, b = self.loader.read(first).float(), self.loader.read(second).float() * self.scale
            ready = [t.T.to(device, dtype).contiguous() for t in (a, b)]
            if not all(t.isfinite().all() for t in ready):
                raise CheckpointError(f"{first.name} or its lora_B has values that are not finite in {dtype}")
            deltas.setdefault(place.linear, []).append(Delta(place.low, place.high, ready[0], ready[1]))
        whole = {}
        for place, entry in self.whole:
            weight = whole[place.linear] = self.loader.read(entry).to(device, dtype).contiguous()
            if not weight.isfinite().all():
                raise CheckpointError(f"{entry.name} has values that are not finite in {dtype}")
        return AdapterWeights(deltas, whole)


def open_adapter(path: str | Path, info: ModelInfo, max_rank: int) -> AdapterFiles:
    """Raises CheckpointError, UnsupportedModel or WeightMismatch naming the key or tensor, before weights are read."""
    path, places = Path(path), places_of(info)
    check_files(path, _most_bytes(places, max_rank))
    config = read_json(path / CONFIG)
    rank, scale = _rank_and_scale(config, max_rank)
    saved = _saved(config, places)
    loader = SafetensorsLoader()
    base = config.get("base_model_name_or_path")
    sides = _matched(list(loader.header(path / WEIGHTS)), places, info, rank, f"made for {base!r:.200}")
    if lost := saved - {module.rpartition(".")[2] for module, s in sides.items() if WHOLE in s}:
        raise WeightMismatch(f"the adapter has no weight for modules_to_save {', '.join(sorted(lost))}")
    entries = tuple((places[m], s["A"], s["B"]) for m, s in sides.items() if "A" in s)
    whole = tuple((places[m], s[WHOLE]) for m, s in sides.items() if WHOLE in s)
    return AdapterFiles(path, rank, scale, entries, whole, loader)


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


def _most_bytes(places: Mapping[str, Place], max_rank: int) -> int:
    """Of an adapter that fits: all places in float32, at the largest rank, and embedding and head whole."""
    pairs = sum(prod(place.shape(side, max_rank)) for place in places.values() for side in "AB")
    whole = sum(prod(place.shape(WHOLE, 0)) for place in places.values() if place.linear in (EMBED, HEAD))
    return 4 * (pairs + whole)


def _saved(config: Mapping[str, Any], places: Mapping[str, Place]) -> set[str]:
    """Modules that are there whole: only embedding and head may be."""
    able = [source.rpartition(".")[2] for source, place in places.items() if place.linear in (EMBED, HEAD)]
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


def _rank_and_scale(config: Mapping[str, Any], max_rank: int) -> tuple[int, float]:
    for key, allowed in FIXED.items():
        value = config.get(key, allowed[0])
        if value not in allowed:
            raise UnsupportedModel(f"{CONFIG} {key}", _short(value), ", ".join(map(repr, allowed)))
    rank, alpha = config.get("r"), config.get("lora_alpha")
    if isinstance(rank, bool) or not isinstance(rank, int) or not 1 <= rank <= max_rank:
        raise UnsupportedModel(f"{CONFIG} r", _short(rank), f"a rank from 1 to {max_rank}", fix="raise --max-lora-rank")
    if isinstance(alpha, bool) or not isinstance(alpha, int | float) or not abs(alpha) <= MAX_ALPHA:
        raise UnsupportedModel(f"{CONFIG} lora_alpha", _short(alpha), f"a number up to {MAX_ALPHA}")
    return rank, float(alpha) / (math.sqrt(rank) if config.get("use_rslora") else rank)


def _matched(
    entries: Sequence[TensorEntry], places: Mapping[str, Place], info: ModelInfo, rank: int, base: str
) -> dict[str, dict[str, TensorEntry]]:
    """A and B, and the whole weight, of each target. Raises WeightMismatch with all that is wrong."""
    sides: dict[str, dict[str, TensorEntry]] = {}
    wrong: list[str] = []
    for entry in entries:
        found = TENSOR.match(entry.name) if len(entry.name) <= MAX_NAME else None
        module = found["module"] if found else ""
        place = places.get(module)
        side = (found["side"] or found["row"] or WHOLE) if found else ""
        if found is None or place is None or not _belongs(place, found["row"], side):
            wrong.append(_stranger(entry.name[:MAX_NAME], module, places, info) if len(wrong) < SHOWN else "")
            continue
        expected = place.shape(side, rank)
        if entry.shape != expected:
            wrong.append(f"{entry.name} has shape {list(entry.shape)}, needs {list(expected)}")
        elif entry.dtype not in ("float32", "float16", "bfloat16"):
            wrong.append(f"{entry.name} has dtype {entry.dtype}, needs float32, float16 or bfloat16")
        if side in sides.setdefault(module, {}):
            wrong.append(f"{entry.name} and {sides[module][side].name} are the same")
        sides[module][side] = entry
    wrong += [f"{m} has lora_{side} only" for m, s in sides.items() for side in "AB" if {"A", "B"} & s.keys() == {side}]
    if wrong or not sides:
        more = f" and {len(wrong) - SHOWN} more" if len(wrong) > SHOWN else ""
        raise WeightMismatch(
            f"the adapter does not fit this model ({base}): {'; '.join(wrong[:SHOWN]) or 'it has no tensors'}{more}",
            fix="use an adapter made for this base model",
        )
    return dict(sorted(sides.items()))


def _belongs(place: Place, row: str | None, side: str) -> bool:
    """Embeddings call their A and B so; only they and the head may be there whole."""
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
