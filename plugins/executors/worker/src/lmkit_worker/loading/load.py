"""load_model: build on the meta device, check everything from headers, then stream the weights in.

rules + headers -> Fill per tensor (checked: shapes, dtypes, names, completeness)   nothing read yet
for each Fill in file order: read -> transform -> convert into its place            one tensor at a time
a linear whose tensors are all there is packed at once                              one layer at a time
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from lmkit.api import (
    AttentionBackend,
    Checkpoint,
    CheckpointError,
    Collectives,
    Loader,
    ModelInfo,
    ParamSpec,
    Platform,
    PluginError,
    PoolerInfo,
    Progress,
    QuantScheme,
    ResolvedPlan,
    SelectionError,
    TensorEntry,
    UnsupportedModel,
    WeightMismatch,
    WeightRule,
    guard,
    load_target,
    nearest,
    owner_of,
)
from lmkit.checkpoint import weight_files
from lmkit_layers.attention import Attention
from lmkit_layers.build import Builder
from lmkit_layers.linear import Linear
from lmkit_layers.pooled import Dense
from torch import Tensor, nn

from lmkit_worker.chosen import choice_of, make
from lmkit_worker.loaded import LoadedModel
from lmkit_worker.loading.convert import architecture_of
from lmkit_worker.loading.dummy import WARNING, DummyLoader
from lmkit_worker.loading.packed_cache import PackedCache
from lmkit_worker.loading.rules import Match, Rules
from lmkit_worker.loading.stages import keeper
from lmkit_worker.loading.update import CopyLoader, Update, keep, untie_as

ALL = "*"  # a rule's part: the tensor holds all parts, one after another; "*.up": all whose names end so
# Endings of tensors that older files hold of buffers, which follow from the configuration.
BUFFERS = (".inv_freq", ".position_ids", ".masked_bias", ".cos_cached", ".sin_cached")
LISTED = 8  # names shown per kind of mismatch


def load_model(
    resolved: ResolvedPlan,
    checkpoint: Checkpoint,
    info: ModelInfo,
    platform: Platform,
    device: torch.device,
    collectives: Collectives | None = None,
    progress: Progress | None = None,
    packed_cache: str | None = None,
    adapters: bool = False,
    cache: tuple[ModelInfo, int] | None = None,
    attention: AttentionBackend | None = None,
    update: Update | None = None,
    base: LoadedModel | None = None,
    stage: tuple[range, Collectives] | None = None,
    deals: int = 1,
) -> LoadedModel:
    """The model of `checkpoint`, ready to run on `device` with the implementations chosen in `resolved`.

    With `adapters`, experts run one linear after the other: adapters add to what is between them.
    A model and its draft have one KV cache and one `attention`: `cache` says whose layers are in it, and where those of
    `info` begin among them. `update`: weights that stand for those of the checkpoint; what a partial one does not have
    is that of `base`. `packed_cache` is a folder for packed weights: they are taken from there, or kept there for
    the next time. `stage`: the layers that this rank has, and the ranks that have the others. `deals`: as of Builder.

    Raises WeightMismatch, CheckpointError, UnsupportedModel or SelectionError before any weight is read, and
    CheckpointError when a file turns out to be damaged later.
    """
    architecture = architecture_of(resolved)
    attention = attention or _attention(resolved, cache[0] if cache else info)
    builder = make_builder(resolved, checkpoint, info, collectives, adapters, attention, cache, deals)
    with torch.device("meta"):
        model = architecture.build(info, builder)
    if not isinstance(model, nn.Module):
        raise PluginError(f"{info.architecture}: build() must return a torch module, got {type(model).__name__}")
    loader: Loader = make(choice_of(resolved, "loader")) if update is None else CopyLoader()
    weights = checkpoint if update is None else update.checkpoint(checkpoint)
    packed, leave = None, None
    if stage is not None:
        leave = partial(keeper(model, info, stage[0]), *stage)
    if packed_cache is not None and update is None:
        packed = PackedCache.find(packed_cache, resolved, checkpoint, builder.tp_rank, builder.tp_size, deals)
    rules, scheme = Rules(architecture.weights(info)), builder.scheme
    partly = base.model if base is not None and update is not None and update.partial else None
    assert partly is None or isinstance(partly, nn.Module)
    warnings = fill_model(model, rules, loader, weights, platform, device, progress, packed, scheme, partly, leave)
    dense = base.dense if base is not None else None
    if base is None and info.pooler is not None and info.pooler.dense:
        dense = _load_dense(info.pooler, builder.dtype, loader, checkpoint, platform, device)
    for module in model.modules():
        for name, values in module.named_buffers(recurse=False):
            setattr(module, name, platform.upload(values))
    model.eval()
    return LoadedModel(
        model=model,
        info=info,
        weight_bytes=weight_bytes(model) + (weight_bytes(dense) if dense is not None else 0),
        pack_seconds=sum(module.pack_seconds for module in model.modules() if isinstance(module, Linear)),
        warnings=(*builder.warnings, *warnings),
        dense=dense,
        attention=builder.backend,
        rows=builder.rows,
        has_head=stage is None or stage[0].stop == len(info.layers),
    )


def _load_dense(
    pooler: PoolerInfo, dtype: torch.dtype, loader: Loader, checkpoint: Checkpoint, platform: Platform,
    device: torch.device,
) -> nn.Module:  # fmt: skip
    """The dense modules that follow the head, each from its own folder."""
    modules = []
    for dense in pooler.dense:
        with torch.device("meta"):
            module = Dense(dense, dtype)
        folder = checkpoint.path / dense.path
        there = replace(checkpoint, path=folder, files=tuple(weight_files(folder)) if checkpoint.files else ())
        fill_model(module, Rules([WeightRule("linear.{p}", "linear.{p}")]), loader, there, platform, device)
        modules.append(module)
    return nn.Sequential(*modules)


def make_builder(
    resolved: ResolvedPlan,
    checkpoint: Checkpoint,
    info: ModelInfo,
    collectives: Collectives | None,
    adapters: bool = False,
    attention: AttentionBackend | None = None,
    cache: tuple[ModelInfo, int] | None = None,
    deals: int = 1,
) -> Builder:
    """The BuildContext for the implementations chosen in `resolved`."""
    quantization, declared = resolved.choice("quantization"), checkpoint.config.get("quantization_config")
    scheme = None
    if quantization is not None:
        with guard(owner_of(quantization), "parse"):
            scheme = load_target(quantization).parse(quantization.options if declared is None else declared)
    elif declared:
        raise UnsupportedModel("quantization_config", "present", fix="install a plugin for this format")
    kinds = ("linear:",) if adapters else ("linear:", "moe:")
    ops = [c for c in resolved.choices if c.kind == "op" and c.component.startswith(kinds)]
    kernels: dict[str, list[Any]] = {}
    for c in ops:  # in order of preference
        kernels.setdefault(c.component, []).append(make(c))
    dtype = resolved.value("dtype") or info.dtype
    return Builder(
        info,
        getattr(torch, dtype),
        resolved.device,
        attention or _attention(resolved, info),
        kernels,
        scheme=scheme,
        online=declared is None,
        strict=frozenset(c.component for c in ops if c.why == "explicit"),
        collectives=collectives,
        rows=_operators(resolved, "rowwise", dtype),
        recurrent=_operators(resolved, "recurrent", dtype),
        cache=cache,
        deals=deals,
    )


def _attention(resolved: ResolvedPlan, info: ModelInfo) -> AttentionBackend | None:
    """The chosen backend, when it takes what each group of layers needs. Raises SelectionError with its own reason."""
    if not info.kv_groups():
        return None
    choice = choice_of(resolved, "attention")
    backend: AttentionBackend = make(choice)
    for need, layers in info.kv_groups():
        with guard(owner_of(choice), "can_run"):
            reason = backend.can_run(need, resolved.device)
        with guard(owner_of(choice), "block_sizes"):
            sizes = backend.block_sizes(need)
        if reason is None and need.block_size and need.block_size not in sizes:
            reason = f"block_size is {need.block_size}, it has {', '.join(map(str, sizes[:8]))}"
        if reason is not None:
            raise SelectionError(
                f"attention {backend.name} refuses layer {layers[0]}: {reason}", fix="choose another with --attention"
            )
    return backend


def _operators(resolved: ResolvedPlan, op: str, dtype: str) -> Any:
    """The first of the chosen sets of such operators that runs here; one that was named has to."""
    for choice in (c for c in resolved.choices if c.kind == "op" and c.component == op):
        ops = make(choice)
        with guard(owner_of(choice), "can_run"):
            reason = ops.can_run(dtype, resolved.device)
        if reason is None:
            return ops
        if choice.why == "explicit":
            raise SelectionError(f"{op}: {choice.name} refuses: {reason}", fix="--op auto")
    return None


# ---------------------------------------------------------------------------------------------------- places


@dataclass(slots=True)
class Destination:
    """One parameter to fill: where it lives, how the checkpoint stores it, which parts have been claimed."""

    name: str
    module: nn.Module
    attribute: str
    stored: ParamSpec  # of the whole layer, over all ranks
    local: ParamSpec  # of this rank
    parts: tuple[str | int | None, ...]
    stored_sizes: tuple[int, ...]  # along part_axis, one per part
    local_parts: tuple[str | int | None, ...]  # of which this rank has something
    local_sizes: tuple[int, ...]
    rank: int = 0
    size: int = 1  # ranks: as many shares as there are different ones are theirs by turns
    claimed: dict[str | int | None, str] = field(default_factory=dict)  # part -> checkpoint tensor

    def covered(self, part: str | int | None) -> tuple[str | int | None, ...]:
        """The parts that a tensor called `part` fills; () when there are none."""
        if part == ALL:
            return self.parts
        if isinstance(part, str) and part.startswith(f"{ALL}."):
            return tuple(each for each in self.parts if str(each).endswith(part[1:]))
        return (part,) if part in self.parts else ()

    def here(self, part: str | int | None) -> bool:
        """Whether this rank has something of `part`, which fills others too where it is "*"."""
        return any(each in self.local_parts for each in self.covered(part))

    def part_shape(self, part: str | int | None) -> tuple[int, ...]:
        """Shape of `part` as the checkpoint has it."""
        shape, axis = list(self.stored.shape), self.stored.part_axis
        if axis is not None and len(self.parts) > 1:
            shape[axis] = sum(self.sizes(self.covered(part)))
        return tuple(shape)

    def sizes(self, parts: Sequence[str | int | None]) -> list[int]:
        """Sizes of those parts along part_axis, as the checkpoint has them."""
        return [self.stored_sizes[self.parts.index(part)] for part in parts]

    def put(self, part: str | int | None, value: Tensor, device: torch.device) -> None:
        """Copy `value` (the whole part) into its place; allocates the parameter at its first part.

        What fits, and is not a part of something merged, is taken as it is: it stays memory-mapped.
        Parts that share one value (part_axis None) must agree; CheckpointError otherwise.
        """
        covered = self.covered(part)
        if not self.here(part):
            return
        if len(covered) > 1 and self.stored.part_axis is not None:
            pieces = value.split(self.sizes(covered), self.stored.part_axis)
            for each, piece in zip(covered, pieces, strict=True):
                self.put(each, piece, device)
            return
        part = covered[0]
        parameter: nn.Parameter = getattr(self.module, self.attribute)
        shared = self.local.part_axis is None and not parameter.is_meta
        fits = (value.dtype, value.device.type, tuple(value.shape)) == (parameter.dtype, device.type, self.local.shape)
        if fits and (len(self.parts) == 1 or not isinstance(self.module, Linear)):
            setattr(self.module, self.attribute, nn.Parameter(value.contiguous(), requires_grad=False))
            return
        if parameter.is_meta:
            data = torch.empty(parameter.shape, dtype=parameter.dtype, device=device)
            parameter = nn.Parameter(data, requires_grad=False)
            setattr(self.module, self.attribute, parameter)
        target, axis = parameter.data.view(self.local.shape), self.local.part_axis
        if axis is not None and len(self.parts) > 1:
            i = self.local_parts.index(part)
            target = target.narrow(axis, sum(self.local_sizes[:i]), self.local_sizes[i])
        value = value.reshape(self.part_shape(part))
        for dim, (whole, here) in enumerate(zip(value.shape, target.shape, strict=True)):
            if whole != here:
                value = value.narrow(dim, self.rank * (whole // here) // self.size * here, here)
        if shared and not torch.equal(target, value.to(target)):
            raise CheckpointError(f"the merged parts of {self.name} store different values, and need the same")
        target.copy_(value)


def places(model: nn.Module) -> dict[str, Destination]:
    """Every parameter that the checkpoint must fill, by name. Tied parameters appear once."""
    found: dict[str, Destination] = {}
    for path, module in model.named_modules():
        if isinstance(module, Linear):
            for key, stored in module.stored.items():
                local, spec = module.params[key], module.spec
                parts: tuple[str | int | None, ...] = spec.parts or (None,)
                sizes = stored.part_sizes or spec.out_features
                own, local_sizes = module.local.parts or (None,), local.part_sizes or module.local.out_features
                name = f"{path}.{key}"
                ranks = module.rank, module.size
                found[name] = Destination(name, module, key, stored, local, parts, sizes, own, local_sizes, *ranks)
        else:
            for key, parameter in module.named_parameters(recurse=False):
                name = f"{path}.{key}" if path else key
                given = getattr(module, "parts", {}).get(key, (None,))  # along the first axis: equal, or with sizes
                parts, sized, shape = tuple(given), isinstance(given, Mapping), tuple(parameter.shape)
                if len(parts) > 1 and len(shape) > 2 and not sized:  # stacked matrices: their rows, one after another
                    shape = (shape[0] * shape[1], *shape[2:])
                optional = key in getattr(module, "optional", ())
                whole = ParamSpec(shape, str(parameter.dtype).removeprefix("torch."), optional=optional)
                equal = (shape[0] // len(parts),) * len(parts) if len(parts) > 1 else ()
                sizes = tuple(given.values()) if sized else equal
                found[name] = Destination(name, module, key, whole, whole, parts, sizes, parts, sizes)
    return found


def untie(model: nn.Module, rules: Rules, loader: Loader, entries: Sequence[TensorEntry]) -> None:
    """Linears that are tied, but whose weight the checkpoint has too, with other values, get theirs."""
    tied = {path: module for path, module in model.named_modules() if isinstance(module, Linear) and module.tied}
    if not tied:
        return
    paths = {module: path for path, module in model.named_modules()}
    matches = ((entry, rules.match(entry.name)) for entry in entries)
    found = {match.target: entry for entry, match in matches if match is not None}
    for path, module in tied.items():
        own, shared = (found.get(f"{at}.weight") for at in (path, paths[module.owner[0]]))
        if own is None or shared is None:
            continue
        if own.shape != shared.shape or not torch.equal(loader.read(own), loader.read(shared)):
            module.untie()


# ---------------------------------------------------------------------------------------------------- checking


@dataclass(frozen=True, slots=True)
class Fill:
    """One checkpoint tensor and the part it fills."""

    entry: TensorEntry
    place: Destination
    match: Match


def plan_fills(
    entries: Sequence[TensorEntry], rules: Rules, where: Mapping[str, Destination], partial: bool = False
) -> list[Fill]:
    """Every tensor with its place, checked both ways from headers alone. Raises WeightMismatch.

    `partial`: modules may be left out, as wholes.
    """
    fills: list[Fill] = []
    extra: list[str] = []
    wrong: list[str] = []
    for entry in entries:
        match = rules.match(entry.name)
        place = where.get(match.target) if match else None
        if place is None and (entry.name.endswith(BUFFERS) if match is None else match.rule.ignore):
            continue
        parts = place.covered(match.part) if match and place else ()
        if match is None or place is None or not parts:
            extra.append(entry.name)
            continue
        taken = next((place.claimed[part] for part in parts if part in place.claimed), None)
        if taken is not None:
            wrong.append(f"{entry.name} and {taken} both fill {place.name}")
            continue
        place.claimed |= dict.fromkeys(parts, entry.name)
        problem = _mismatch(entry, match, place)
        if problem:
            wrong.append(f"{entry.name} {problem}")
        fills.append(Fill(entry, place, match))
    touched = {place.module for place in where.values() if place.claimed or not partial}
    missing = [
        _likeliest([source for source, _ in rules.sources(place.name, part)], entries) or place.name
        for place in where.values()
        if place.module in touched and not (place.stored.optional and not place.claimed)
        for part in place.parts
        if part not in place.claimed
    ]
    if missing or extra or wrong:
        raise WeightMismatch(
            "weights do not fit the model: "
            + "; ".join(
                _some(kind, names)
                for kind, names in (("missing", list(dict.fromkeys(missing))), ("extra", extra), ("wrong", wrong))
                if names
            ),
            fix=f"check that config.json belongs to these weights{_nearest(extra, missing)}",
        )
    return fills


def _wanted(rules: Rules, where: Mapping[str, Destination], name: str) -> ParamSpec | None:
    """The parameter that a tensor of this name fills, or a part of which; None = there is none."""
    match = rules.match(name)
    place = where.get(match.target) if match else None
    return place.stored if place else None


def _likeliest(names: Sequence[str], entries: Sequence[TensorEntry]) -> str | None:
    """Finds among names that would do the first that begins, up to a number, like a tensor that is there."""
    begins = {re.split("[0-9]", entry.name)[0] for entry in entries}
    return next((name for name in names if re.split("[0-9]", name)[0] in begins), next(iter(names), None))


def _mismatch(entry: TensorEntry, match: Match, place: Destination) -> str | None:
    """Why this tensor cannot fill its part, or None."""
    shape: tuple[int, ...] = entry.shape
    if match.rule.transform is not None:
        stored = torch.empty(shape, dtype=getattr(torch, entry.dtype), device="meta")
        try:
            shape = tuple(match.rule.transform(stored).shape)
        except (RuntimeError, IndexError, ValueError) as e:
            return f"has shape {list(shape)}, which its rule cannot transform ({e})"
    expected = place.part_shape(match.part)
    scalar = shape == () and all(n == 1 for n in expected)
    if shape != expected and not scalar:
        return f"has shape {list(shape)}, needs {list(expected)}"
    have, need = entry.dtype, place.stored.dtype
    plain = ("float64", "float32", "float16", "bfloat16")
    if have != need and not (have in (*plain, "float8_e8m0fnu") and need in plain):
        return f"has dtype {have}, needs {need}"
    return None


def _nearest(extra: Sequence[str], missing: Sequence[str]) -> str:
    """A wrong name and a right one often belong together."""
    like = nearest(extra[0], missing) if extra else None
    return f"; {extra[0]} is nearest to {like}, which is missing" if like else ""


def _some(kind: str, names: list[str]) -> str:
    shown = ", ".join(name if len(name) <= 200 else f"{name[:200]}..." for name in names[:LISTED])
    rest = f" and {len(names) - LISTED} more" if len(names) > LISTED else ""
    return f"{kind} ({len(names)}): {shown}{rest}"


# ---------------------------------------------------------------------------------------------------- filling


def fill_model(
    model: nn.Module,
    rules: Rules,
    loader: Loader,
    checkpoint: Checkpoint,
    platform: Platform,
    device: torch.device,
    progress: Progress | None = None,
    cache: PackedCache | None = None,
    scheme: QuantScheme | None = None,
    base: nn.Module | None = None,
    leave: Callable[[], None] | None = None,
) -> list[str]:
    """Load every parameter of `model` (on meta) and pack its linears, or take them from `cache`. Returns warnings.

    With `base`, modules of which the checkpoint has nothing are those of `base`. `leave` leaves of `model` what this
    rank has, once the whole is checked.
    """
    if isinstance(loader, DummyLoader):
        if leave is not None:
            leave()
        return _fill_randomly(model, loader, checkpoint, device, progress)
    entries = loader.tensors(checkpoint)
    if base is not None:
        untie_as(base, model)
    untie(model, rules, loader, entries)
    where = places(model)
    if scheme is not None and (wrapped := scheme.wrap(loader, partial(_wanted, rules, where))) is not loader:
        loader, entries = wrapped, wrapped.tensors(checkpoint)
    fills = plan_fills(entries, rules, where, partial=base is not None)
    fills = [fill for fill in fills if fill.place.here(fill.match.part)]
    warnings: list[str] = []
    if leave is not None:
        leave()
        here = set(model.modules())
        fills = [fill for fill in fills if fill.place.module in here]
        where = {name: place for name, place in where.items() if place.module in here}
    touched = {fill.place.module for fill in fills}
    packed = frozenset[nn.Module]() if base is None else keep(base, model, touched)
    if cache is not None:
        try:
            packed = cache.restore(model)
        except CheckpointError as e:
            warnings.append(f"{e}: weights are packed anew")
    fills = [fill for fill in fills if fill.place.module not in packed or fill.place.attribute == "bias"]
    waiting = Counter(fill.place.module for fill in fills)  # tensors still to come
    for place in where.values():
        if not place.claimed and place.module not in packed:
            _fill_default(place, device)
    total, done = sum(f.entry.nbytes for f in fills), 0
    checks: list[tuple[str, Tensor]] = []  # read at the end, so that the host does not wait for each
    for fill in fills:
        value = loader.read(fill.entry)
        value = platform.upload(value) if value.device.type != device.type else value
        if fill.match.rule.transform is not None:
            value = fill.match.rule.transform(value)
        if can_be_nan(value):
            checks.append((fill.entry.name, torch.isnan(value.amax())))
        fill.place.put(fill.match.part, value, device)
        del value
        waiting[module := fill.place.module] -= 1
        if waiting[module] == 0 and isinstance(module, Linear) and not module.tied and module.packed is None:
            module.pack()
        if waiting[module] == 0:
            loader.release()
        done += fill.entry.nbytes
        if progress is not None:
            progress("load weights", done, total, "B")
    _settle(model)
    loader.release()
    found = torch.stack([check for _, check in checks]).tolist() if checks else []
    bad = [name for (name, _), is_nan in zip(checks, found, strict=True) if is_nan]
    if bad:
        warnings.append(_some("weights that are not numbers (NaN)", bad))
    if cache is not None and not packed and not bad:  # what warns now shall warn again
        try:
            cache.write(model, progress)
        except OSError as e:
            warnings.append(f"packed weights could not be kept: {e}")
    return warnings


def _settle(model: nn.Module) -> None:
    """Packs and settles what is left when all tensors are there. Raises PluginError where one is not."""
    for path, module in model.named_modules():  # those that share a weight, or have nothing of their own to load
        if isinstance(module, Linear) and module.packed is None:
            module.pack()
        if isinstance(module, Attention | Linear):
            try:
                module.settle()
            except CheckpointError as e:
                raise CheckpointError(f"{path}: {e.message}", fix=e.fix) from e
    left = [name for name, p in model.named_parameters() if p.is_meta]
    if left:
        raise PluginError(f"parameters were never loaded: {', '.join(left[:LISTED])}")


def _fill_randomly(
    model: nn.Module, loader: DummyLoader, checkpoint: Checkpoint, device: torch.device, progress: Progress | None
) -> list[str]:
    """Values for every parameter, optional ones too; a linear is packed as soon as it has its own."""
    if declared := checkpoint.config.get("quantization_config"):
        fix = "--hf-overrides '{\"quantization_config\": null}', and --quantization NAME"
        raise UnsupportedModel("quantization_config", str(declared)[:80], "none where weights are random", fix=fix)
    where = places(model)
    left = Counter(place.module for place in where.values())
    for done, place in enumerate(where.values(), 1):
        for part in place.parts:
            name = place.name if place.stored.part_axis is None else f"{place.name}/{part}"
            dtype = getattr(torch, place.stored.dtype)
            place.put(part, loader.values(name, place.part_shape(part), dtype), device)
        left[module := place.module] -= 1
        if left[module] == 0 and isinstance(module, Linear) and not module.tied:
            module.pack()
        if progress is not None:
            progress("load weights", done, len(where), "parameters")
    for module in model.modules():
        if isinstance(module, Linear) and module.packed is None:
            module.pack()
    return [WARNING]


def _fill_default(place: Destination, device: torch.device) -> None:
    """An optional parameter that the checkpoint does not have."""
    if place.stored.fill is None:
        setattr(place.module, place.attribute, None)
        return
    data = torch.full(place.local.shape, place.stored.fill, dtype=getattr(torch, place.local.dtype), device=device)
    setattr(place.module, place.attribute, nn.Parameter(data, requires_grad=False))


def can_be_nan(value: Tensor) -> bool:
    """Whether it is worth a look: one reduction, in which a NaN survives."""
    return value.is_floating_point() and value.element_size() > 1 and value.numel() > 0


def weight_bytes(model: nn.Module) -> int:
    """Bytes held by parameters and packed weights; shared storage counts once.

    A kernel that needs a copy of a tied weight leaves the original mapped from its file: the copy counts.
    """
    seen: dict[int, int] = {p.data_ptr(): p.nbytes for p in model.parameters()}
    packed = 0
    for module in model.modules():
        if isinstance(module, Linear) and module.packed is not None:
            tensor = getattr(module.packed, "weight", None)
            # layouts other than strided hide their storage, and share it with nobody
            at = tensor.data_ptr() if isinstance(tensor, Tensor) and tensor.layout == torch.strided else 0
            if any(first <= at < first + nbytes for first, nbytes in seen.items()):  # a rank may have some rows
                continue
            if module.tied:
                seen.pop(module.owner[0].get_parameter("weight").data_ptr(), None)
            packed += module.packed.nbytes
    return sum(seen.values()) + packed
