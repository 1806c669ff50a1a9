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

from lmkit.contracts.model import AttnNeed
from lmkit.contracts.refusal import Refusal
from lmkit.contracts.specs import ANY, Dims, SelectRequest, Spec
from lmkit.kinds.base import Kind, Known, Refusals, listed


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
    needs=("dtype",),
    ask=ask,
    setting="attention",
    words="auto, NAME, or 'a,b' (explicit fallback)",
    doc=__doc__,
)
