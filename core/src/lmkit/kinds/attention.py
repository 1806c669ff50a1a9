"""Paged attention. What a spec does not declare (a dtype, a feature) is refused, never tried.

Example, entry point `[project.entry-points."lmkit.attention"] toy = "toy_attention.hooks"`::

    from lmkit.api import AttentionSpec, Tier, hookimpl, multiple_of


    @hookimpl
    def lmkit_attention_backends():
        yield AttentionSpec(
            name="toy", summary="Attention by the book", target="toy_attention.backend:ToyAttention",
            tier=Tier.REFERENCE, dtypes=frozenset({"float32", "bfloat16"}),
            head_dims=multiple_of(8, max=256), features=frozenset({"causal", "sliding_window"}),
        )
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, Protocol, runtime_checkable

from lmkit.contracts.model import AttnNeed
from lmkit.contracts.refusal import Refusal
from lmkit.contracts.specs import ANY, Dims, SelectRequest, Spec
from lmkit.kinds.base import Kind, Known, Refusals, listed

if TYPE_CHECKING:
    from torch import Tensor

    from lmkit.contracts.device import DeviceInfo
    from lmkit.contracts.execution import AttnBatch, AttnPlan, StepLimits
    from lmkit.kinds.platform import Platform


class AttnPlanner(Protocol):
    """What prepares attention on the host, once for each step."""

    capture: Literal["none", "decode", "any"]  # what may be inside a captured graph; with "any", `plan` too

    def plan(self, batch: AttnBatch) -> AttnPlan:
        """Host work happens only here. May keep references to the batch's buffers until the next `plan`."""


class AttentionBackend(Protocol):
    """Paged attention. `lmkit_testing.AttentionConformance` proves what is asked here.

    1. In each layer write_kv for all rows of the step completes before any row is read.
    2. Prefill and decode rows are mixed in one call.
    3. Slot -1 is written nowhere but in block 0, which belongs to no row; rows of length 0 are legal.
    4. `out` is given; `forward` allocates nothing on the fast path.
    5. One object serves all layers and planners of a worker; the planners are made before the first `write_kv`.
    6. q, k and v are views with any strides, parts of what a model computed them in; `out` has no gaps.
    """

    name: str

    def can_run(self, need: AttnNeed, device: DeviceInfo) -> str | None:
        """A reason why not, or None."""

    def block_sizes(self, need: AttnNeed) -> tuple[int, ...]:
        """Supported block sizes, preferred first."""

    def kv_shape(self, need: AttnNeed, num_blocks: int) -> tuple[int, ...]:
        """Shape of one layer's KV tensor, in need.kv_dtype."""

    def planner(self, need: AttnNeed, limits: StepLimits, platform: Platform) -> AttnPlanner: ...

    def write_kv(self, k: Tensor, v: Tensor, kv: Tensor, slots: Tensor) -> None:
        """k, v [T, num_kv_heads, head_dim] into the layer's KV tensor at `slots` [T]; of `mla` only k is written."""

    def forward(
        self, q: Tensor, kv: Tensor, plan: AttnPlan, scale: float, out: Tensor, sinks: Tensor | None = None
    ) -> None:
        """q [T, num_q_heads, head_dim], out [T, num_q_heads, v_head_dim]. `scale` multiplies q @ k.

        `sinks` [num_q_heads] float32 is passed exactly when the need has sinks: a logit that takes part in each
        head's softmax and has no value. A backend that does not declare the feature need not accept the argument.
        """


@runtime_checkable
class RotatingAttention(AttentionBackend, Protocol):
    """A backend that turns queries and keys as it writes: one pass over them instead of several."""

    def rotate_write(
        self, q: Tensor, k: Tensor, v: Tensor, kv: Tensor, slots: Tensor, cos: Tensor, sin: Tensor, interleaved: bool
    ) -> None:
        """RowOps.rotate of q and of k, in place, then write_kv: the same values in all three."""


