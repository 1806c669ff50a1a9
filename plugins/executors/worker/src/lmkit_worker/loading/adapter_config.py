"""adapter_config.json: rank, scale and targets of an adapter, with PEFT's own meaning, and nothing else.

Every key is one that is understood, one that says nothing about the arithmetic, or one whose value says nothing: a key
that PEFT, or another program, may add one day is refused as soon as it says something.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from lmkit.api import UnsupportedModel

from lmkit_worker.loading.adapter_files import CONFIG
from lmkit_worker.loading.patterns import Budget, Expression, Patterns

MAX_ALPHA = 1e6
MAX_TARGETS = 1 << 16  # names in a list
USUAL_RANK = USUAL_ALPHA = 8  # PEFT's, where the file does not say it
ALL_LINEAR = "all-linear"
# Keys whose only supported values are these; the first is what a file means that leaves the key out.
FIXED: Mapping[str, tuple[object, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none", None),
    "use_dora": (False, True, None),
    "use_rslora": (False, True, None),
    "fan_in_fan_out": (False, True, None),  # how the base stores its weights, which its rules know
    # others take something out of the base model's weights when the adapter is loaded
    "init_lora_weights": (True, False, None, "gaussian", "orthogonal", "eva", "mica"),
    "lora_bias": (False, None),
    "layer_replication": ([], None),
    "trainable_token_indices": ([], {}, None),
    "use_qalora": (False, None),
    "alora_invocation_tokens": ([], None),
    "arrow_config": (None,),
    "megatron_config": (None,),
}
UNDERSTOOD = frozenset({
    "r", "lora_alpha", "rank_pattern", "alpha_pattern", "target_modules", "target_parameters", "exclude_modules",
    "modules_to_save", "layers_to_transform", "layers_pattern",
})  # fmt: skip
HARMLESS = frozenset({  # where the adapter is from, how it was trained, and options of what FIXED refuses
    "task_type", "auto_mapping", "base_model_name_or_path", "revision", "peft_version", "inference_mode",
    "lora_dropout", "megatron_core", "qalora_group_size", "loftq_config", "eva_config", "corda_config",
    "lora_ga_config", "runtime_config", "unsloth_fixed",
})  # fmt: skip


class AdapterConfig:
    """Ranks, scales and targets of adapter_config.json. Raises UnsupportedModel, naming the key."""

    def __init__(self, config: Mapping[str, Any], max_rank: int) -> None:
        for key, allowed in FIXED.items():
            value = config.get(key, allowed[0])
            if not any(value is one or (type(value) is type(one) and value == one) for one in allowed):
                fix = "save the adapter with peft's path_initial_model_for_weight_conversion, or merge it"
                raise UnsupportedModel(
                    f"{CONFIG} {key}", short(value), ", ".join(map(repr, allowed)),
                    fix=fix if key == "init_lora_weights" else "",
                )  # fmt: skip
        for key, value in config.items():
            if key not in FIXED and key not in UNDERSTOOD and key not in HARMLESS and not says_nothing(value):
                what = "a key that lmkit knows, or an empty value: it may change what the adapter computes"
                raise UnsupportedModel(f"{CONFIG} {key:.80}", short(value), what)
        budget = Budget()
        self.root, self.dora = bool(config.get("use_rslora")), bool(config.get("use_dora"))
        self.usual_rank = self._rank("r", config.get("r", USUAL_RANK), max_rank)
        self.usual_alpha = self._alpha("lora_alpha", config.get("lora_alpha", USUAL_ALPHA))
        self.ranks = Patterns(f"{CONFIG} rank_pattern", config.get("rank_pattern"), budget)
        self.alphas = Patterns(f"{CONFIG} alpha_pattern", config.get("alpha_pattern"), budget)
        for value in self.ranks.values:
            self._rank("rank_pattern", value, max_rank)
        for value in self.alphas.values:
            self._alpha("alpha_pattern", value)
        self.parameters = _names("target_parameters", config.get("target_parameters"))
        self.targets = Targets(config, budget)

    def rank(self, name: str) -> int:
        """The rank of the module or parameter of this name."""
        return int(self.ranks.find(name, self.usual_rank))

    def scale(self, name: str) -> float:
        """The factor of its B @ A."""
        rank = self.rank(name)
        return float(self.alphas.find(name, self.usual_alpha)) / (math.sqrt(rank) if self.root else rank)

    def targeted(self, name: str) -> bool:
        """True where PEFT gives this parameter, not its module, an A and a B."""
        return any(_ends(name, parameter) for parameter in self.parameters)

    def _rank(self, key: str, rank: Any, most: int) -> int:
        if isinstance(rank, bool) or not isinstance(rank, int) or not 1 <= rank <= most:
            fix = "raise --max-lora-rank"
            raise UnsupportedModel(f"{CONFIG} {key}", short(rank), f"a rank from 1 to {most}", fix=fix)
        return rank

    def _alpha(self, key: str, alpha: Any) -> float:
        if isinstance(alpha, bool) or not isinstance(alpha, int | float) or not abs(alpha) <= MAX_ALPHA:
            raise UnsupportedModel(f"{CONFIG} {key}", short(alpha), f"a number up to {MAX_ALPHA:g}")
        return float(alpha)


class Targets:
    """The modules to which PEFT gives an A and a B. It leaves out what a file holds for others."""

    def __init__(self, config: Mapping[str, Any], budget: Budget) -> None:
        targets, excluded = config.get("target_modules"), config.get("exclude_modules")
        self.unsaid = targets is None and not config.get("target_parameters")  # PEFT has a list for each model type
        self.every = isinstance(targets, str) and targets.lower() == ALL_LINEAR
        self.pattern = self._expression("target_modules", targets, budget) if not self.every else None
        self.excluding = self._expression("exclude_modules", excluded, budget)
        self.names = frozenset(() if isinstance(targets, str) else _names("target_modules", targets))
        self.excluded = frozenset(() if isinstance(excluded, str) else _names("exclude_modules", excluded))
        self.layers = self._layers(config.get("layers_to_transform"))
        patterns = config.get("layers_pattern") or []
        patterns = [patterns] if isinstance(patterns, str) else _names("layers_pattern", patterns)
        if len(patterns) > 8:
            raise UnsupportedModel(f"{CONFIG} layers_pattern", short(patterns), "at most 8 names")
        if self.pattern is not None and (self.layers is not None or patterns):
            raise UnsupportedModel(
                f"{CONFIG} target_modules", short(targets), "a list of names beside layers_to_transform"
            )
        key = f"{CONFIG} layers_pattern"
        numbered = [(r"(?:^|.*?\.)", f"{pattern}", r"\.(?P<idx>\d+)\..*") for pattern in patterns]
        numbered = numbered or [("", r".*?\.[^.]*", r"\.(?P<idx>\d+)\..*")]
        self.numbered = [Expression(key, pattern, budget, before, after) for before, pattern, after in numbered]

    def include(self, module: str) -> bool:
        """True where PEFT would use an A and a B of this module."""
        if module in self.excluded or any(end in self.excluded for end in _endings(module)):
            return False
        if self.excluding is not None and self.excluding.matches(module):
            return False
        if self.unsaid or self.every:
            return True
        if self.pattern is not None:
            return self.pattern.matches(module)
        if not any(end in self.names for end in (module, *_endings(module))):
            return False
        return module in self.names or self.layers is None or self._layer(module) in self.layers

    def _layer(self, module: str) -> int | None:
        match = next((match for layer in self.numbered if (match := layer.match(module))), None)
        return int(match["idx"]) if match else None

    @staticmethod
    def _expression(key: str, value: Any, budget: Budget) -> Expression | None:
        return Expression(f"{CONFIG} {key}", value, budget) if isinstance(value, str) else None

    @staticmethod
    def _layers(value: Any) -> frozenset[int] | None:
        numbers = [value] if isinstance(value, int) and not isinstance(value, bool) else value
        if numbers is None or numbers == []:
            return None
        if not isinstance(numbers, list) or any(isinstance(n, bool) or not isinstance(n, int) for n in numbers):
            raise UnsupportedModel(f"{CONFIG} layers_to_transform", short(value), "a number or a list of numbers")
        return frozenset(numbers)


def says_nothing(value: object) -> bool:
    """True for null, false, and what is empty."""
    return value is None or value is False or (isinstance(value, str | list | dict) and not value)


def short(value: object) -> object:
    """The beginning of a value, as much as an error may show."""
    shown = repr(value)
    return value if len(shown) <= 80 else f"{shown[:77]}..."


def _names(key: str, value: Any) -> list[str]:
    names = [] if value is None else value
    if not (isinstance(names, list) and len(names) <= MAX_TARGETS and all(isinstance(name, str) for name in names)):
        raise UnsupportedModel(f"{CONFIG} {key}", short(value), "a list of names")
    return names


def _ends(name: str, end: str) -> bool:
    return name == end or name.endswith(f".{end}")


def _endings(name: str) -> list[str]:
    """The parts of a name behind each of its dots."""
    parts = name.split(".")
    return [".".join(parts[i:]) for i in range(1, len(parts))]
