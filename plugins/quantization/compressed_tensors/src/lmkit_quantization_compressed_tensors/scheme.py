"""The checkpoint format: which layers are quantized, and how one is stored."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from lmkit.api import LinearSpec, QuantFormat, QuantScheme
from lmkit_layouts import ByteRows, Fp8Format, MxFp4, NvFp4, PackedRows, Rounding, Settings
from lmkit_layouts.fp4 import MX_GROUP, NV_GROUP
from lmkit_layouts.settings import MAX_NAMES, PLAIN_NAME, WHERE, Pattern, agreed, of_layer

# How the weights were found, and who wrote them; nothing of how they are stored.
IGNORED = ("quant_method", "quantization_status", "global_compression_ratio", "version", "run_compressed")
MAX_PATTERNS = 100
CLASSES = ("Linear", "Module")  # that every linear of a model is one of
PACKED, BYTES, FLOATS, EITHER = "pack-quantized", "int-quantized", "float-quantized", "naive-quantized"
NV, MX = "nvfp4-pack-quantized", "mxfp4-pack-quantized"
FOURS = {NV: ("tensor_group", NV_GROUP, "torch.float8_e4m3fn"), MX: ("group", MX_GROUP, "torch.uint8")}  # 4-bit floats
FORMATS = (PACKED, BYTES, FLOATS, EITHER, *FOURS)
FLOAT_SCALES = ("channel", "tensor", "block")
DTYPES = (None, "torch.float32", "torch.bfloat16", "torch.float16")


Activations = Literal["float", "int8"] | Rounding


@dataclass(frozen=True, slots=True)
class Stored:
    """How one linear is stored. `scale` is what one is for."""

    form: str  # of FORMATS
    bits: int
    scale: Literal["tensor", "channel", "group", "block", "tensor_group"]
    group: int = 0  # columns that share a scale; 0 = all
    block: tuple[int, int] | None = None
    zeros: bool = False
    ordered: bool = False
    activations: Activations = "float"  # what the checkpoint is made for, where that is done

    def layout(self, layer: LinearSpec) -> QuantFormat:
        if self.form in FOURS:
            four = MxFp4 if self.form == MX else NvFp4
            return four(parts=layer.out_features, width=layer.in_features)
        if self.form == FLOATS:
            rows = self.scale == "channel"
            inputs = self.activations if isinstance(self.activations, Rounding) else None
            return Fp8Format(self.block, layer.out_features, layer.in_features, rows, "weight_scale", inputs)
        wide = self.bits == 8
        rounded: Literal["float", "int8"] = "int8" if not wide or self.activations == "int8" else "float"
        common: dict[str, Any] = {
            "stored_bits": self.bits, "group": self.group, "parts": layer.out_features, "width": layer.in_features,
            "zeros": self.zeros, "activations": rounded, "bits": 8 if wide else 4,
            "name": "int4" if not wide else "w8a8" if rounded == "int8" else "int8",
        }  # fmt: skip
        if self.form == PACKED:
            return PackedRows(ordered=self.ordered, **common)
        return ByteRows(whole=self.scale == "tensor", **common)


@dataclass(frozen=True, slots=True)
class Targets:
    """A list of names of modules, patterns of such, and classes."""

    names: frozenset[str]
    patterns: tuple[Pattern, ...]
    every: bool  # a class that all linears belong to

    @classmethod
    def read(cls, given: Settings, key: str, within: str = "") -> Targets:
        """The list at `key` of what is `within` the configuration. Raises UnsupportedModel."""
        found = given.get(key)
        found = [] if found is None else found
        if not isinstance(found, list | tuple) or len(found) > MAX_NAMES or not all(isinstance(n, str) for n in found):
            raise given.unsupported(key, f"a list of at most {MAX_NAMES} names and patterns of modules")
        names = [n for n in found if not n.startswith("re:")]
        if len(found) - len(names) > MAX_PATTERNS or not all(PLAIN_NAME.match(n) for n in names):
            raise given.unsupported(key, f"names of modules, and at most {MAX_PATTERNS} patterns (re:)")
        patterns = [Pattern(n.removeprefix("re:"), within + key) for n in found if n.startswith("re:")]
        every = any(n in CLASSES for n in names)
        return cls(frozenset(names), tuple(sorted(patterns, key=lambda p: p.text)), every)

    def rank(self, module: str) -> tuple[int, str] | None:
        """How closely they name a module: the least is the closest; None = they do not."""
        if module in self.names:
            return (0, module)
        for pattern in self.patterns:
            if pattern.matches(module):
                return (1, pattern.text)
        return (2, "") if self.every else None


@dataclass(frozen=True, slots=True)
class CompressedTensorsScheme(QuantScheme):
    groups: tuple[tuple[Targets, Stored], ...]
    ignored: Targets
    name: str = "compressed-tensors"

    @classmethod
    def parse(cls, quantization_config: Mapping[str, object]) -> CompressedTensorsScheme:
        given = Settings(quantization_config, IGNORED)
        usual = given.one_of("format", (*FORMATS, "mixed-precision"), "")
        given.float8_cache("kv_cache_scheme")
        given.one_of("transform_config", (None, {}), None)
        sparsity = given.get("sparsity_config") or {"format": "dense"}
        if not isinstance(sparsity, Mapping) or sparsity.get("format") != "dense":
            raise given.unsupported("sparsity_config", "format dense: weights that are stored whole")
        groups = given.get("config_groups")
        if not isinstance(groups, Mapping) or not 0 < len(groups) <= MAX_PATTERNS:
            raise given.unsupported("config_groups", f"1 to {MAX_PATTERNS} named groups of layers")
        found = []
        for key, values in groups.items():
            if not isinstance(key, str) or not PLAIN_NAME.match(key) or not isinstance(values, Mapping):
                raise given.unsupported("config_groups", "named groups, each an object that says how it is stored")
            found.append(_group(values, f"config_groups.{key}.", usual))
        scheme = cls(tuple(found), Targets.read(given, "ignore"))
        given.done()
        return scheme

    def for_layer(self, layer: LinearSpec) -> QuantFormat | None:
        stored = agreed(layer, [self._of_module(name) for name in of_layer(layer)], "config_groups")
        return None if stored is None else stored.layout(layer)

    def _of_module(self, name: str) -> Stored | None:
        ranks = [(rank, stored) for targets, stored in self.groups if (rank := targets.rank(name)) is not None]
        if not ranks or self.ignored.rank(name) is not None:
            return None
        return min(ranks, key=lambda found: found[0])[1]


def _group(values: Mapping[str, object], within: str, usual: str) -> tuple[Targets, Stored]:
    """One of config_groups."""
    where = f"{WHERE}.{within}"
    given = Settings(values, (), where.rstrip("."))
    form = usual if given.get("format") is None else given.one_of("format", FORMATS, usual)
    if form not in FORMATS:
        raise given.unsupported("format", ", ".join(map(repr, FORMATS)))
    targets = Targets.read(given, "targets", within)
    if "Embedding" in targets.names:
        raise given.unsupported("targets", "linears; embeddings are stored plainly")
    given.one_of("output_activations", (None,), None)
    inputs, weights = given.get("input_activations"), given.get("weights")
    if not isinstance(weights, Mapping):
        raise given.unsupported("weights", "an object that says how weights are stored")
    if inputs is not None and not isinstance(inputs, Mapping):
        raise given.unsupported("input_activations", "null, or an object that says how activations are rounded")
    given.done()
    activations = "float" if inputs is None else _activations(inputs, f"{where}input_activations", form)
    return targets, _weights(weights, f"{where}weights", form, activations)


def _weights(values: Mapping[str, object], where: str, form: str, activations: Activations) -> Stored:
    if form in FOURS:
        return _fours(values, where, form)
    given = Settings(values, ("observer", "observer_kwargs"), where)
    kinds = {PACKED: ("int",), BYTES: ("int",), FLOATS: ("float",), EITHER: ("int", "float")}[form]
    kind = given.one_of("type", kinds, "int")
    form = form if form == PACKED else BYTES if kind == "int" else FLOATS
    bits = given.one_of("num_bits", {PACKED: (2, 3, 4, 8), BYTES: (4, 8), FLOATS: (8,)}[form], 8)
    symmetric = given.one_of("symmetric", (True,) if kind == "float" else (True, False), True)
    given.one_of("dynamic", (False,), False)
    given.one_of("scale_dtype", DTYPES, None)
    given.one_of("zp_dtype", (None, "torch.int8") if kind == "int" else (*DTYPES, "torch.float8_e4m3fn"), None)
    order = given.one_of("actorder", (None, False, "weight", "static", *(("group",) if form == PACKED else ())), None)
    scale, group = _strategy(given, form)
    block = given.get("block_structure")
    if (scale == "block") != (block is not None) or (block is not None and not _sizes(block)):
        raise given.unsupported("block_structure", "two positive numbers with strategy 'block', else null")
    given.done()
    shape = (block[0], block[1]) if isinstance(block, list | tuple) else None
    return Stored(form, bits, scale, group, shape, not symmetric, order == "group", activations)


def _fours(values: Mapping[str, object], where: str, form: str) -> Stored:
    """Weights in 4-bit floats: there is one way to store each kind."""
    given = Settings(values, ("observer", "observer_kwargs"), where)
    scale, group, dtype = FOURS[form]
    given.one_of("type", ("float",), None)
    given.one_of("num_bits", (4,), None)
    given.one_of("symmetric", (True,), True)
    given.one_of("dynamic", (False,), False)
    given.one_of("strategy", (scale,), None)
    given.one_of("group_size", (group,), None)
    given.one_of("scale_dtype", (None, dtype), None)
    given.one_of("zp_dtype", (None, dtype), None)
    given.one_of("actorder", (None, False, "weight", "static"), None)
    given.one_of("block_structure", (None,), None)
    given.done()
    return Stored(form, 4, "tensor_group" if form == NV else "group", group)


def _strategy(given: Settings, form: str) -> tuple[Any, int]:
    """What a scale is for, and columns of a group (0 = all). Older files name the strategy by the size alone."""
    size = given.get("group_size")
    named = "tensor" if size is None else "channel" if size == -1 else "group"
    allowed = {PACKED: ("group", "channel"), BYTES: ("group", "channel", "tensor"), FLOATS: FLOAT_SCALES}[form]
    scale = given.one_of("strategy", (*allowed, None), None) or named
    if scale not in allowed:
        raise given.unsupported("strategy", ", ".join(map(repr, allowed)))
    if scale == "group":
        return scale, given.group("group_size", 0)
    if type(size) not in (int, type(None)) or size not in (None, -1):
        raise given.unsupported("group_size", f"null or -1 with strategy {scale!r}")
    return scale, 0


def _activations(values: Mapping[str, object], where: str, form: str) -> Activations:
    """int8 where kernels that round as they go do what the checkpoint is made for; never 4 bits."""
    given = Settings(values, ("observer", "observer_kwargs", "actorder", "scale_dtype", "zp_dtype"), where)
    four = form in FOURS
    given.one_of("num_bits", (8, 4) if four else (8,), 8)
    kind = given.one_of("type", ("float",) if four or form == FLOATS else ("int", "float"), "int")
    symmetric = given.one_of("symmetric", (True,) if kind == "float" else (True, False), True)
    dynamic = given.one_of("dynamic", (True, False, *(("local",) if four else ())), False)
    strategy = given.one_of("strategy", ("token", "tensor", "group", *(("tensor_group",) if four else ()), None), None)
    given.one_of("block_structure", (None,), None)
    size = 0 if given.get("group_size") is None else given.group("group_size", -1)
    given.done()
    if kind == "int":
        return "int8" if symmetric and dynamic is True else "float"
    if four:
        return "float"
    strategy = strategy or ("group" if size else "tensor")
    if not dynamic and strategy != "tensor":
        raise given.unsupported("strategy", "'tensor' where dynamic is false")
    if (strategy == "group") != (size > 0):
        raise given.unsupported("group_size", "columns that share a scale with strategy 'group', else null")
    kinds: dict[str, Literal["tensor", "token", "group"]] = {"tensor": "tensor", "token": "token", "group": "group"}
    return Rounding(kinds[strategy], size) if dynamic else Rounding("stored")


def _sizes(block: object) -> bool:
    return isinstance(block, list | tuple) and len(block) == 2 and all(type(n) is int and n > 0 for n in block)
