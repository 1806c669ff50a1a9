"""Seams of the worker: platform, buffers, attention, models, sampling, executors.

Tensors are named in annotations only; this module does not import torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

import msgspec

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from lmkit.contracts.checkpoint import Checkpoint
    from lmkit.contracts.config import EngineConfig
    from lmkit.contracts.device import DeviceInfo
    from lmkit.contracts.model import AttnNeed, KVSpec, LinearSpec, ModelInfo, NormKind, WeightRule
    from lmkit.contracts.operators import RowOps
    from lmkit.contracts.params import SamplingParams
    from lmkit.contracts.scheduling import SchedLimits
    from lmkit.contracts.wire import GrammarMasks, StepPlan, StepResult


# ---------------------------------------------------------------------------------------------------- platform


class Buffer(Protocol):
    """A host array with a device twin. On CPU both are one tensor and `push` does nothing."""

    host: Tensor  # written by the planner, through numpy views or slices
    device: Tensor  # read by kernels

    def push(self, n: int) -> Tensor:
        """Copy the first `n` rows to the device (asynchronously where possible); returns that device slice."""
        ...


class Event(Protocol):
    """A point in the device's queue of work."""

    def record(self) -> None: ...
    def query(self) -> bool: ...
    def wait(self) -> None: ...


@dataclass(frozen=True, slots=True)
class StepLimits:
    """Upper bounds of one step: buffers are allocated once from these."""

    max_rows: int
    max_tokens: int
    max_blocks_per_row: int
    max_length: int


class Graphs(Protocol):
    """Captured graphs of the forward pass; the null object runs the model directly."""

    def run(self, forward: Callable[[StepInputs], Tensor], x: StepInputs) -> Tensor: ...


class Collectives(Protocol):
    """Communication among ranks; the null object (one rank) returns its input."""

    rank: int
    size: int

    def all_reduce(self, x: Tensor) -> Tensor: ...
    def all_gather(self, x: Tensor, dim: int) -> Tensor: ...
    def broadcast(self, x: Tensor, src: int) -> Tensor: ...


class Platform(Protocol):
    """A kind of device. One object per process; passed to whoever needs it, never a global."""

    name: str
    device_type: str

    def worker_env(self, config: EngineConfig, rank: int) -> dict[str, str]:
        """Environment of a worker process; set there before torch is imported, only there (thread counts, affinity)."""
        ...

    def bind(self, rank: int, threads: int | None = None) -> torch.device:
        """In the worker: select the device, memory policy and thread pool. `threads`: how many the user wants."""
        ...

    def free_memory(self) -> int:
        """Bytes that can still be allocated on the device."""
        ...

    def defaults(self, model: ModelInfo, device: DeviceInfo) -> dict[str, object]:
        """Suggested configuration values ("cache.block_size": 16); values of the user win."""
        ...

    def buffer(self, shape: tuple[int, ...], dtype: torch.dtype) -> Buffer: ...
    def event(self) -> Event: ...
    def graphs(self, limits: StepLimits) -> Graphs: ...
    def collectives(self, rank: int, size: int) -> Collectives: ...


# --------------------------------------------------------------------------------------------------- attention


@dataclass(slots=True)
class AttnBatch:
    """What a planner reads: one per KV group and step. Host tensors are valid until the next step."""

    query_start: Buffer  # [R + 1] int32, cumulative query lengths
    seq_len: Buffer  # [R] int32, KV length including this step
    table: Buffer  # [R, max_blocks] int32
    slots: Buffer  # [T] int64 = block * block_size + offset; -1 = do not write
    num_rows: int
    num_tokens: int
    max_query: int
    max_seq: int
    num_decode_rows: int  # rows [0, num_decode_rows) have query length 1 (or 1 + drafts)


class AttnPlan(Protocol):
    """Made once per step and KV group; read by every layer of the group."""

    slots: Tensor  # [T] int64 on the device


class AttnPlanner(Protocol):
    capture: Literal["none", "decode", "any"]  # what may be inside a captured graph

    def plan(self, batch: AttnBatch) -> AttnPlan:
        """Host work happens only here. May keep references to the batch's buffers until the next `plan`."""
        ...


