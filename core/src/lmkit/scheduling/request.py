"""Request: the scheduler's view of one request. Only scheduling/ writes it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from lmkit.api import Admitted, FinishReason, Started
from lmkit.scheduling.groups import NEVER

if TYPE_CHECKING:
    from lmkit.scheduling.table import BlockTable


@dataclass(slots=True, eq=False)
class Request(Admitted):
    """Made by engine.intake from an EngineRequest; what it adds belongs to the scheduler."""

    order: int = 0  # order of `add`: the last resort of every ordering
    admit_key: tuple = ()  # place in the waiting queue
    victim_key: tuple = ()  # place in the running queue
    max_length: int = 0  # prompt + max_tokens
    rest_at: int = NEVER  # with so many tokens it rests in its row until it may go on
    epoch: int = 0  # names one stay on the workers: another one after each preemption, never used twice
    resident: bool = False  # the workers have a row for it
    table: BlockTable | None = None  # owns blocks; None while waiting
    num_computed: int = 0  # KV positions computed or scheduled to be (optimistic)
    num_inflight: int = 0  # tokens sampled on the device and not yet seen here
    num_unverified: int = 0  # drafts being verified on the device
    drafts: list[int] = field(default_factory=list)  # proposals to verify in the next step
    parents: list[int] = field(default_factory=list)  # of these, as in RowWork
    block_hashes: list[bytes] = field(default_factory=list)  # of the leading whole blocks of `tokens`, made on demand
    num_published: int = 0  # leading blocks that were offered to the prefix cache; NEVER: no more will be
    keep_at: list[int] = field(default_factory=list)  # where its recurrent state is copied for others to find
    restored: list[tuple[int, int]] = field(default_factory=list)  # cached blocks to begin with copies of: group, block
    fetched: bool = False  # what a connector has of it has come, in this stay
    num_cached: int = 0  # prompt tokens found in the prefix cache at first admission
    since: float = 0.0  # seconds: when it came into the queue, or left it
    started: Started = field(default_factory=Started)
    num_lost: int = 0  # steps lost with it, and nobody found to be the cause
    num_scored: int = 1  # prompt positions whose logprobs were reported (position 0 has none)
    announced: int = 0  # the epoch in which its latest event was sent
    finish: FinishReason | None = None

    @property
    def held(self) -> BlockTable:
        """The table of a running request."""
        assert self.table is not None, f"request {self.id} holds nothing"
        return self.table

    @property
    def limit(self) -> int:
        """How many tokens it may have by now."""
        return min(self.max_length, self.rest_at)

    @property
    def num_output(self) -> int:
        return len(self.tokens) - self.num_prompt_tokens
