"""What the kernels do not run of all that is declared. Light: the resolver asks, and the backend when it is loaded."""

from __future__ import annotations

from collections.abc import Iterator

from lmkit.api import AttentionRequest, Refusal

MOST = 256  # entries of a head
MOST_REST = 64  # entries of a key beside the part of it that is values
E4M3 = (8, 9)  # compute capability that Triton converts it from


def check(request: AttentionRequest) -> Iterator[Refusal]:
    need, device = request.need, request.device
    v_dim = need.v_head_dim or need.head_dim
    rest = need.head_dim - v_dim
    if need.mla and not 0 < rest <= MOST_REST:
        yield Refusal("mla", f"1 to {MOST_REST} entries of a key beside its values", str(rest))
    if not need.mla and max(need.head_dim, v_dim) > MOST:
        yield Refusal("head-dim", f"at most {MOST} unless values are a part of keys", f"{need.head_dim} and {v_dim}")
    if need.kv_dtype == "float8_e4m3fn" and device is not None and device.platform == "cuda":
        capability = device.capability or (0, 0)
        if capability < E4M3:
            has = ".".join(map(str, capability))
            yield Refusal("kv-dtype", "compute capability 8.9 for float8_e4m3fn", has, "--kv-dtype float8_e5m2")
