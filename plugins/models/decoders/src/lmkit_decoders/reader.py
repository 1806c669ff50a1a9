"""Reading a checkpoint's configuration strictly. Torch-free.

Only keys that an architecture reads matter: a key it does not know cannot change what the architecture computes.
Each value read is checked against what the code here understands; anything else raises UnsupportedModel.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from lmkit.api import UnsupportedModel, canonical

REQUIRED: Any = object()
MAX_LAYERS = 10_000
ACTIVATIONS = (
    "silu",
    "gelu",
    "gelu_pytorch_tanh",
    "gelu_new",
    "gelu_fast",
    "relu",
    "relu2",
)  # lmkit_layers.activations
OTHER_ACTIVATIONS = {  # second names in files -> what it is called here
    "swish": "silu",
    "gelu_python": "gelu",
    "gelu_python_tanh": "gelu_pytorch_tanh",
    "gelu_accurate": "gelu_pytorch_tanh",
}
FULL, SLIDING = "full_attention", "sliding_attention"  # names in layer_types

# rope_type -> (required numbers, optional numbers)
ROPE_TYPES: Mapping[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "default": ((), ()),
    "linear": (("factor",), ()),
    "dynamic": (("factor",), ()),
    "proportional": ((), ("factor",)),
    "yarn": (
        (),
        (
            "factor",
            "original_max_position_embeddings",
            "attention_factor",
            "beta_fast",
            "beta_slow",
            "mscale",
            "mscale_all_dim",
            "truncate",
        ),
    ),
    "llama3": (("factor", "low_freq_factor", "high_freq_factor"), ("original_max_position_embeddings",)),
    "longrope": ((), ("factor", "original_max_position_embeddings", "attention_factor", "short_mscale", "long_mscale")),
}
LISTS = {"longrope": ("short_factor", "long_factor")}  # rope_type -> required lists of numbers
OLD_ROPE_TYPES = {"su": "longrope", "mrope": "default"}  # in old files -> what it is called now
LENGTH = "original_max_position_embeddings"
SCALED = ("yarn", "llama3", "longrope")  # types that read LENGTH
ZERO_IS_UNSET = {"beta_fast", "beta_slow", "mscale", "mscale_all_dim"}
# Keys of any type that change nothing in transformers. In a text, mrope's three positions are the same.
HARMLESS = {
    *("rope_type", "type", "rope_theta", "partial_rotary_factor", LENGTH, "max_position_embeddings"),
    *("mrope_section", "mrope_interleaved", "finetuned", "attn_factor", "extrapolation_factor"),
}
# Keys that another type reads may stand in a file with the value that they have where they are left out.
DEFAULTS = {"factor": 1, "beta_fast": 32, "beta_slow": 1, "mscale": 1, "attention_factor": 1, "truncate": True}


class ConfigReader:
    """Typed access to config.json. A missing key without default, or a value of another type, is an error."""

    def __init__(self, config: Mapping[str, object]) -> None:
        self.config = config

    def _get(self, key: str, default: Any) -> Any:
        value = self.config.get(key)
        if value is not None:
            return value
        if default is REQUIRED:
            raise UnsupportedModel(key, None, "a value is required")
        return default

    def integer(self, key: str, default: Any = REQUIRED, maximum: int = 1 << 31, minimum: int = 1) -> int:
        """An integer from `minimum` to `maximum` (what a file says is not trusted to be sane)."""
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or not minimum <= value <= maximum:
            raise UnsupportedModel(key, value, f"an integer from {minimum} to {maximum}")
        return value

    def kernel_width(self, key: str, default: int) -> int:
        """The width of a causal convolution, whose last `width - 1` tokens are kept as state."""
        return self.integer(key, default, minimum=2)

    def optional(self, key: str, default: int | None = None) -> int | None:
        """An integer or null; `default` only where the key is missing."""
        if key not in self.config:
            return default
        return None if self.config[key] is None else self.integer(key)

    def count(self, key: str, default: Any = REQUIRED) -> int:
        """An integer from 0 on."""
        return 0 if self._get(key, default) == 0 else self.integer(key, default)

    def switches(self, key: str, default: Sequence[int]) -> list[bool]:
        """One flag (true, false, 1, 0) for each layer."""
        value = self._get(key, list(default))
        if not isinstance(value, list) or len(value) != self.layers() or any(v not in (0, 1) for v in value):
            raise UnsupportedModel(key, value, f"{self.layers()} flags")
        return [bool(v) for v in value]

    def activation(self, key: str = "hidden_act", default: Any = "silu", known: Iterable[str] = ACTIVATIONS) -> str:
        """The name of an activation that `RowOps` knows, among `known`."""
        name = self._get(key, default)
        other = OTHER_ACTIVATIONS.get(name) if isinstance(name, str) else None
        return ConfigReader({key: other or name}).one_of(key, known)

    def layers(self, key: str = "num_hidden_layers") -> int:
        return self.integer(key, maximum=MAX_LAYERS)

    def number(self, key: str, default: Any = REQUIRED) -> float:
        """A positive, finite number."""
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
            raise UnsupportedModel(key, value, "a positive number")
        return float(value)

    def limit(self, key: str, default: float | None = None) -> float | None:
        """A positive number or null; `default` only where the key is missing."""
        if key not in self.config:
            return default
        return None if self.config[key] is None else self.number(key)

    def per_layer_kind(self, key: str) -> bool:
        """Whether the object at `key` holds one object for each kind of layer."""
        value = self.config.get(key)
        return isinstance(value, Mapping) and any(isinstance(v, Mapping) for v in value.values())

    def flag(self, key: str, default: Any = REQUIRED) -> bool:
        value = self._get(key, default)
        if not isinstance(value, bool):
            raise UnsupportedModel(key, value, "true or false")
        return value

    def one_of(self, key: str, allowed: Iterable[object], default: Any = REQUIRED) -> Any:
        """A value among `allowed`; None is allowed when listed."""
        allowed = list(allowed)
        value = self.config.get(key) if None in allowed and default is REQUIRED else self._get(key, default)
        if value not in allowed:
            raise UnsupportedModel(key, value, ", ".join(map(repr, allowed)))
        return value

    def token_ids(self, key: str) -> tuple[int, ...]:
        """An id, a list of ids, or nothing."""
        value = self.config.get(key)
        ids = value if isinstance(value, list) else [] if value is None else [value]
        if any(isinstance(i, bool) or not isinstance(i, int) or i < 0 for i in ids):
            raise UnsupportedModel(key, value, "token ids")
        return tuple(ids)

    def dtype(self) -> str:
        """The checkpoint's dtype ("dtype" in newer files, "torch_dtype" in older); float32 when it says nothing."""
        value = self.config.get("dtype") or self.config.get("torch_dtype") or "float32"
        name = canonical(str(value))
        if name not in ("float32", "float16", "bfloat16"):
            raise UnsupportedModel("dtype", value, "float32, float16, bfloat16")
        return name

    def architecture(self, known: Iterable[str]) -> str:
        names = self.config.get("architectures")
        known = tuple(known)
        if not isinstance(names, list) or len(names) != 1 or names[0] not in known:
            raise UnsupportedModel("architectures", names, ", ".join(known))
        return str(names[0])

    def length(self, positions: int) -> int:
        """How many `positions` full attention may serve: dual chunk attention (arXiv 2402.17463) equals it within
        the first chunk, and is not implemented beyond."""
        if self.config.get("dual_chunk_attention_config") is None:
            return positions
        chunks = self.nested("dual_chunk_attention_config")
        first = chunks.integer("chunk_size") - chunks.integer("local_size")
        if first < 1:
            raise UnsupportedModel("dual_chunk_attention_config.local_size", -first, "less than chunk_size")
        return min(positions, first)

    def numbers(self, key: str, size: int | None = None) -> list[float]:
        """A list of positive numbers."""
        value = self._get(key, REQUIRED)
        if not isinstance(value, list) or size not in (None, len(value)):
            raise UnsupportedModel(key, value, f"a list of {size or ''} numbers")
        return [ConfigReader({key: v}).number(key) for v in value]

    def nested(self, key: str) -> ConfigReader:
        """A reader of the object at `key`."""
        value = self._get(key, REQUIRED)
        if not isinstance(value, Mapping):
            raise UnsupportedModel(key, value, "an object")
        return ConfigReader(value)

    def layer_kinds(self, default: Callable[[int], str], known: Iterable[str], key: str = "layer_types") -> list[str]:
        """Kind of each layer: the list at `key`, else `default(layer)`."""
        num, known = self.layers(), tuple(known)
        kinds = self._get(key, [default(i) for i in range(num)])
        if not isinstance(kinds, list) or len(kinds) != num or any(kind not in known for kind in kinds):
            raise UnsupportedModel(key, kinds, f"{num} of {', '.join(known)}")
        return kinds

    def layer_numbers(self, key: str, default: Iterable[int] = ()) -> list[int]:
        """A list of layers."""
        value = self._get(key, list(default))
        if not isinstance(value, list) or any(type(i) is not int or i not in range(self.layers()) for i in value):
            raise UnsupportedModel(key, value, f"a list of layers from 0 to {self.layers() - 1}")
        return value

    def windows(self, default: Callable[[int], bool] = lambda i: False, size: Any = None) -> tuple[int | None, ...]:
        """Sliding window of each layer: of those that `layer_types`, or else `default(layer)`, calls sliding."""
        kinds = self.layer_kinds(lambda i: SLIDING if default(i) else FULL, (FULL, SLIDING))
        if SLIDING not in kinds:
            return (None,) * len(kinds)
        if self._get("sliding_window", size) is None:
            raise UnsupportedModel("sliding_window", None, "a number: layer_types has sliding layers")
        window = self.integer("sliding_window", size)
        return tuple(window if kind == SLIDING else None for kind in kinds)

    def rope(
        self,
        default_theta: float = 10000.0,
        default_partial: float | None = None,
        kind_of_layer: str | None = None,
        extra: tuple[str, ...] = (),
        missing: Mapping[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Rotary parameters: {"rope_type", "theta", "partial", ...numbers of the type, those of a family's own}.

        Newer files have `rope_parameters` (per kind of layer where kinds differ: then `kind_of_layer` names one), older
        ones `rope_theta` beside an optional `rope_scaling`, which comes first where both are there.
        `default_partial` is None where a part cannot be turned. `missing` is what a file without either means.
        """
        key, parameters = "rope_parameters", self.config.get("rope_parameters")
        if scaling := self.config.get("rope_scaling"):
            if self.per_layer_kind(key):
                raise UnsupportedModel("rope_scaling", scaling, f"null beside {key} of each kind of layer")
            key, bases = "rope_scaling", ("rope_theta", "partial_rotary_factor")
            shared = {k: parameters[k] for k in bases if k in parameters} if isinstance(parameters, Mapping) else {}
            parameters = {**shared, **scaling} if isinstance(scaling, Mapping) else scaling
        raw = parameters or missing or {}
        if kind_of_layer is not None and isinstance(raw, Mapping) and isinstance(raw.get(kind_of_layer), Mapping):
            key, raw = f"{key}.{kind_of_layer}", raw[kind_of_layer]
        if not isinstance(raw, Mapping) or any(isinstance(v, Mapping) for v in raw.values()):
            raise UnsupportedModel(key, raw, "one set of rotary parameters for all layers")
        kind = raw.get("rope_type", raw.get("type", "default"))
        kind = OLD_ROPE_TYPES.get(str(kind), kind)
        if kind not in tuple(ROPE_TYPES):
            raise UnsupportedModel(f"{key}.rope_type", kind, ", ".join(ROPE_TYPES))
        required, optional = ROPE_TYPES[kind][0], (*ROPE_TYPES[kind][1], *extra)
        lists = LISTS.get(kind, ())
        numbers = ConfigReader(raw)
        theta = numbers.number("rope_theta", self.config.get("rope_theta") or default_theta)
        given = self.config.get("partial_rotary_factor") or default_partial or 1.0
        partial = numbers.number("partial_rotary_factor", given)
        if partial > 1 or (default_partial is None and partial != 1 and kind != "proportional"):
            allowed = "1: heads are turned as a whole" if default_partial is None else "at most 1"
            raise UnsupportedModel("partial_rotary_factor", partial, allowed)
        rope: dict[str, Any] = {"rope_type": kind, "theta": theta, "partial": partial}
        if kind == "proportional":
            rope |= {"partial": 1.0, "share": partial}
        rope |= {name: numbers.number(name) for name in required}
        rope |= {name: numbers.numbers(name) for name in lists}
        for name in optional:
            if raw.get(name) is not None and not (raw[name] == 0 and name in ZERO_IS_UNSET):
                rope[name] = numbers.flag(name) if name == "truncate" else numbers.number(name)
        understood = sorted({*required, *optional, *lists, *HARMLESS})
        for name, value in sorted(raw.items()):
            if name not in understood and value is not None and (name not in DEFAULTS or value != DEFAULTS[name]):
                raise UnsupportedModel(f"{key}.{name}", value, f"keys of rope_type {kind!r}: {', '.join(understood)}")
        if kind in SCALED:
            self._lengths(rope, nested=kind_of_layer is not None and key.endswith(f".{kind_of_layer}"))
        return rope

    def _lengths(self, rope: dict[str, Any], *, nested: bool) -> None:
        """Settles the lengths that a rope type compares, as transformers does.

        The original length stands beside the rotary parameters, which comes first, or among them, where layers of
        different kinds have their own; without either it is `max_position_embeddings`. It tells YaRN's factor, too.
        """
        if self.config.get(LENGTH) is not None and not nested:
            rope[LENGTH] = self.number(LENGTH)
        if rope["rope_type"] == "longrope":
            rope["max_position_embeddings"] = self.integer("max_position_embeddings")
        if LENGTH not in rope:
            rope[LENGTH] = self.integer("max_position_embeddings")
        if rope["rope_type"] == "yarn" and "factor" not in rope:
            rope["factor"] = self.integer("max_position_embeddings") / rope[LENGTH]


def rope_length(positions: int, rope: Mapping[str, Any] | None) -> int:
    """Positions a model serves whose configuration says `positions`: a YaRN factor extends the original length."""
    if rope is None or rope["rope_type"] != "yarn":
        return positions
    return max(positions, round(rope["factor"] * rope["original_max_position_embeddings"]))
