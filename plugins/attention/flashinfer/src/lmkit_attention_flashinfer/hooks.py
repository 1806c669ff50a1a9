"""Registers attention by flashinfer. Light: the kernels are imported when it is chosen."""

from collections.abc import Iterable
from dataclasses import dataclass

from lmkit.api import AttentionSpec, Range, Tier, hookimpl, one_of


@dataclass(frozen=True, slots=True)
class Options:
    """Options of attention.flashinfer."""

    workspace_mb: int = 128  # scratch memory on the device for splitting long rows, MiB
    kernels: str = "auto"  # "auto", "fa2" or "fa3": the fastest that can run, or one of flashinfer's kernel families

    def __post_init__(self) -> None:
        if self.workspace_mb < 16:
            raise ValueError(f"workspace_mb is {self.workspace_mb}, needs at least 16")
        if self.kernels not in ("auto", "fa2", "fa3"):
            raise ValueError(f"kernels is {self.kernels!r}, needs auto, fa2 or fa3")


@hookimpl
def lmkit_attention_backends() -> Iterable[AttentionSpec]:
    yield AttentionSpec(
        name="flashinfer",
        summary="Paged prefill and decode kernels of flashinfer-python",
        target="lmkit_attention_flashinfer.backend:FlashInferAttention",
        requires=("flashinfer-python>=0.6",),
        options="lmkit_attention_flashinfer.hooks:Options",
        check="lmkit_attention_flashinfer.check:check",
        tier=Tier.OPTIMIZED,
        stability="experimental",
        platforms=("cuda",),
        capability=Range((8, 0), None),
        dtypes=frozenset({"float16", "bfloat16"}),
        kv_dtypes=frozenset({"auto", "float8_e4m3fn", "float8_e5m2"}),
        head_dims=one_of(64, 128, 256, 576),
        v_head_dims=one_of(512),
        block_sizes=one_of(1, 8, 16, 32, 64),
        features=frozenset({"causal", "mla", "sliding_window", "softcap"}),
    )
