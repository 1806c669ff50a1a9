"""Request: the scheduler's view of one request. Only scheduling/ writes it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from lmkit.api import FinishReason, Gate, SamplingParams

if TYPE_CHECKING:
    from lmkit.scheduling.table import BlockTable


@dataclass(slots=True)
class Request:
    """Made by engine.intake from an EngineRequest."""

    id: str
    params: SamplingParams
    num_prompt_tokens: int
    tokens: list[int]  # prompt + accepted output
    priority: int = 0
    arrival: float = 0.0
    order: int = 0  # admission order, given by the scheduler at add
    adapter: str | None = None
    num_computed: int = 0  # KV positions computed or scheduled to be (optimistic)
    num_inflight: int = 0  # tokens sampled on the device and not yet seen here
    num_unverified: int = 0  # drafts being verified on the device
    num_cached: int = 0  # prompt tokens found in the prefix cache at first admission
    drafts: list[int] = field(default_factory=list)
    epoch: int = 0  # +1 at each preemption
    table: BlockTable | None = None  # owns blocks; None while waiting
    root_hash: bytes = b""
    block_hashes: list[bytes] = field(default_factory=list)
    gates: list[Gate] = field(default_factory=list)
    finish: FinishReason | None = None

    @property
    def num_output(self) -> int:
        return len(self.tokens) - self.num_prompt_tokens
