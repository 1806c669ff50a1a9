"""Seams of the engine thread: scheduling, gates, grammars. Plain Python, no torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from lmkit.contracts.params import Grammar, PoolingParams, SamplingParams
from lmkit.contracts.wire import MediaItem, SchedStats, StepPlan, StepResult, TokenEvent

if TYPE_CHECKING:
    import numpy as np

    from lmkit.contracts.errors import ErrorInfo


class RequestView(Protocol):
    """What a policy may read of a request (lmkit's own `Request` has these and more)."""

    @property
    def id(self) -> str: ...
    @property
    def priority(self) -> int:
        """Smaller is sooner."""
        ...

    @property
    def arrival(self) -> float:
        """Seconds, the front end's monotonic clock."""
        ...

    @property
    def order(self) -> int:
        """Counts requests as they enter the engine."""
        ...

    @property
    def num_prompt_tokens(self) -> int: ...
    @property
    def num_output(self) -> int: ...


class OrderPolicy(Protocol):
    """Who goes first. The usual scheduler plugin: two key functions, asked once when a request enters a queue.

    Running requests take blocks in the order of victim_key, from those with the largest. Among equal keys, the
    order of `add` decides.
    """

    def admit_key(self, r: RequestView) -> tuple:
        """Smallest is admitted first."""
        ...

    def victim_key(self, r: RequestView) -> tuple:
        """Largest is preempted first; must invert the admission order, so that the oldest always finishes."""
        ...


class Gate(Protocol):
    """A reason why a waiting request may not start yet."""

    name: str  # "grammar", "remote_kv", "adapter"

    def ready(self) -> bool:
        """Polled at admission; never blocks."""
        ...

    def error(self) -> ErrorInfo | None:
        """A failed gate fails the request."""
        ...


@dataclass(slots=True, eq=False)
class Admitted:
    """A request that the engine has let in: what a scheduler is given of it. It may write `tokens`, its own list."""

    id: str
    params: SamplingParams
    num_prompt_tokens: int
    tokens: list[int]  # prompt + accepted output
    priority: int = 0
    arrival: float = 0.0
    adapter: str | None = None
    pooling: PoolingParams | None = None  # then the prompt is all there is
    every_position: bool = False  # its vectors need all hidden states: no prefix is taken from the cache
    root_hash: bytes = b""  # parent of the first block's hash
    media: tuple[MediaItem, ...] = ()
    gates: list[Gate] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class SchedLimits:
    """What the scheduler must respect, and workers make room for. Set by engine assembly."""

    max_tokens: int  # token budget of a step
    max_rows: int
    max_length: int  # prompt + output of one request
    eos_token_ids: tuple[int, ...] = ()
    prefix_cache: bool = True
    whole_prompts: bool = False  # a prompt is computed in one step: its tokens see those that follow
    lookahead: int = 0  # draft slots reserved per row
    depth: int = 1  # steps in flight
    watermark: float = 0.01  # share of blocks kept free at admission, against thrashing
    max_waiting: int = 1024


class Scheduler(Protocol):
    """Decides each step. A plugin's own one is constructed as target(limits: SchedLimits, kv: KVConfig, **options)."""

    def add(self, r: Admitted) -> None:
        """Raises RequestTooLarge when it cannot fit alone, EngineBusy when the queue is full."""
        ...

    def abort(self, ids: Iterable[str]) -> None:
        """Idempotent, legal at any moment. No event follows."""
        ...

    def schedule(self) -> StepPlan: ...
    def update(self, plan: StepPlan, result: StepResult) -> list[TokenEvent]: ...
    def fail_running(self, error: ErrorInfo) -> list[TokenEvent]:
        """After a lost step: end all running requests, forget all cached content. Workers have forgotten all rows."""
        ...

    def retry_running(self, plan: StepPlan, error: ErrorInfo) -> list[TokenEvent]:
        """After `plan` was lost: compute again what was running; only a row that fails alone ends, with `error`.

        Nothing that this step or a later one wrote may be found any more. Workers have forgotten all rows. Optional:
        without it `fail_running` is called.
        """
        ...

    def has_work(self) -> bool: ...
    def stats(self) -> SchedStats: ...
    def check(self) -> None:
        """All invariants; AssertionError naming the broken one."""
        ...


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The tokens of a model as bytes. Set by engine assembly; read by grammar backends."""

    pieces: Sequence[bytes]  # of each id; control tokens as their text, b"" for ids without text
    special_ids: frozenset[int]  # control tokens: a grammar never takes them for text
    eos_token_ids: tuple[int, ...]
    size: int  # columns of the model's logits, >= len(pieces)
    encode: Callable[[str], list[int]] | None = None  # as the model would write it; None where it is not known


class Matcher(Protocol):
    """The state of one constrained text. Not thread-safe. End tokens are none of its business."""

    def accept(self, ids: Sequence[int]) -> int:
        """Number accepted; the state moves by exactly that many."""
        ...

    def rollback(self, n: int) -> None:
        """Takes back the last `n` accepted tokens."""
        ...

    def fill(self, row: np.ndarray) -> None:
        """`row`: int32 [ceil(size / 32)], contiguous; bit t % 32 of word t // 32 becomes 1 where token t may follow.

        Bits of end tokens are left as chance will have it. Raises GrammarError when the work for it is too much.
        """
        ...

    def forced(self) -> Sequence[int]:
        """The next tokens, as far as `fill` would allow no other at each of them; [] also where nobody knows."""
        ...

    @property
    def complete(self) -> bool:
        """The text so far is a whole sentence: it may end here."""
        ...

    @property
    def exhausted(self) -> bool:
        """Nothing may follow but the end."""
        ...


class CompiledGrammar(Protocol):
    @property
    def nbytes(self) -> int:
        """What it keeps in memory, roughly."""
        ...

    def matcher(self) -> Matcher:
        """A new text; quick."""
        ...


class GrammarBackend(Protocol):
    """Compiles constraints. Constructed as target(vocabulary, **options), in the engine and in a process for compiling.

    `compile` runs in that process, under limits of time and memory; `load` in the engine, with what `compile` returned,
    and before that in that process, too, where a short walk over the masks shows what it takes and that it works.
    """

    kinds: frozenset[str]  # Grammar.kind values it compiles; as in the spec

    def compile(self, grammar: Grammar) -> bytes:
        """Raises GrammarError with the reason. What cannot be enforced to the letter is refused, never ignored."""
        ...

    def load(self, compiled: bytes) -> CompiledGrammar:
        """Quick, and thread-safe."""
        ...
