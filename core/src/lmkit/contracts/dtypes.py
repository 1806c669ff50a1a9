"""Names of dtypes, without torch. The names are torch's: "bfloat16", "float8_e4m3fn"."""

from __future__ import annotations

_ITEMSIZE = {
    "float64": 8, "float32": 4, "float16": 2, "bfloat16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1,
    "float8_e8m0fnu": 1, "int64": 8, "int32": 4, "int16": 2, "int8": 1, "uint8": 1, "bool": 1,
}  # fmt: skip
ALIASES = {"bf16": "bfloat16", "fp16": "float16", "half": "float16", "fp32": "float32", "float": "float32",
           "fp8": "float8_e4m3fn", "fp8_e4m3": "float8_e4m3fn", "fp8_e5m2": "float8_e5m2",
           "int8_per_token_head": "int8"}  # fmt: skip


def itemsize(dtype: str) -> int:
    """Bytes per element."""
    return _ITEMSIZE[dtype]


def kv_scale_bytes(dtype: str) -> int:
    """Bytes beside the cached values of a token and KV head: int8 has a float32 scale for the key, one for the value.

    A scale is the largest magnitude / 127.
    """
    return 8 if dtype == "int8" else 0


def canonical(dtype: str) -> str:
    """The full name of a dtype or alias ("bf16" -> "bfloat16"; "torch.float32" -> "float32")."""
    name = dtype.removeprefix("torch.").lower()
    return ALIASES.get(name, name)
