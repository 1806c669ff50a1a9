"""The fingerprint: equal for engines whose blocks mean the same, byte for byte, and for no others."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import msgspec
from xxhash import xxh3_128

if TYPE_CHECKING:
    from lmkit.api import Checkpoint, KVConfig, ResolvedPlan

CHUNK = 1 << 22  # bytes
KINDS = ("platform", "attention", "quantization", "model")  # of plugins that decide what is in a block, and how


def fingerprint(checkpoint: Checkpoint, resolved: ResolvedPlan, kv: KVConfig, ranks: int = 1) -> str:
    """32 hex digits over the content of the weights, the configuration, and the layout of blocks.

    Reads all weight files once. Kernels are not part of it: their roundings differ, the meaning does not.
    """
    h = xxh3_128(b"lmkit kv store 1")

    def add(*parts: object) -> None:
        data = msgspec.json.encode(parts, order="sorted", enc_hook=str)
        h.update(len(data).to_bytes(8, "little") + data)

    plans = [(checkpoint, resolved)] + ([(resolved.draft.checkpoint, resolved.draft.plan)] if resolved.draft else [])
    for found, plan in plans:
        add(found.config, found.format, [str(path.name) for path in found.files])
        for path in found.files:
            with path.open("rb") as file:
                while chunk := file.read(CHUNK):
                    h.update(chunk)
        kinds = KINDS if found.files else (*KINDS, "loader")  # without files, the loader makes the weights
        add([(c.kind, c.component, c.name, c.dist, c.version, c.options) for c in plan.choices if c.kind in kinds])
        add([plan.value(key) for key in ("dtype", "kv_dtype", "block_size", "head")])
    add(resolved.device.device_type, resolved.device.capability, resolved.device.flags, sys.byteorder, ranks)
    add(msgspec.to_builtins(kv.specs))
    return h.hexdigest()