@runtime_checkable
class TreeAttention(AttentionBackend, Protocol):
    """A backend that declares "tree": drafts of a row may branch. Bit i of a token's `AttnBatch.tree` says whether it
    sees the place i before its row's last, among those before its own; of places further back it sees what it always
    does. All bits are set in rows that are no trees."""

    def move_kv(self, kv: Tensor, need: AttnNeed, sources: Tensor, targets: Tensor) -> None:
        """Copies what stands at slots `sources` [N] to `targets` [N] (int64), in all layers of `kv` [layers,
        *kv_shape]. No target is the source of a later pair."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionSpec(Spec):
    """target: an AttentionBackend class."""

    dtypes: frozenset[str]
    kv_dtypes: frozenset[str] = frozenset({"auto"})  # "auto" = the model's dtype
    head_dims: Dims = ANY
    v_head_dims: Dims | None = None  # None = equal to head_dim
    block_sizes: Dims = ANY
    preferred_block_size: int = 16  # used when neither user nor platform says otherwise
    gqa_ratios: Dims = ANY
    features: frozenset[str] = frozenset({"causal"})


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionRequest(SelectRequest):
    """One request per attention component and need."""

    kind: str = "attention"
    component: str = "text"
    need: AttnNeed

    def needed(self) -> frozenset[str]:
        return self.features | self.need.features

    def facts(self) -> dict[str, object]:
        need = self.need
        shown = {"head_dim": need.head_dim, "q/kv heads": f"{need.num_q_heads}/{need.num_kv_heads}"}
        return {
            **shown,
            "dtype": self.dtype or need.dtype,
            "kv_dtype": need.kv_dtype,
            "features": sorted(self.needed()),
        }


def refusals(spec: AttentionSpec, request: AttentionRequest) -> Refusals:
    """Stage 7 for attention. Values that are not settled yet ("auto", block size 0) pass."""
    need = request.need
    dtype = request.dtype or need.dtype
    if dtype != "auto" and dtype not in spec.dtypes:
        others = [d for d in (request.device.dtypes if request.device else ()) if d in spec.dtypes]
        yield Refusal("dtype", listed(spec.dtypes), dtype, f"--dtype {others[0]}" if others else "")
    kv_dtype = "auto" if need.kv_dtype == dtype and "auto" in spec.kv_dtypes else need.kv_dtype
    if kv_dtype not in spec.kv_dtypes:
        yield Refusal("kv-dtype", listed(spec.kv_dtypes), kv_dtype)
    if need.head_dim not in spec.head_dims:
        yield Refusal("head-dim", str(spec.head_dims), str(need.head_dim))
    v_dim = need.v_head_dim or need.head_dim
    if need.mla and v_dim >= need.head_dim:
        yield Refusal("head-dim", f"values that are a part of keys of {need.head_dim} (mla)", str(v_dim))
    if v_dim != need.head_dim and (spec.v_head_dims is None or v_dim not in spec.v_head_dims):
        needed = "equal to head_dim" if spec.v_head_dims is None else str(spec.v_head_dims)
        yield Refusal("head-dim", f"v_head_dim {needed}", str(v_dim))
    if need.block_size and need.block_size not in spec.block_sizes:
        yield Refusal("block-size", str(spec.block_sizes), str(need.block_size))
    ratio, rest = divmod(need.num_q_heads, need.num_kv_heads)
    if rest or ratio not in spec.gqa_ratios:
        yield Refusal("gqa-ratio", str(spec.gqa_ratios), f"{need.num_q_heads}/{need.num_kv_heads}")


def ask(known: Known) -> list[AttentionRequest]:
    """One request for each group of layers that share a cache; one backend serves all of them."""
    size, needs = known.config.cache.block_size or 0, [need for need, _ in known.info.kv_groups()]
    needs = [replace(need, dtype=known.dtype, kv_dtype=known.kv_dtype, block_size=size) for need in needs]
    return [AttentionRequest(need=need, device=known.device, dtype=known.dtype) for need in needs]


KIND = Kind(
    "attention",
    spec=AttentionSpec,
    hook="lmkit_attention_backends",
    used_by="lmkit_worker.loading.load",
    request=AttentionRequest,
    refusals=refusals,
    needs=("proposer",),
    ask=ask,
    setting="attention",
    words="auto, NAME, or 'a,b' (explicit fallback)",
    doc=__doc__,
)