class AttentionBackend(Protocol):
    """Paged attention. Contract: ARCHITECTURE 6.2 and `lmkit_testing.AttentionConformance`.

    1. In each layer write_kv for all rows of the step completes before any row is read.
    2. Prefill and decode rows are mixed in one call.
    3. Slot -1 is not written; rows of length 0 are legal.
    4. `out` is given; `forward` allocates nothing on the fast path.
    5. One object serves all layers and planners of a worker; the planners are made before the first `write_kv`.
    6. q, k and v are views with any strides, parts of what a model computed them in; `out` has no gaps.
    """

    name: str

    def can_run(self, need: AttnNeed, device: DeviceInfo) -> str | None:
        """A reason why not, or None."""
        ...

    def block_sizes(self, need: AttnNeed) -> tuple[int, ...]:
        """Supported block sizes, preferred first."""
        ...

    def kv_shape(self, need: AttnNeed, num_blocks: int) -> tuple[int, ...]:
        """Shape of one layer's KV tensor, in need.kv_dtype."""
        ...

    def planner(self, need: AttnNeed, limits: StepLimits, platform: Platform) -> AttnPlanner: ...

    def write_kv(self, k: Tensor, v: Tensor, kv: Tensor, slots: Tensor) -> None:
        """k, v [T, num_kv_heads, head_dim] into the layer's KV tensor at `slots` [T]."""
        ...

    def forward(
        self, q: Tensor, kv: Tensor, plan: AttnPlan, scale: float, out: Tensor, sinks: Tensor | None = None
    ) -> None:
        """q [T, num_q_heads, head_dim], out [T, num_q_heads, v_head_dim]. `scale` multiplies q @ k.

        `sinks` [num_q_heads] float32 is passed exactly when the need has sinks: a logit that takes part in each
        head's softmax and has no value. A backend that does not declare the feature need not accept the argument.
        """
        ...


@runtime_checkable
class RotatingAttention(AttentionBackend, Protocol):
    """A backend that turns queries and keys as it writes: one pass over them instead of several."""

    def rotate_write(
        self, q: Tensor, k: Tensor, v: Tensor, kv: Tensor, slots: Tensor, cos: Tensor, sin: Tensor, interleaved: bool
    ) -> None:
        """RowOps.rotate of q and of k, in place, then write_kv: the same values in all three."""
        ...


# ------------------------------------------------------------------------------------------------------ models


@dataclass(slots=True)
class StateBatch:
    """The recurrent state of a step's rows, made once per step. Layers read it and leave it as it is after the step.

    Each row has one slot in the tensors of every recurrent layer. The state of a row that begins is zero.
    """

    tensors: Sequence[Mapping[str, Tensor]]  # per layer: name -> [slots, *shape of one row], as LayerInfo.state says
    slots: Tensor  # [R] int64
    query_start: Tensor  # [R + 1] int32, cumulative numbers of tokens
    num_decode_rows: int  # rows [0, num_decode_rows) have one token each
    prompts: Sequence[tuple[int, int, int]]  # slot, first token and end in the step, of each of the other rows


@dataclass(slots=True)
class StepInputs:
    """Argument of Model.forward; nothing is fetched from globals."""

    token_ids: Tensor  # [T] int64
    positions: Tensor  # [T] int64
    attn: Sequence[AttnPlan]  # per KV group of attention layers
    kv: Sequence[Tensor]  # per layer; empty where it has no attention
    logits_rows: Tensor  # [S] int64 rows of hidden states that need logits, increasing
    capture: bool = False  # one token per row, and every planner allows it: may run as a captured graph
    adapters: Any = None
    embeds: Tensor | None = None
    token_types: Tensor | None = None  # [T] int64: 1 in the second text of a pair; None: 0 everywhere
    state: StateBatch | None = None  # of models with recurrent layers
    only_logits: bool = False  # hidden states of no other rows than `logits_rows` are read, and S < T


