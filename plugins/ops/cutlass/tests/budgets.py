"""What the kernels may take of a GPU: by architecture, tile and operands."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from lmkit_op_cutlass.launch import Variant
from lmkit_op_cutlass.tiles import tiles_of

BF16, FP16, FP8 = torch.bfloat16, torch.float16, torch.float8_e4m3fn
HOPPER: Mapping[str, tuple[int, ...]] = {  # registers of a thread for 16, 32, 64, 128 and 256 tokens
    "plain": (48, 64, 80, 104, 168),
    "rows": (48, 56, 88, 152),
    "blocks": (64, 88, 144, 168),
    "codes": (72, 96, 128, 168),
}
BLACKWELL = 72


@dataclass(frozen=True)
class Case:
    variant: Variant
    registers: int
    opcodes: tuple[str, ...]  # that its machine code must have

    @property
    def name(self) -> str:
        v = self.variant
        what = f"int4 {v.group}" if v.group is not None else f"float8 {v.scales}" if v.scales else str(v.kind)[6:]
        return f"{v.arch} {what} {v.tile.rows} x {v.tile.tokens}{' bias' if v.bias else ''}"


def hopper(kind: torch.dtype, budget: str, scales: str = "", group: int | None = None) -> list[Case]:
    """HGMMA and QGMMA are wgmma, UTMALDG loads a tile by TMA, UBLKCP a whole piece."""
    opcodes = ("UTMALDG", "QGMMA" if scales else "HGMMA", *(("UBLKCP", "LDS.128") if group is not None else ()))
    out = BF16 if scales else kind
    return [
        Case(Variant("sm_90a", tile, kind, out, scales, group, bias), registers, opcodes)
        for tile, registers in zip(tiles_of("sm_90a", budget != "plain"), HOPPER[budget], strict=True)
        for bias in (False, True)
    ]


def blackwell(kind: torch.dtype, scales: str = "") -> list[Case]:
    """UTCHMMA and UTCQMMA are tcgen05.mma, LDTM reads tensor memory."""
    opcodes, out = ("UTMALDG", "LDTM", "UTCQMMA" if scales else "UTCHMMA"), BF16 if scales else kind
    return [
        Case(Variant("sm_100a", tile, kind, out, scales, None, bias), BLACKWELL, opcodes)
        for tile in tiles_of("sm_100a", bool(scales))
        for bias in (False, True)
    ]


CASES = [
    *hopper(BF16, "plain"),
    *hopper(FP16, "plain"),
    *hopper(FP8, "rows", "rows"),
    *hopper(FP8, "blocks", "blocks"),
    *(case for group in (0, 32, 64, 128) for case in hopper(BF16, "codes", group=group)),
    *hopper(FP16, "codes", group=128),
    *blackwell(BF16),
    *blackwell(FP16),
    *blackwell(FP8, "rows"),
]
