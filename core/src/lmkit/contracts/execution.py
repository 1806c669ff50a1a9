"""Seams of the worker: buffers, what planners and models read of a step, models, messages between engine and workers.

What one kind of plugins implements stands in the kind's file (lmkit.kinds). Tensors are named in annotations only;
this module does not import torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from lmkit.contracts.model import KVSpec

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from lmkit.contracts.model import LinearSpec, ModelInfo, NormKind, WeightRule
    from lmkit.contracts.operators import RowOps


# ---------------------------------------------------------------------------------------------------- platform


class Buffer(Protocol):
    """A host array with a device twin. On CPU both are one tensor and `push` does nothing."""

    host: Tensor  # written by the planner, through numpy views or slices
    device: Tensor  # read by kernels

    def push(self, n: int) -> Tensor:
        """Copy the first `n` rows to the device (asynchronously where possible); returns that device slice.

        Where they are two, the host side may be written again at once.
        """


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

    sizes: Sequence[int]  # numbers of rows of which a step is tried before the first request

    def num_rows(self, n: int) -> int:
        """How many rows a decode step of `n` gets, with such that stand for nothing; not more than `max_rows`."""

    def run(self, forward: Callable[[StepInputs], Tensor], x: StepInputs) -> Tensor: ...

    def then(self, function: Callable[[Tensor], Any], hidden: Tensor) -> Any:
        """`function` of what `run` gave last; what it returns may be overwritten when it is asked for again."""


class Collectives(Protocol):
    """Communication among ranks; the null object (one rank) returns its input."""

    rank: int
    size: int

    def all_reduce(self, x: Tensor) -> Tensor: ...
    def all_gather(self, x: Tensor, dim: int) -> Tensor: ...
    def broadcast(self, x: Tensor, src: int) -> Tensor: ...
    def send(self, x: Tensor, dst: int) -> None: ...
    def receive(self, out: Tensor, src: int) -> Tensor:
        """Fills `out` with what `src`, the rank before this one, sends: as many bytes."""


# --------------------------------------------------------------------------------------------------- attention


@dataclass(slots=True)
class AttnBatch:
    """What a planner reads: one per KV group and step. Host tensors are valid until the next step."""

    query_start: Buffer  # [R + 1] int32, cumulative query lengths
    seq_len: Buffer  # [R] int32, KV length including this step
    table: Buffer  # [R, max_blocks] int32
    slots: Buffer  # [T] int64 = block * block_size + offset; -1 = for nobody to read
    num_rows: int
    num_tokens: int
    max_query: int
    max_seq: int
    num_decode_rows: int  # rows [0, num_decode_rows) have query length 1 (or 1 + drafts)
    tree: Buffer | None = None  # [T] int64: see `TreeAttention`; None: each token sees all that are before it


class AttnPlan(Protocol):
    """Made once per step and KV group; read by every layer of the group."""

    slots: Tensor  # [T] int64 on the device


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
    capture: bool = False  # all hidden states are read, and every planner allows it: may run as a captured graph
    adapters: Any = None  # tensor [T] int64: the adapter of each token, -1: none; None: no token has one
    embeds: Tensor | None = None
    token_types: Tensor | None = None  # [T] int64: 1 in the second text of a pair; None: 0 everywhere
    state: StateBatch | None = None  # of models with recurrent layers
    only_logits: bool = False  # hidden states of no other rows than `logits_rows` are read, and S < T


class Model(Protocol):
    """A model with its weights, on its device."""

    def forward(self, x: StepInputs) -> Tensor:
        """Hidden states [T, D] after the final norm; a pure function of x and weights, KV written through x.

        With `x.only_logits` a model may return those of `x.logits_rows` alone: [S, D].
        """

    def logits(self, hidden: Tensor) -> Tensor:
        """The head: [S, D] -> [S, V], float32 or the model's dtype.

        Of a pooling model: [S, D] -> [S, size before dense modules], on hidden states or what they were reduced to.
        """


class BuildContext(Protocol):
    """What a model is built with. Implemented by the library lmkit-layers; modules are made on the meta device."""

    info: ModelInfo
    dtype: torch.dtype
    tp_rank: int
    tp_size: int
    collectives: Collectives | None
    rows: RowOps
    recurrent: Any  # operators of recurrent layers that were chosen, as TorchRecurrentOps of lmkit-decoders; or None

    def linear(self, spec: LinearSpec, local: LinearSpec | None = None) -> nn.Module:
        """`local`: a rank's share, where parts of it are those of other ranks too; None: as `spec.shard` says."""

    def experts(self, up: LinearSpec, down: LinearSpec, act: str) -> nn.Module:
        """A module called as experts(x [T, D], ids [T, K], weights [T, K]) -> [T, D]; see ExpertKernel."""

    def attention(self, layer: int, scale: float) -> nn.Module:
        """A module called as attn(q, k, v, x: StepInputs) with q [T, Hq, D], k and v [T, Hkv, D].

        Where its `rotates` is true, it turns q and k (in place) by `angles`, if these come as a fifth argument: the
        cos, sin and interleaved of RowOps.rotate.
        """

    def norm(self, size: int, eps: float, kind: NormKind = "rms") -> nn.Module:
        """norm(x), or norm.add(h, delta) for `h += delta` in place and the norm of the sum."""

    def embedding(self, num: int, size: int) -> nn.Module: ...
    def rotary(self, head_dim: int, rope: Mapping[str, object]) -> nn.Module: ...


