"""The tensors of a file, made those that formats have: rows of codes with a scale for every few columns.

A file has, of a linear of 4 bits, beside its `weight`:

    weight                                the codes of all rows, one after another, as bytes of any dtype, [bytes, 1]
    weight.absmax                         float32 [blocks], or uint8 codes of such
    weight.quant_map                      float32 [16], what the codes of the weight are worth
    weight.nested_absmax, .nested_quant_map   of codes in absmax: float32 [blocks of blocks] and [256]
    weight.quant_state.bitsandbytes__nf4  uint8 [n], JSON: shape of the weight, length of blocks, ...

and of one of 8 bits `weight` int8 [out, in], `SCB` float32 [out], 127 times the scales, and perhaps `weight_format`.
Source: `QuantState.as_dict` and `Linear8bitLt._save_to_state_dict` of bitsandbytes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from math import isfinite
from typing import Annotated, Literal

import msgspec
import torch
from lmkit.api import Checkpoint, CheckpointError, TensorEntry, UnsupportedModel
from lmkit_layouts.made import MadeTensors, part_of
from torch import Tensor

from lmkit_quantization_bitsandbytes.codes import dequantize, table
from lmkit_quantization_bitsandbytes.formats import BLOCK, STORAGE, group_of

STATE = re.compile(r"(.+\.weight)\.quant_state\.bitsandbytes__(nf4|fp4)")
PART = re.compile(r"(.+\.weight)\.(absmax|quant_map|nested_absmax|nested_quant_map|quant_state\..*)")
MAX_STATE = 4096  # bytes of JSON; producers write less than 200
BLOCKS = tuple(BLOCK << i for i in range(7))  # 64 to 4096
NESTED_BLOCKS = (64, 128, 256, 512, 1024, 2048, 4096)
SKIPPED = "quantization_config.llm_int8_skip_modules"
SAME = 1e-6  # how far a value of a stored table may be from ours
TO_SCALE = 7.874015718698502e-3  # 1 / 127 as bitsandbytes has it

Size = Annotated[int, msgspec.Meta(gt=0, lt=1 << 40)]


class QuantState(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What JSON says of one weight."""

    quant_type: Literal["nf4", "fp4"]
    blocksize: int
    dtype: Literal["float32", "bfloat16", "float16"]  # of the weight that was quantized
    shape: tuple[Size, Size]
    nested_blocksize: int | None = None
    nested_dtype: Literal["float32"] | None = None
    nested_offset: float | None = None

    @property
    def nested(self) -> bool:
        return self.nested_blocksize is not None


def parse_state(data: bytes, name: str) -> QuantState:
    """Raises CheckpointError, or UnsupportedModel for what is well made, and not supported; both name `name`."""
    try:
        state = msgspec.json.decode(data, type=QuantState)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as e:
        raise CheckpointError(f"{name} is not what bitsandbytes writes: {e}") from e
    if state.blocksize not in BLOCKS:
        raise UnsupportedModel(f"blocksize of {name}", state.blocksize, ", ".join(map(str, BLOCKS)))
    given = (state.nested_blocksize, state.nested_dtype, state.nested_offset)
    if any(value is None for value in given) and given != (None, None, None):
        raise CheckpointError(f"{name} needs all of nested_blocksize, nested_dtype and nested_offset, or none")
    if state.nested and state.nested_blocksize not in NESTED_BLOCKS:
        raise UnsupportedModel(
            f"nested_blocksize of {name}", state.nested_blocksize, ", ".join(map(str, NESTED_BLOCKS))
        )
    if not isfinite(state.nested_offset or 0.0):
        raise CheckpointError(f"{name}: nested_offset is not a number")
    if state.shape[1] % 2:
        raise UnsupportedModel(f"columns in {name}", state.shape[1], "an even number")
    return state


