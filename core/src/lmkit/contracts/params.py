"""SamplingParams and PoolingParams: immutable, validated once, carried unchanged from the front end to the worker."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any, Literal, Self, get_args

from lmkit.contracts.errors import InvalidParam, nearest

MAX_STOP = 16  # stop strings per request
MAX_STOP_IDS = 128
MAX_LOGPROBS = 20  # as in the OpenAI API
MIN_REPETITION = 1e-6  # logits are divided by it: they stay finite in float32
MAX_BIAS = 1024
MAX_ANSWERS = 1 << 16  # to a prompt, of the Python API
MAX_WORDS = 128  # bad words of a request
MAX_ALLOWED = 1 << 17
MAX_TOKENS = 1 << 24
MAX_GRAMMAR = 1 << 19  # characters
MAX_DIMENSIONS = 1 << 20

GrammarKind = Literal["json_schema", "json_object", "regex", "choice", "ebnf", "lark", "structural_tag"]
PoolingTask = Literal["embed", "classify", "token_embed", "token_classify"]
POOLING_TASKS: tuple[PoolingTask, ...] = ("embed", "classify", "token_embed", "token_classify")


_SPELLED = {  # parameters of other APIs -> what they are here
    "best_of": "LLM.beam_search(prompts, BeamSearchParams(...)), or n",
    "early_stopping": "LLM.beam_search(prompts, BeamSearchParams(early_stopping=...))",
    "extra_args": "extra={NAME: {...}}, of logits processors",
    "guided_decoding": "grammar=Grammar(KIND, SOURCE), for example Grammar('json_schema', SCHEMA)",
    "length_penalty": "LLM.beam_search(prompts, BeamSearchParams(length_penalty=...))",
    "logits_processors": "extra={NAME: {...}}, of logits processors that are plugins",
    "max_completion_tokens": "max_tokens",
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "stop_strings": "stop",
    "structured_outputs": "grammar=Grammar(KIND, SOURCE), for example Grammar('json_schema', SCHEMA)",
    "top_logprobs": "logprobs",
    "use_beam_search": "LLM.beam_search(prompts, BeamSearchParams(...))",
    "vllm_xargs": "extra={NAME: {...}}, of logits processors",
}


@dataclass(frozen=True, slots=True)
class Grammar:
    """A constraint on the output. Raises InvalidParam(field, value, limit) on construction.

    `kind` says how `source` is written; a grammar backend may refuse it.

    json_schema      a JSON schema of any draft
    json_object      ""; any JSON object
    regex            a regular expression that the whole output matches
    choice           a JSON list of texts, one of which is the output
    ebnf             GBNF rules (`root ::= ...`)
    lark             Lark rules (`start: ...`)
    structural_tag   {"type": "structural_tag", "format": FORMAT} or {..., "structures": [...], "triggers": [...]}; a
                     FORMAT is {"type": T, ...} with T one of const_string (value), json_schema (json_schema),
                     regex (pattern), grammar (grammar), any_text, sequence (elements), or (elements),
                     tag (begin, content, end), tags_with_separator (tags, separator, at_least_one, stop_after_first),
                     triggered_tags (triggers, tags, at_least_one, stop_after_first). Texts that are control tokens of
                     the vocabulary stand for these tokens.
    """

    kind: GrammarKind
    source: str
    backend: str | None = None  # a grammar plugin's name; None = the first that takes it

    def __post_init__(self) -> None:
        if self.kind not in get_args(GrammarKind):
            raise InvalidParam("grammar.kind", self.kind, f"one of {', '.join(get_args(GrammarKind))}")
        if not isinstance(self.source, str) or len(self.source) > MAX_GRAMMAR:
            raise InvalidParam("grammar.source", self.source, f"a text of at most {MAX_GRAMMAR} characters")
        if self.backend is not None and (not isinstance(self.backend, str) or len(self.backend) > 64):
            raise InvalidParam("grammar.backend", self.backend, "the name of a grammar plugin")


@dataclass(frozen=True, slots=True)
class Thinking:
    """Free text at the start of an output, before a grammar holds. Raises InvalidParam on construction.

    Set by the front end from the model's reasoning format; read by the engine, which follows it by token ids.
    """

    close: tuple[str, ...]  # any of them ends it; the first is what follows when the budget is spent
    open: tuple[str, ...] = ()  # with which an output may open it by itself
    inside: bool = False  # the prompt has opened it already
    until: tuple[str, ...] = ()  # texts that would end it without `close`: they cannot be generated inside
    budget: int | None = None  # tokens

    def __post_init__(self) -> None:
        if self.budget is not None:
            _integer("thinking_token_budget", self.budget, 0, MAX_TOKENS)
        texts = (*self.open, *self.close, *self.until)
        if not self.close or len(texts) > 64 or not all(isinstance(t, str) and 0 < len(t) <= 256 for t in texts):
            raise InvalidParam("thinking", texts, "markers of at most 256 characters, and at least one to close with")


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to turn logits into tokens. Raises InvalidParam(field, value, limit) on construction.

    `max_tokens` is a ceiling: the front end cuts it to what the prompt leaves of the context; None is all of that.
    `stop` and `stop_in` are read by the front end only; the engine sees token ids.
    """

    max_tokens: int | None = None
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0  # 0 = the likeliest token, and becomes top_k = 1
    top_k: int = 0  # 0 or -1 = off
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None  # noise is a function of (seed, position): there is no generator state
    stop_token_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    stop_in: Literal["content", "output"] = (
        "content"  # what `stop` is about: the visible answer, or all that is written
    )
    ignore_eos: bool = False
    logprobs: int | None = None  # number of alternatives beside the sampled token; None = off
    prompt_logprobs: int | None = None
    logit_bias: tuple[tuple[int, float], ...] = ()
    grammar: Grammar | None = None
    thinking: Thinking | None = None  # where the grammar begins to hold, and how long thinking may last
    extra: Mapping[str, object] = field(default_factory=dict)  # claimed by logits-processor plugins
    # of the Python API, read by the front end only: the other front ends have fields of their own for them
    n: int = 1  # answers to each prompt
    bad_words: tuple[str, ...] = ()  # texts that are not generated
    allowed_token_ids: tuple[int, ...] = ()  # no others are generated; () = all are allowed
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True  # shown special tokens are joined as they are, whatever this says
    include_stop_str_in_output: bool = False
    truncate_prompt_tokens: int | None = None  # so many at the end of the prompt are read; -1 = as many as fit
    priority: int = 0  # smaller is sooner

    def __new__(cls, *args: Any, **options: Any) -> Self:
        for name in options:
            if name not in cls.__dataclass_fields__:
                known = _SPELLED.get(name)
                like = nearest(name, cls.__dataclass_fields__)
                fix = f"write {known}" if known else f"did you mean {like!r}?" if like else ""
                raise InvalidParam(name, options[name], "a name that SamplingParams has", fix=fix)
        return object.__new__(cls)

    def __post_init__(self) -> None:
        _set = object.__setattr__
        for name in ("stop", "stop_token_ids", "bad_words", "allowed_token_ids"):
            value = getattr(self, name)
            _set(self, name, (value,) if isinstance(value, (str, int)) else _tuple(name, value))
        if self.top_k == -1 and not isinstance(self.top_k, bool):  # as vLLM writes it
            _set(self, "top_k", 0)
        self._check_front_end()
        _set(self, "logit_bias", _pairs(self.logit_bias))
        if not isinstance(self.ignore_eos, bool):
            raise InvalidParam("ignore_eos", self.ignore_eos, "True or False")
        if not isinstance(self.extra, Mapping):
            raise InvalidParam("extra", self.extra, "a mapping")

        if self.max_tokens is not None:
            _integer("max_tokens", self.max_tokens, 1, MAX_TOKENS)
        _integer("min_tokens", self.min_tokens, 0, MAX_TOKENS if self.max_tokens is None else self.max_tokens)
        _number("temperature", self.temperature, 0.0, 100.0)
        _number("top_p", self.top_p, 0.0, 1.0)
        if self.top_k == -1:  # as other engines write it
            _set(self, "top_k", 0)
        _integer("top_k", self.top_k, 0, 1 << 31)
        if self.top_p == 0:  # the smallest set of tokens, which has one: the likeliest
            _set(self, "top_p", 1.0)
            _set(self, "top_k", 1)
        _number("min_p", self.min_p, 0.0, 1.0)
        _number("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _number("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _number("repetition_penalty", self.repetition_penalty, MIN_REPETITION, 100.0)
        if self.seed is not None:
            _integer("seed", self.seed, -(1 << 63), (1 << 63) - 1)
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                if getattr(self, name) == -1:
                    fix = f"{name}={MAX_LOGPROBS}: the likeliest tokens; all of the vocabulary cannot be had"
                    raise InvalidParam(name, -1, f"an integer from 0 to {MAX_LOGPROBS}", fix=fix)
                _integer(name, getattr(self, name), 0, MAX_LOGPROBS)
        if len(self.stop) > MAX_STOP or not all(isinstance(s, str) and 0 < len(s) <= 1024 for s in self.stop):
            raise InvalidParam("stop", self.stop, f"at most {MAX_STOP} non-empty strings of at most 1024 characters")
        if self.stop_in not in ("content", "output"):
            raise InvalidParam("stop_in", self.stop_in, "content or output")
        if len(self.stop_token_ids) > MAX_STOP_IDS:
            raise InvalidParam("stop_token_ids", len(self.stop_token_ids), f"at most {MAX_STOP_IDS} ids")
        for token in self.stop_token_ids:
            _integer("stop_token_ids", token, 0, (1 << 31) - 1)
        if len(self.logit_bias) > MAX_BIAS:
            raise InvalidParam("logit_bias", len(self.logit_bias), f"at most {MAX_BIAS} entries")
        for token, value in self.logit_bias:
            _integer("logit_bias", token, 0, (1 << 31) - 1)
            _number("logit_bias", value, -100.0, 100.0)

        if self.grammar is not None and (self.ignore_eos or self.min_tokens):
            name = "ignore_eos" if self.ignore_eos else "min_tokens"
            raise InvalidParam(name, getattr(self, name), "left out when there is a grammar: it decides about the end")

    def _check_front_end(self) -> None:
        """The fields of the Python API."""
        _integer("n", self.n, 1, MAX_ANSWERS)
        _integer("priority", self.priority, -(1 << 31), 1 << 31)
        for name in ("skip_special_tokens", "spaces_between_special_tokens", "include_stop_str_in_output"):
            if not isinstance(getattr(self, name), bool):
                raise InvalidParam(name, getattr(self, name), "True or False")
        if len(self.bad_words) > MAX_WORDS or not all(
            isinstance(w, str) and 0 < len(w) <= 1024 for w in self.bad_words
        ):
            limit = f"at most {MAX_WORDS} non-empty texts of at most 1024 characters"
            raise InvalidParam("bad_words", self.bad_words, limit)
        if len(self.allowed_token_ids) > MAX_ALLOWED:
            raise InvalidParam("allowed_token_ids", len(self.allowed_token_ids), f"at most {MAX_ALLOWED} ids")
        for token in self.allowed_token_ids:
            _integer("allowed_token_ids", token, 0, (1 << 31) - 1)
        if self.truncate_prompt_tokens is not None:
            _integer("truncate_prompt_tokens", self.truncate_prompt_tokens, -1, MAX_TOKENS)
            if self.truncate_prompt_tokens == 0:
                raise InvalidParam("truncate_prompt_tokens", 0, "a number of tokens, or -1: as many as fit")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0


@dataclass(frozen=True, slots=True)
class Beams:
    """Beam search: the `n` best of what a search with `width` beams finds. Raises InvalidParam on construction.

    Outputs are ranked by the sum of the raw log-probabilities of their tokens / length ** `length_penalty`.
    `early_stopping`: True: end with the first `width` outputs; False: when the likeliest running one would not be
    better if it ended now; "never": when it could not be better at any length.
    """

    width: int
    n: int = 1
    length_penalty: float = 1.0
    early_stopping: bool | Literal["never"] = False

    def __post_init__(self) -> None:
        _integer("beam_width", self.width, 1, MAX_LOGPROBS)
        _integer("n", self.n, 1, self.width)
        _number("length_penalty", self.length_penalty, -10.0, 10.0)
        if self.early_stopping not in (True, False, "never"):
            raise InvalidParam("early_stopping", self.early_stopping, "True, False or 'never'")

    def check(self, params: SamplingParams, num_ends: int) -> None:
        """Raises InvalidParam for what does not go together with a search; `num_ends`: tokens that end an output."""
        kept = ("max_tokens", "ignore_eos", "stop_token_ids", "logprobs", "seed")
        usual = SamplingParams(temperature=float(not params.greedy))
        for name in [name for name in params.__dataclass_fields__ if name not in kept]:
            if (value := getattr(params, name)) != getattr(usual, name):
                raise InvalidParam(name, value, "left out with beam search: beams are ranked as the model scores them")
        if self.width + num_ends > MAX_LOGPROBS:
            limit = f"at most {MAX_LOGPROBS - num_ends}: with the {num_ends} tokens that end an output {MAX_LOGPROBS}"
            raise InvalidParam("beam_width", self.width, limit)


@dataclass(frozen=True, slots=True)
class PoolingParams:
    """Which vectors a pooling model answers with. Raises InvalidParam on construction.

    "embed" and "classify" give one vector for the prompt, "token_embed" and "token_classify" one for each token.
    """

    task: PoolingTask = "embed"
    dimensions: int | None = None  # leading components of an embedding that was trained for it (Matryoshka)
    activation: bool | None = None  # False: scores before softmax, embeddings before scaling; None: as the model does
    second: int = 0  # where the second text of a pair begins: token type 1 from there on; 0 = one text

    def __post_init__(self) -> None:
        if self.task not in POOLING_TASKS:
            raise InvalidParam("task", self.task, f"one of {', '.join(POOLING_TASKS)}")
        if self.dimensions is not None:
            _integer("dimensions", self.dimensions, 1, MAX_DIMENSIONS)
        if self.activation not in (None, True, False):
            raise InvalidParam("activation", self.activation, "True, False or None")
        _integer("second", self.second, 0, MAX_TOKENS)


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


def _number(name: str, value: object, low: float, high: float) -> None:
    number = value if isinstance(value, (int, float)) and not isinstance(value, bool) else math.nan
    if not low <= number <= high:  # no limit lets nan or an infinity through
        raise InvalidParam(name, value, f"a number from {low} up to {high}")