class Model(Protocol):
    def forward(self, x: StepInputs) -> Tensor:
        """Hidden states [T, D] after the final norm; a pure function of x and weights, KV written through x.

        With `x.only_logits` a model may return those of `x.logits_rows` alone: [S, D].
        """
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """The head: [S, D] -> [S, V], float32 or the model's dtype.

        Of a pooling model: [S, D] -> [S, size before dense modules], on hidden states or what they were reduced to.
        """
        ...


class BuildContext(Protocol):
    """What a model is built with. Implemented by the library lmkit-layers; modules are made on the meta device."""

    info: ModelInfo
    dtype: torch.dtype
    tp_rank: int
    tp_size: int
    rows: RowOps

    def linear(self, spec: LinearSpec) -> nn.Module: ...
    def experts(self, up: LinearSpec, down: LinearSpec, act: str) -> nn.Module:
        """A module called as experts(x [T, D], ids [T, K], weights [T, K]) -> [T, D]; see ExpertKernel."""
        ...

    def attention(self, layer: int, scale: float) -> nn.Module:
        """A module called as attn(q, k, v, x: StepInputs) with q [T, Hq, D], k and v [T, Hkv, D].

        Where its `rotates` is true, it turns q and k (in place) by `angles`, if these come as a fifth argument: the
        cos, sin and interleaved of RowOps.rotate.
        """
        ...

    def norm(self, size: int, eps: float, kind: NormKind = "rms") -> nn.Module:
        """norm(x), or norm.add(h, delta) for `h += delta` in place and the norm of the sum."""
        ...

    def embedding(self, num: int, size: int) -> nn.Module: ...
    def rotary(self, head_dim: int, rope: Mapping[str, object]) -> nn.Module: ...


class Architecture(Protocol):
    """A model family. Its module is torch-free; `build` imports torch."""

    names: tuple[str, ...]

    def describe(self, config: Mapping[str, object]) -> ModelInfo:
        """Every key read is declared; an unsupported value raises UnsupportedModel(key, value)."""
        ...

    def build(self, info: ModelInfo, ctx: BuildContext) -> Model: ...

    def weights(self, info: ModelInfo) -> list[WeightRule]: ...


class Loader(Protocol):
    """Reads one checkpoint format."""

    def tensors(self, checkpoint: Checkpoint) -> Sequence[TensorEntry]:
        """Headers only. Raises CheckpointError naming the file when it is damaged."""
        ...

    def read(self, entry: TensorEntry) -> Tensor:
        """A memory-mapped CPU tensor where the format allows it. It may become a parameter as it is."""
        ...

    def release(self) -> None:
        """What was read so far has been packed or copied, or is read seldom: memory that maps a file may go."""
        ...