class Architecture(Protocol):
    """A model family. Its module is torch-free; `build` imports torch."""

    names: tuple[str, ...]

    def describe(self, config: Mapping[str, object]) -> ModelInfo:
        """Every key read is declared; an unsupported value raises UnsupportedModel(key, value)."""

    def build(self, info: ModelInfo, ctx: BuildContext) -> Model: ...

    def weights(self, info: ModelInfo) -> list[WeightRule]: ...


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
    """Number of blocks per KV group, block 0 (the null block, which belongs to no row) included."""

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
    """Loads an adapter from a folder."""

    name: str
    path: str


class DropAdapter(Control):
    """Unloads an adapter."""

    name: str


class Profile(Control):
    """Record what the next `num_steps` steps do, into files whose names begin with `path`; 0: no more of them."""

    path: str
    num_steps: int


class ForgetRows(Control):
    """Forget all rows and all steps in flight; what done steps wrote to the cache stays. Sent after a failed step."""


class ResetCache(Control):
    """Forget all rows and all steps in flight; no KV content is valid any more. Sent when ForgetRows was refused."""


class WorkAhead(Control):
    """Nothing runs: do a piece of what later steps would have to do. Refused when there is none. Sent again and again
    while no request comes."""


class Sleep(Control):
    """Give up the cache, and the weights to the host's memory (level 1) or altogether (2). Wake comes before a step."""

    level: int


class Wake(Control):
    """As before Sleep, with the same weights and an empty cache. Where it is refused, the worker sleeps on."""


class StageWeights(Control):
    """Make weights ready beside those in force: a file or folder of safetensors, in the checkpoint's own names.

    With `partial` some are enough, if all that one linear is made of come together. Refused unless all of them fit, and
    `stamp` is that of the files (lmkit.checkpoint.stamp_of) before and after they were read.
    """

    path: str
    stamp: str
    partial: bool = False


class UseWeights(Control):
    """Compute with what was staged from now on, with an empty cache; or, without `commit`, forget what was staged."""

    commit: bool = True


class Reply(msgspec.Struct):
    """What a worker answers to a Control."""

    ok: bool
    message: str = ""


class Progress(Protocol):
    """Where long work reports: `phase` names it ("load weights"), `done` and `total` are in `unit`."""

    def __call__(self, phase: str, done: int, total: int, unit: str = "B") -> None: ...
