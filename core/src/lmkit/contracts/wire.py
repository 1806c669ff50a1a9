"""What crosses a process: one struct type per direction. Encoded with msgspec (MessagePack); no code travels as data.

EngineRequest   front end -> engine          TokenEvent   engine -> front end
StepPlan        scheduler -> executor        StepResult   executor -> scheduler
"""

from __future__ import annotations

from typing import Literal

import msgspec

from lmkit.contracts.errors import ErrorInfo
from lmkit.contracts.params import Beams, PoolingParams, SamplingParams

FinishReason = Literal["stop", "length", "abort", "error"]


class MediaItem(msgspec.Struct, frozen=True):
    """An image, sound or video of a request; its hash enters the block hash."""

    kind: str
    hash: bytes
    start: int  # first prompt position it occupies
    num_tokens: int


class EngineRequest(msgspec.Struct):
    """A validated request. Set by the text side; read by `engine.intake`."""

    id: str
    token_ids: list[int]
    params: SamplingParams
    priority: int = 0  # smaller is sooner
    arrival: float = 0.0  # seconds, monotonic clock of the front end
    adapter: str | None = None
    cache_salt: str | None = None
    tenant: str = ""  # on whose account it is
    media: list[MediaItem] = []
    pooling: PoolingParams | None = None  # then nothing is sampled: the answer is `TokenEvent.pooled`
    beams: Beams | None = None  # then its outputs are searched for, and come in one event
    resume: bool = False  # after a death of the engine another one goes on with it
    num_output: int = 0  # how many of `token_ids`, at their end, were generated before


class NewRow(msgspec.Struct):
    """All a worker ever needs to know of a request. Also used to resume a preempted one."""

    id: str
    epoch: int
    tokens: list[int]
    num_prompt_tokens: int
    blocks: list[list[int]]  # per KV group
    num_computed: int
    params: SamplingParams
    adapter: str | None = None
    pooling: PoolingParams | None = None


class RowWork(msgspec.Struct):
    """What one row does in one step."""

    id: str
    epoch: int
    start: int  # first position computed
    num_tokens: int  # positions computed, drafts included
    drafts: list[int]  # [-1] * k when they live on the device
    sample: bool  # the row reaches its last token, so it yields a token
    parents: list[int] = []  # the draft that each draft follows, -1: the last known token; []: the one before it


class StepPlan(msgspec.Struct):
    """A diff, applied in this order: saves, gone, new, grown, loads, copies, zero; then `rows` are computed."""

    step: int
    gone: list[str] = []  # rows to forget, each exactly once
    new: list[NewRow] = []
    grown: list[tuple[str, list[list[int]]]] = []  # id, block ids per KV group to append
    copies: list[tuple[int, int, int]] = []  # group, source block, destination block
    zero: list[tuple[int, int]] = []  # group, block
    saves: list[tuple[int, int]] = []  # group, block: read before the step, for a connector
    loads: list[tuple[int, int, bytes]] = []  # group, block, content
    rows: list[RowWork] = []  # batch order, the same on every rank


class TokenLogprob(msgspec.Struct, array_like=True):
    """The log-probability of one token and of the most likely alternatives, from the raw (unprocessed) logits."""

    token: int
    logprob: float
    rank: int  # 1 = most likely
    top: list[tuple[int, float]]  # most likely first


class RowLogprobs(msgspec.Struct, array_like=True):
    """Logprobs of one row of a step: sampled tokens, and prompt positions computed in this step."""

    row: int  # index into StepPlan.rows
    tokens: list[TokenLogprob] = []  # one per sampled token
    prompt_start: int = 0  # prompt position of the first entry of `prompt` (position 0 has none)
    prompt: list[TokenLogprob] = []


class Pooled(msgspec.Struct):
    """Vectors of one request: float32, little-endian, row by row."""

    data: bytes
    shape: tuple[int, ...]  # (size,), or (tokens, size) of a token task


class StepResult(msgspec.Struct):
    """Same order as plan.rows."""

    step: int
    tokens: list[list[int]]  # [] for a row that did not sample
    drafts: list[list[int]] = []  # proposals for the next step; [] when there is no proposer
    parents: list[list[int]] = []  # as in RowWork, of each row's drafts; [] when none are a tree
    logprobs: list[RowLogprobs] = []  # only rows that asked
    pooled: list[tuple[int, Pooled]] = []  # row index, answer; of rows whose last prompt position was computed
    faults: list[tuple[int, str]] = []  # row index, reason; that request fails, the engine lives
    saved: list[bytes] = []  # content of plan.saves
    undrawn: list[tuple[int, str]] = []  # the same for rows that fail by their own parameters: the model was right
    compiled: list[str] = []  # kernels that the step had to wait for


class Started(msgspec.Struct, array_like=True):
    """How a request came to its first token, and to the first one after each preemption. Times are seconds."""

    queued: float = 0.0  # before its first step
    prefill: float = 0.0  # from there to its first token
    stalled: float = 0.0  # in the queue after preemptions
    num_chunks: int = 0  # steps that computed positions of its prompt
    num_preempted: int = 0


class TokenEvent(msgspec.Struct, omit_defaults=True):
    """News of one request: new tokens, and at the end the reason. Exactly one event per request carries `finish`."""

    id: str
    tokens: list[int] = []
    finish: FinishReason | None = None
    stop_token: int | None = None  # the eos or stop id that ended it; it is the last of `tokens`
    logprobs: list[TokenLogprob] = []  # one per token when asked for
    prompt_logprobs: list[TokenLogprob] = []  # positions 1.. of the prompt, in order, over the first events
    num_cached: int | None = None  # prompt tokens found in the prefix cache; first event only
    pooled: Pooled | None = None  # of a pooling request, with its finish
    others: list[TokenEvent] = []  # of a search: its next best outputs
    error: ErrorInfo | None = None
    started: Started | None = None  # with the first tokens, and with the first ones after a preemption
    drafts: tuple[int, int] | None = None  # how many were verified for `tokens`, and how many of them were right


class GrammarMasks(msgspec.Struct):
    """Allowed-token bit masks: mask i belongs to row `rows[i]` of plan.rows; a row with k drafts has k + 1, in order.

    `bits` holds the masks one after the other, ceil(V / 32) little-endian int32 words each; bit t % 32 of word t // 32
    is 1 when token t is allowed.
    """

    rows: list[int]
    bits: bytes


class SchedStats(msgspec.Struct):
    """Gauges and counters of the scheduler. Counters only grow."""

    num_waiting: int = 0
    num_running: int = 0
    num_blocks: int = 0  # usable blocks, all groups
    num_free_blocks: int = 0  # not referenced by any request (cached ones included)
    num_steps: int = 0
    num_preempted: int = 0
    num_finished: int = 0
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    num_cached_tokens: int = 0  # prompt tokens served from the prefix cache
    num_drafts: int = 0  # tokens that were guessed or forced, and verified
    num_accepted: int = 0  # of these, that were drawn
    num_cache_queries: int = 0  # prompt tokens looked up
