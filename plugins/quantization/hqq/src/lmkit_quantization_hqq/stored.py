"""How one linear is stored, as far as the configuration says."""

from __future__ import annotations

from dataclasses import dataclass

from lmkit_layouts import OffsetRows


@dataclass(frozen=True, slots=True)
class Stored:
    """`group`: columns that share a scale; 0 = all."""

    bits: int
    group: int

    def layout(self, parts: tuple[int, ...], width: int) -> OffsetRows:
        """The format of merged parts with so many rows, and columns."""
        wide = self.bits == 8
        return OffsetRows(
            group=self.group, parts=parts, width=width, stored_bits=8 if wide else 4, bits=8 if wide else 4,
            name="int8" if wide else "int4", activations="float" if wide else "int8",
        )  # fmt: skip
