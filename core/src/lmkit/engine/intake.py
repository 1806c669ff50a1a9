"""From EngineRequest to Request. Only what passes here reaches the scheduler; nothing that passes is ignored.

The front end validates too, and says it in its own dialect; this is the gate that counts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from lmkit.api import (
    Admitted,
    CompiledGrammar,
    EngineRequest,
    ErrorInfo,
    Gate,
    Grammar,
    GrammarError,
    GrammarMasks,
    InvalidParam,
    PoolerInfo,
    PoolingParams,
    RequestTooLarge,
    SamplingParams,
    StepPlan,
    StepResult,
    StructuredOutput,
    UnsupportedTask,
    guard,
)
from lmkit.scheduling.hashes import root_hash
from lmkit.scheduling.request import Request


class NoStructuredOutput:
    """The null object: an engine that binds no output."""

    broken: Sequence[tuple[str, ErrorInfo]] = ()

    def gate(self, request: Request) -> Gate:
        grammar = request.params.grammar
        raise InvalidParam(
            "grammar",
            grammar.kind if grammar else None,
            "an engine with structured output, and none is installed",
            fix="leave out the constraint, or install a plugin of kind structured_output",
        )

    def concerns(self, plan: StepPlan) -> bool:
        return False

    def fill(self, plan: StepPlan) -> GrammarMasks | None:
        return None

    def propose(self, plan: StepPlan, result: StepResult) -> None:
        """Nothing must follow."""

    def release(self, ids: Iterable[str]) -> None:
        """There is nothing to release."""

    def compile(self, grammar: Grammar, seconds: float) -> CompiledGrammar:
        raise GrammarError("no structured output is installed", fix="install a plugin of kind structured_output")

    def close(self) -> None:
        """There is nothing to end."""


@dataclass(frozen=True, slots=True)
class Intake:
    """What this engine can take. Set by engine assembly."""

    vocab_size: int
    max_length: int  # prompt + output of one request; what model and memory allow
    fingerprint: str = ""  # of model and weights; enters every block hash
    kv_dtype: str = ""
    adapters: Mapping[str, Callable[[], Gate | None]] = field(
        default_factory=dict
    )  # by name; the gate opens when loaded
    processors: Mapping[str, type | None] = field(default_factory=dict)  # keys of params.extra and what validates them
    media: frozenset[str] = frozenset()  # kinds of media the model reads
    grammars: StructuredOutput = field(default_factory=NoStructuredOutput)
    pooler: PoolerInfo | None = None  # None: it generates

    def admit(self, request: EngineRequest) -> Request:
        """Raises RequestError (InvalidParam, RequestTooLarge) naming field, value and limit."""
        check_task(self.pooler, request)
        params = self._fit(request)
        self._check_tokens(request.token_ids, params)
        self._check_extra(params)
        gates = []
        if request.adapter is not None:
            if request.adapter not in self.adapters:
                known = ", ".join(sorted(self.adapters)) or "none"
                raise InvalidParam("adapter", request.adapter, f"one of the loaded adapters ({known})")
            gates.append(self.adapters[request.adapter]())
        for item in request.media:
            if item.kind not in self.media:
                raise InvalidParam(
                    "media", item.kind, f"a kind the model reads ({', '.join(sorted(self.media)) or 'none'})"
                )
        if request.beams is not None:
            raise InvalidParam("beams", request.beams, "an engine that searches, and this one does not")
        admitted = Request(
            id=request.id,
            params=params,
            num_prompt_tokens=len(request.token_ids) - request.num_output,
            tokens=list(request.token_ids),
            priority=request.priority,
            arrival=request.arrival,
            tenant=request.tenant,
            adapter=request.adapter,
            pooling=request.pooling,
            every_position=request.pooling is not None and not self._last_only(request.pooling),
            salt=request.cache_salt,
            media=tuple(request.media),
            gates=[gate for gate in gates if gate is not None],
        )
        admitted.root_hash = self.root(admitted)
        if params.grammar is not None or (params.thinking is not None and params.thinking.budget is not None):
            admitted.gates.append(self.grammars.gate(admitted))
        return admitted

    def root(self, r: Admitted) -> bytes:
        """What names of its KV content begin with."""
        return root_hash(self.fingerprint, self.kv_dtype, r.adapter, r.salt)

    def _last_only(self, pooling: PoolingParams) -> bool:
        """Whether the last hidden state is enough, so that the others may come from the prefix cache."""
        if self.pooler is None or pooling.task.startswith("token_"):
            return False
        return self.pooler.reductions == ("last",)

    def _fit(self, request: EngineRequest) -> SamplingParams:
        """Prompt and output within max_length. A missing max_tokens becomes what is left."""
        n, params = len(request.token_ids) - request.num_output, request.params
        if n < 1 or request.num_output < 0:
            raise InvalidParam("prompt", [], "at least one token")
        room = self.max_length - n
        if room < (request.pooling is None):
            what = "prompt and output together have" if request.pooling is None else "the model reads"
            raise RequestTooLarge(
                "prompt",
                n,
                self.max_length,
                f"the prompt has {n} tokens; {what} at most {self.max_length}",
                fix="shorten the prompt",
            )
        if request.pooling is not None:
            return replace(params, max_tokens=1)
        if params.max_tokens is None:
            return replace(params, max_tokens=self.max_length - n)
        if n + params.max_tokens > self.max_length:
            raise RequestTooLarge(
                "max_tokens",
                params.max_tokens,
                self.max_length - n,
                f"the prompt has {n} tokens and max_tokens is {params.max_tokens}, together {n + params.max_tokens}; "
                f"at most {self.max_length} are possible",
                fix=f"lower max_tokens to {self.max_length - n} or less",
            )
        return params

    def _check_tokens(self, token_ids: list[int], params: SamplingParams) -> None:
        """Every id that reaches the model or the sampler is an int within the vocabulary."""
        limit = f"token ids from 0 to {self.vocab_size - 1}"
        if set(map(type, token_ids)) != {int}:
            bad = next(t for t in token_ids if type(t) is not int)
            raise InvalidParam("prompt", bad, limit)
        for name, ids in (
            ("prompt", token_ids),
            ("stop_token_ids", params.stop_token_ids),
            ("logit_bias", [token for token, _ in params.logit_bias]),
        ):
            if ids and not 0 <= min(ids) <= max(ids) < self.vocab_size:
                raise InvalidParam(name, next(t for t in ids if not 0 <= t < self.vocab_size), limit)

    def _check_extra(self, params: SamplingParams) -> None:
        """Each key of `extra` belongs to a logits processor, whose dataclass validates the value."""
        for key, value in params.extra.items():
            if key not in self.processors:
                known = ", ".join(sorted(self.processors)) or "none"
                raise InvalidParam(f"extra.{key}", value, f"a key that a logits processor claims ({known})")
            options = self.processors[key]
            if options is None:
                continue
            if not isinstance(value, Mapping):
                raise InvalidParam(f"extra.{key}", value, "a mapping of options")
            try:
                with guard(f"logits processor {key!r}", "its options", passes=(TypeError, ValueError)):
                    options(**value)
            except (TypeError, ValueError) as e:
                raise InvalidParam(f"extra.{key}", value, f"valid options: {e}") from e


MAX_VECTORS = 64 << 20  # bytes of one answer; more must not cross the engine's socket


def check_task(pooler: PoolerInfo | None, request: EngineRequest) -> None:
    """Whether a model with `pooler` (None: it generates) can do what is asked. Raises RequestError."""
    pooling = request.pooling
    offered = ("generate",) if pooler is None else pooler.tasks
    task = "generate" if pooling is None else pooling.task
    if task not in offered:
        raise UnsupportedTask(task, offered)
    if pooler is None or pooling is None:
        return
    if pooling.dimensions is not None and (pooling.dimensions > pooler.size or "embed" not in task):
        raise InvalidParam("dimensions", pooling.dimensions, f"at most {pooler.size}, for embeddings only")
    n = len(request.token_ids)
    if pooling.second > n:
        raise InvalidParam("second", pooling.second, f"a position of the prompt, which has {n} tokens")
    nbytes = 4 * pooler.size * n
    if task.startswith("token_") and nbytes > MAX_VECTORS:
        limit = MAX_VECTORS // (4 * pooler.size)
        raise RequestTooLarge(
            "prompt", n, limit, f"{n} vectors of {pooler.size} numbers are too many", fix="shorten it"
        )