class TensorEntry(msgspec.Struct, frozen=True):
    """One tensor of a checkpoint, from its header."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    nbytes: int
    file: str


# --------------------------------------------------------------------------------------------------- sampling


@dataclass(slots=True)
class SampleContext:
    """What a logits processor may read."""

    slots: Sequence[int]  # slot of each row of the logits
    positions: Sequence[int]  # position of the token being drawn
    tokens: Callable[[int], Sequence[int]]  # slot -> all tokens so far (prompt + output)


class LogitsProcessor(Protocol):
    stage: Literal["logits", "probs"]
    keeps_argmax: bool  # may be skipped for greedy rows
    options: type | None  # dataclass that validates params.extra[name]

    def add(self, slot: int, params: SamplingParams, prompt: Sequence[int]) -> bool:
        """False = not interested in this row."""
        ...

    def remove(self, slot: int) -> None: ...
    def apply(self, logits: Tensor, ctx: SampleContext) -> None:
        """In place; logits [S, V] float32."""
        ...


# -------------------------------------------------------------------------------------------------- executors


@dataclass(frozen=True, slots=True)
class WorkerFacts:
    """What the engine learns from a worker after loading; over ranks: the minimum, and all warnings."""

    free_kv_bytes: int  # what may be spent on KV blocks
    weight_bytes: int
    activation_bytes: int  # reserved for one step at the limits
    kv_specs: tuple[KVSpec, ...]
    load_seconds: float = 0.0  # packing included
    pack_seconds: float = 0.0
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class KVConfig:
    """Number of blocks per KV group, block 0 (the null block, never written) included."""

    specs: tuple[KVSpec, ...]
    num_blocks: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return sum(s.bytes_per_block * n for s, n in zip(self.specs, self.num_blocks, strict=True))

    @property
    def num_tokens(self) -> int:
        """Tokens the cache holds at once: those of the smallest full-attention group, else of the smallest group."""
        held = [(s.window, (n - 1) * s.block_size) for s, n in zip(self.specs, self.num_blocks, strict=True)]
        return min([n for window, n in held if window is None] or [n for _, n in held])


class Failure(msgspec.Struct, frozen=True):
    """A rank died or raised outside a request. Reported exactly once."""

    rank: int
    message: str


class Control(msgspec.Struct, tag=True):
    """Base of the typed commands to workers."""


class LoadAdapter(Control):
    name: str
    path: str


class DropAdapter(Control):
    name: str


class ForgetRows(Control):
    """Forget all rows and all steps in flight; what done steps wrote to the cache stays. Sent after a failed step."""


class ResetCache(Control):
    """Forget all rows and all steps in flight; no KV content is valid any more. Sent when ForgetRows was refused."""


class Reply(msgspec.Struct):
    ok: bool
    message: str = ""


class Executor(Protocol):
    """Runs the workers. `depth` steps may be in flight."""

    depth: int

    def start(self) -> WorkerFacts: ...
    def configure_kv(self, kv: KVConfig, limits: SchedLimits) -> None:
        """Reserves the blocks, and what steps within `limits` need. Called once, after `start`."""
        ...

    def forward(self, plan: StepPlan) -> None:
        """Returns at once (uniproc on CPU: after the pass). A plan without rows is a diff to apply."""
        ...

    def sample(self, step: int, masks: GrammarMasks | None) -> Future[StepResult]:
        """Called once after each `forward`, in order. The future carries what the step raised.

        Then the engine sends ForgetRows and computes the rows again, one by one, to learn which is at fault; or, when
        that is refused, ResetCache, and all running requests end. Who cannot go on after that reports a Failure.
        """
        ...

    def control(self, command: Control) -> list[Reply]: ...
    def inspect_adapter(self, path: str) -> str:
        """The digest of what is in the folder of an adapter, in 16 hex digits. From any thread, also during a step.

        Raises CheckpointError, UnsupportedModel or WeightMismatch for one that does not fit the model, which is known
        from its headers: nothing has been loaded.
        """
        ...

    def on_failure(self, callback: Callable[[Failure], None]) -> None:
        """`callback` is called once, from any thread, when steps can no longer be run: the engine then ends."""
        ...

    def close(self) -> None:
        """Idempotent, also after a failure."""
        ...


class Progress(Protocol):
    """Where long work reports: `phase` names it ("load weights"), `done` and `total` are in `unit`."""

    def __call__(self, phase: str, done: int, total: int, unit: str = "B") -> None: ...


class Worker(Protocol):
    """The same object in all executors."""

    def load(self) -> WorkerFacts: ...
    def configure_kv(self, kv: KVConfig, limits: SchedLimits) -> None: ...
    def forward(self, plan: StepPlan) -> None: ...
    def sample(self, step: int, masks: GrammarMasks | None) -> StepResult | None: ...
    def control(self, command: Control) -> Reply: ...
    def inspect_adapter(self, path: str) -> str:
        """As of Executor."""
        ...

    def close(self) -> None: ...


@dataclass(slots=True)
class LoadedModel:
    """A model ready to run, with the facts of its loading."""

    model: Model
    info: ModelInfo
    weight_bytes: int
    warnings: tuple[str, ...] = field(default_factory=tuple)
    pack_seconds: float = 0.0  # spent on laying weights out as kernels want them
    dense: nn.Module | None = None  # what follows the head of a pooling model
    attention: AttentionBackend | None = None  # the object the model's layers call: makes planners and KV tensors
    rows: RowOps | None = None  # that of the model's layers; None: plain torch