@dataclass(slots=True, kw_only=True)
class BitsandbytesTensors(MadeTensors):
    """`weight` and `weight_absmax` as `TableFormat` has them, or `weight_scale` for SCB.

    `kind` is what the configuration promises: nf4, fp4 or int8. Weights that the model wants plain, as of experts and
    routers, are dequantized: in float32, one at a time. What describes weights is read and checked with the headers,
    before any weight is.
    """

    kind: str

    def tensors(self, checkpoint: Checkpoint) -> list[TensorEntry]:
        found = {entry.name: entry for entry in self.loader.tensors(checkpoint)}
        return self._eight(found) if self.kind == "int8" else self._four(found)

    def _unchanged(self, entry: TensorEntry) -> TensorEntry:
        """The same. Raises CheckpointError for a plain weight where the configuration says that none is."""
        self.check_plain(entry, self.kind, f"name it in {SKIPPED}")
        return entry

    # ------------------------------------------------------------------------------------------------ 8 bits

    def _eight(self, found: Mapping[str, TensorEntry]) -> list[TensorEntry]:
        entries = []
        for name, entry in found.items():
            module, _, key = name.rpartition(".")
            if PART.fullmatch(name):
                raise CheckpointError(f"{name} belongs to 4 bits, and quantization_config says load_in_8bit")
            if key == "weight" and entry.dtype == "int8" and f"{module}.SCB" not in found:
                raise CheckpointError(f"{name} is int8, and its scales {module}.SCB are missing")
            if key == "weight_format":
                if entry.shape != () or entry.dtype != "uint8" or int(self.loader.read(entry)) != 0:
                    raise UnsupportedModel(name, f"{entry.dtype} {list(entry.shape)}", "0: rows, as they are")
                continue
            if key == "SCB":
                entries += self._row_scales(entry, f"{module}.weight", found)
            elif f"{module}.SCB" not in found or key != "weight":
                entries.append(self._unchanged(entry))
        return entries

    def _row_scales(self, stored: TensorEntry, name: str, found: Mapping[str, TensorEntry]) -> list[TensorEntry]:
        """The weight that these scales are of, and the scales."""
        weight = found.get(name)
        if weight is None or weight.dtype != "int8" or len(weight.shape) != 2:
            raise CheckpointError(f"{stored.name}: there is no int8 weight that it belongs to")
        if stored.shape != weight.shape[:1] or stored.dtype != "float32":
            needs = f"needs float32 [{weight.shape[0]}]"
            raise CheckpointError(f"{stored.name} is {stored.dtype} {list(stored.shape)}, {needs}")

        def scales() -> Tensor:
            return numbers(self.loader.read(stored), stored.name)[:, None] * TO_SCALE

        if self.plain(name):
            return [self.make(name, weight.shape, "float32", weight.file, lambda: self.loader.read(weight) * scales())]
        return [weight, self.make(f"{name}_scale", (*stored.shape, 1), "float32", stored.file, scales)]

    # ------------------------------------------------------------------------------------------------ 4 bits

    def _four(self, found: Mapping[str, TensorEntry]) -> list[TensorEntry]:
        states = {m[1]: (m[2], entry) for name, entry in found.items() if (m := STATE.fullmatch(name))}
        for name, entry in found.items():
            owner = PART.fullmatch(name)
            if owner and (owner[1] not in states or owner[1] not in found):
                what = "quant_state" if owner[1] in found else "weight"
                raise CheckpointError(f"{name}: there is no {what} that it belongs to")
            if owner and owner[2].startswith("quant_state") and states[owner[1]][1] is not entry:
                raise CheckpointError(f"{name}: {owner[1]} has another quant_state, too")
            if name.endswith(".SCB") and entry.dtype == "float32":
                raise CheckpointError(f"{name} belongs to 8 bits, and quantization_config says load_in_4bit")
        entries = []
        for name, entry in found.items():
            if name in states:
                entries += self._linear(entry, *states[name], found)
            elif not PART.fullmatch(name):
                entries.append(self._unchanged(entry))
        return entries

    def _linear(
        self, weight: TensorEntry, kind: str, blob: TensorEntry, found: Mapping[str, TensorEntry]
    ) -> list[TensorEntry]:
        """`weight` and its scales, as the format has them. Raises CheckpointError for what does not fit."""
        if len(blob.shape) != 1 or blob.dtype != "uint8" or not 0 < blob.shape[0] <= MAX_STATE:
            needs = f"needs uint8 of at most {MAX_STATE}"
            raise CheckpointError(f"{blob.name} is {blob.dtype} {list(blob.shape)}, {needs}")
        state = parse_state(bytes(self.loader.read(blob).tolist()), blob.name)
        if not state.quant_type == kind == self.kind:
            raise CheckpointError(f"{blob.name} is {state.quant_type}, and quantization_config says {self.kind}")
        rows, columns = state.shape
        blocks = -(-rows * columns // state.blocksize)
        if weight.dtype not in STORAGE:
            raise CheckpointError(f"{weight.name} is {weight.dtype}, needs one of {', '.join(STORAGE)}")
        if weight.nbytes != rows * columns // 2:
            raise CheckpointError(f"{weight.name} has {weight.nbytes} bytes, and its quant_state is of {state.shape}")
        needed = {"absmax": ("uint8" if state.nested else "float32", blocks), "quant_map": ("float32", 16)}
        if state.nested_blocksize is not None:
            needed["nested_absmax"] = ("float32", -(-blocks // state.nested_blocksize))
            needed["nested_quant_map"] = ("float32", 256)
        names = {key: f"{weight.name}.{key}" for key in needed}
        parts = {
            key: part_of(found.get(names[key]), names[key], (dtype,), (length,))
            for key, (dtype, length) in needed.items()
        }
        for key in ("nested_absmax", "nested_quant_map"):
            if key not in needed and f"{weight.name}.{key}" in found:
                raise CheckpointError(f"{weight.name}.{key} is there, and quant_state does not say so")
        values = self.loader.read(parts["quant_map"])
        if not torch.allclose(values, table(kind), rtol=0, atol=SAME):
            raise CheckpointError(f"{parts['quant_map'].name} is not the table of {kind}")
        packed, grouped = (rows, columns // 2), (rows, columns // group_of(columns))

        def codes() -> Tensor:
            return self.loader.read(weight).reshape(-1).view(torch.uint8).view(packed)

        def scales() -> Tensor:
            return self._scales(state, parts)

        if self.plain(weight.name):

            def whole() -> Tensor:
                return dequantize(codes(), scales(), kind, torch.float32)

            return [self.make(weight.name, state.shape, "float32", weight.file, whole)]
        return [
            self.make(weight.name, packed, "uint8", weight.file, codes),
            self.make(f"{weight.name}_absmax", grouped, "float32", parts["absmax"].file, scales),
        ]

    def _scales(self, state: QuantState, parts: Mapping[str, TensorEntry]) -> Tensor:
        """[out, in / group] float32: that of the block in which the columns lie."""
        read = {key: self.loader.read(entry) for key, entry in parts.items()}
        absmax = read["absmax"]
        if state.nested_blocksize is not None and state.nested_offset is not None:
            outer = read["nested_absmax"].repeat_interleave(state.nested_blocksize)[: len(absmax)]
            absmax = read["nested_quant_map"][absmax.int()] * outer + state.nested_offset
        numbers(absmax, parts["absmax"].name)
        rows, columns = state.shape
        group = group_of(columns)
        if (group, state.blocksize) != (BLOCK, BLOCK):
            absmax = absmax[torch.arange(0, rows * columns, group) // state.blocksize]
        return absmax.view(rows, columns // group)


def numbers(scales: Tensor, name: str) -> Tensor:
    """The same. Raises CheckpointError for NaN and infinity."""
    if not bool(scales.isfinite().all()):
        raise CheckpointError(f"{name}: scales are not numbers")
    return scales
