"""SamplingParams: immutable, validated once, carried unchanged from the front end to the worker."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any, Literal

from lmkit.api.errors import InvalidParam

MAX_STOP = 16  # stop strings per request
MAX_STOP_IDS = 128
MAX_LOGPROBS = 20  # as in the OpenAI API
MAX_BIAS = 1024
MAX_TOKENS = 1 << 24


@dataclass(frozen=True, slots=True)
class Grammar:
    """A constraint on the output. `kind` names how `source` is written; a grammar backend may refuse it."""

    kind: Literal["json_schema", "json_object", "regex", "choice", "ebnf", "lark", "structural_tag"]
    source: str
    backend: str | None = None


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to turn logits into tokens. Raises InvalidParam(field, value, limit) on construction.

    `max_tokens=None` means as many as fit: the front end replaces it before the request enters the engine.
    `stop` is read by the front end only; the engine sees token ids.
    """

    max_tokens: int | None = None
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0 = off
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None  # noise is a function of (seed, position): there is no generator state
    stop_token_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None  # number of alternatives beside the sampled token; None = off
    prompt_logprobs: int | None = None
    logit_bias: tuple[tuple[int, float], ...] = ()
    grammar: Grammar | None = None
    extra: Mapping[str, object] = field(default_factory=dict)  # claimed by logits-processor plugins

    def __post_init__(self) -> None:
        _set = object.__setattr__
        for name in ("stop", "stop_token_ids"):
            value = getattr(self, name)
            _set(self, name, (value,) if isinstance(value, (str, int)) else _tuple(name, value))
        _set(self, "logit_bias", _pairs(self.logit_bias))
        if not isinstance(self.ignore_eos, bool):
            raise InvalidParam("ignore_eos", self.ignore_eos, "True or False")
        if not isinstance(self.extra, Mapping):
            raise InvalidParam("extra", self.extra, "a mapping")

        if self.max_tokens is not None:
            _integer("max_tokens", self.max_tokens, 1, MAX_TOKENS)
        _integer("min_tokens", self.min_tokens, 0, MAX_TOKENS if self.max_tokens is None else self.max_tokens)
        _number("temperature", self.temperature, 0.0, 100.0)
        _number("top_p", self.top_p, 0.0, 1.0, open_low=True)
        _integer("top_k", self.top_k, 0, 1 << 31)
        _number("min_p", self.min_p, 0.0, 1.0)
        _number("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _number("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _number("repetition_penalty", self.repetition_penalty, 0.0, 100.0, open_low=True)
        if self.seed is not None:
            _integer("seed", self.seed, -(1 << 63), (1 << 63) - 1)
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                _integer(name, getattr(self, name), 0, MAX_LOGPROBS)
        if len(self.stop) > MAX_STOP or not all(isinstance(s, str) and 0 < len(s) <= 1024 for s in self.stop):
            raise InvalidParam("stop", self.stop, f"at most {MAX_STOP} non-empty strings of at most 1024 characters")
        if len(self.stop_token_ids) > MAX_STOP_IDS:
            raise InvalidParam("stop_token_ids", len(self.stop_token_ids), f"at most {MAX_STOP_IDS} ids")
        for token in self.stop_token_ids:
            _integer("stop_token_ids", token, 0, (1 << 31) - 1)
        if len(self.logit_bias) > MAX_BIAS:
            raise InvalidParam("logit_bias", len(self.logit_bias), f"at most {MAX_BIAS} entries")
        for token, value in self.logit_bias:
            _integer("logit_bias", token, 0, (1 << 31) - 1)
            _number("logit_bias", value, -100.0, 100.0)

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0


def _tuple(name: str, value: object) -> tuple:
    if value is not None and not isinstance(value, (Sequence, Set)):
        raise InvalidParam(name, value, "a list")
    return tuple(value or ())


def _pairs(bias: Any) -> tuple[tuple[int, float], ...]:
    """logit_bias as (token id, bias) pairs. As in JSON, ids may be texts of digits."""
    try:
        pairs = [(t, b) for t, b in (bias.items() if isinstance(bias, Mapping) else bias or ())]
        return tuple((int(t) if isinstance(t, str) else t, b) for t, b in pairs)
    except (TypeError, ValueError):
        raise InvalidParam("logit_bias", bias, "a mapping of token ids to numbers") from None


def _integer(name: str, value: object, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise InvalidParam(name, value, f"an integer from {low} to {high}")


def _number(name: str, value: object, low: float, high: float, open_low: bool = False) -> None:
    number = value if isinstance(value, (int, float)) and not isinstance(value, bool) else math.nan
    if not low <= number <= high or (open_low and number == low):  # no limit lets nan or an infinity through
        raise InvalidParam(name, value, f"a number {'above' if open_low else 'from'} {low} up to {high}")
