"""The tensors of a file under the names, and in the shapes, that formats have.

Scales and zeros of rows are vectors in a file. Of 4 bits in groups, `weight` is int32 [in, out / 8], with the words of
AWQ if `reorder`, else eight columns from the lowest bits on; `weight_zero_point` [groups, out / 8] likewise. int4 is
signed there. Source: `Pack_4_bits` and `StaticScaledRealQuantizer` of quark.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from lmkit.api import Checkpoint, TensorEntry
from lmkit_layouts.made import MadeTensors
from lmkit_layouts.words import AWQ_COLUMNS, pack_fours, unpack
from torch import Tensor

from lmkit_quantization_quark.stored import Stored

WORDS = {"weight": "qweight", "weight_zero_point": "qzeros", "weight_scale": "scales"}
SIGNS = torch.tensor(0x88888888 - (1 << 32), dtype=torch.int32)  # that of each code in a word


@dataclass(slots=True, kw_only=True)
class QuarkTensors(MadeTensors):
    """`of_module` says how a weight is stored."""

    of_module: Callable[[str], Stored | None]
    reorder: bool

    def tensors(self, checkpoint: Checkpoint) -> list[TensorEntry]:
        return [self._one(entry) for entry in self.loader.tensors(checkpoint)]

    def _one(self, entry: TensorEntry) -> TensorEntry:
        module, _, key = entry.name.rpartition(".")
        self.check_plain(entry, "that it is not", "name it in quantization_config.exclude")
        if key in WORDS and self.wanted(f"{module}.{WORDS[key]}") is not None:
            stored, words = self.of_module(module), entry.dtype == "int32"
            signed = stored is not None and stored.dtype == "int4"

            def read() -> Tensor:
                return self._words(self.loader.read(entry), signed) if words else self.loader.read(entry)

            return self.make(f"{module}.{WORDS[key]}", entry.shape, entry.dtype, entry.file, read)
        if key in ("weight_scale", "weight_zero_point") and len(entry.shape) == 1 and entry.shape != (1,):
            shape = (*entry.shape, 1)
            return self.make(entry.name, shape, entry.dtype, entry.file, lambda: self.loader.read(entry).view(shape))
        return entry

    def _words(self, words: Tensor, signed: bool) -> Tensor:
        """In AWQ's order, and from 0 on."""
        words = words ^ SIGNS if signed else words
        if self.reorder:
            return words
        codes = unpack(words, 4).unflatten(1, (-1, 8))[..., AWQ_COLUMNS].flatten(1)
        return pack_fours(codes).view(torch.int32)
