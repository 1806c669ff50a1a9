"""Seams of the engine thread: requests, limits, gates, compiled grammars. Plain Python, no torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from lmkit.contracts.params import PoolingParams, SamplingParams
from lmkit.contracts.wire import MediaItem

if TYPE_CHECKING:
    import numpy as np

    from lmkit.contracts.errors import ErrorInfo


class Gate(Protocol):
    """A reason why a waiting request may not start yet."""

    name: str  # "grammar", "remote_kv", "adapter"

    def ready(self) -> bool:
        """Polled at admission; never blocks."""

    def error(self) -> ErrorInfo | None:
        """A failed gate fails the request."""


@dataclass(slots=True, eq=False)
class Admitted:
    """A request that the engine has let in: what a scheduler is given of it. It may write `tokens`, its own list."""

    id: str
    params: SamplingParams
    num_prompt_tokens: int
    tokens: list[int]  # prompt + accepted output
    priority: int = 0
    arrival: float = 0.0
    tenant: str = ""
    adapter: str | None = None
    pooling: PoolingParams | None = None  # then the prompt is all there is
    every_position: bool = False  # its vectors need all hidden states: no prefix is taken from the cache
    salt: str | None = None  # of the prefix cache
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
    apart: bool = False  # these are of different rows: each has all its tokens before its next step
    watermark: float = 0.01  # share of blocks kept free at admission, against thrashing
    max_waiting: int = 1024


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

    def rollback(self, n: int) -> None:
        """Takes back the last `n` accepted tokens."""

    def fill(self, row: np.ndarray) -> None:
        """`row`: int32 [ceil(size / 32)], contiguous; bit t % 32 of word t // 32 becomes 1 where token t may follow.

        Bits of end tokens are left as chance will have it. Raises GrammarError when the work for it is too much.
        """

    def forced(self) -> Sequence[int]:
        """The next tokens, as far as `fill` would allow no other at each of them; [] also where nobody knows."""

    @property
    def complete(self) -> bool:
        """The text so far is a whole sentence: it may end here."""

    @property
    def exhausted(self) -> bool:
        """Nothing may follow but the end."""


class CompiledGrammar(Protocol):
    """A grammar that has been compiled; many rows may follow it at once."""

    @property
    def nbytes(self) -> int:
        """What it keeps in memory, roughly."""

    def matcher(self) -> Matcher:
        """A new text; quick."""
