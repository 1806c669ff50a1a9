"""The checkpoint format: which layers are float8, and how one is stored."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lmkit.api import CheckpointError, LinearSpec, ParamSpec, PluginError, QuantFormat, QuantScheme, UnsupportedModel

if TYPE_CHECKING:
    import torch
    from torch import Tensor

# Keys of quantization_config and the values understood; None = checked in `parse`.
KEYS: Mapping[str, tuple[object, ...] | None] = {
    "quant_method": ("fp8",),
    "activation_scheme": ("dynamic", "static"),
    "weight_block_size": None,
    "modules_to_not_convert": None,
    "ignored_layers": None,
    "fmt": ("e4m3", None),
    "scale_fmt": ("float", "ue8m0", None),  # both are stored as numbers here; ue8m0 are powers of two
    "dequantize": (False, None),
    "modules_to_convert": (None, []),
    "expert_dtype": ("fp8", None),
    "kv_cache_scheme": (None,),
}
PLAIN_NAME = re.compile(r"^[\w.-]+$")
HEAD = "lm_head"  # producers leave the output head alone whether they list it or not


@dataclass(frozen=True, slots=True)
class Fp8Scheme(QuantScheme):
    """`block` is (rows, columns) of a scale, None = one scale per tensor."""

    block: tuple[int, int] | None = None
    skipped: tuple[str, ...] = ()
    name: str = "fp8"

    @classmethod
    def parse(cls, quantization_config: Mapping[str, object]) -> Fp8Scheme:
        where = "quantization_config"
        for key, value in quantization_config.items():
            if key not in KEYS:
                raise UnsupportedModel(f"{where}.{key}", value, f"keys {', '.join(KEYS)}")
            allowed = KEYS[key]
            if allowed is not None and value not in allowed:
                raise UnsupportedModel(f"{where}.{key}", value, ", ".join(map(repr, allowed)))
        block = quantization_config.get("weight_block_size")
        if block is not None and not (
            isinstance(block, list | tuple) and len(block) == 2 and all(type(n) is int and n > 0 for n in block)
        ):
            raise UnsupportedModel(f"{where}.weight_block_size", block, "two positive numbers")
        skipped: list[str] = []
        for key in ("modules_to_not_convert", "ignored_layers"):
            names = quantization_config.get(key) or []
            if not isinstance(names, list | tuple) or not all(
                isinstance(n, str) and PLAIN_NAME.match(n) for n in names
            ):
                raise UnsupportedModel(f"{where}.{key}", names, "a list of module names (no patterns)")
            skipped += names
        return cls(None if block is None else (block[0], block[1]), tuple(skipped))

    def for_layer(self, layer: LinearSpec) -> Fp8Format | None:
        sources = layer.sources or (layer.name,)
        kept = {any(_names(pattern, source) for pattern in (*self.skipped, HEAD)) for source in sources}
        if len(kept) > 1:
            raise UnsupportedModel(
                "quantization_config.modules_to_not_convert", sources, "all or none of a merged layer"
            )
        return None if kept.pop() else Fp8Format(self.block, layer.out_features, layer.in_features)


def _names(pattern: str, module: str) -> bool:
    """Whether a skip-list entry names this module: its full name, the start or the end of it, at a dot."""
    return f".{module}.".startswith(f".{pattern}.") or f".{module}.".endswith(f".{pattern}.")


def _divides(whole: int, here: int, block: int) -> bool:
    """Whether a rank's share `here` of a length `whole` holds whole blocks, or all lie in one block."""
    return here == whole or here % block == 0 or whole <= block


@dataclass(frozen=True, slots=True)
class Fp8Format(QuantFormat):
    """weight [out, in] float8_e4m3fn, with scales per block of each merged part or per part."""

    block: tuple[int, int] | None
    parts: tuple[int, ...]  # rows of each merged part of the whole layer
    width: int  # columns of the whole layer
    name: str = "fp8"

    def params(self, layer: LinearSpec, dtype: str) -> dict[str, ParamSpec]:
        weight = ParamSpec((layer.total_out, layer.in_features), "float8_e4m3fn")
        ones = (1,) * len(layer.out_features)
        loose = ParamSpec((len(ones),), "float32", part_sizes=ones, optional=True)
        unused = {"input_scale": loose, "activation_scale": loose}
        if self.block is None:  # either name is in use
            return {"weight": weight, "weight_scale": loose, "weight_scale_inv": loose, **unused}
        rows, columns = self.block
        lengths = [*zip(self.parts, layer.out_features, strict=True)]
        if not all(_divides(*pair, rows) for pair in lengths) or not _divides(self.width, layer.in_features, columns):
            raise PluginError(f"{layer.name}: blocks of {rows} x {columns} would straddle two ranks")
        sizes = tuple(-(-n // rows) for n in layer.out_features)
        scale = ParamSpec((sum(sizes), -(-layer.in_features // columns)), "float32", part_sizes=sizes)
        return {"weight": weight, "weight_scale_inv": scale, **unused}

    def dequantize(self, params: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
        weight, scales = params["weight"], self.row_scales(params)
        if self.block is not None:
            scales = scales.repeat_interleave(self.block[1], 1)[:, : weight.shape[1]]
        return (weight.float() * scales).to(dtype)

    def row_scales(self, params: Mapping[str, Tensor]) -> Tensor:
        """Scale of each row: [out, blocks of columns] float32, or [out, 1] without blocks."""
        import torch

        height = params["weight"].shape[0]
        parts = torch.tensor([n * height // sum(self.parts) for n in self.parts])  # of this rank
        if self.block is None:
            found = [params[key] for key in ("weight_scale", "weight_scale_inv") if key in params]
            if len(found) != 1:
                raise CheckpointError("a float8 layer needs exactly one of weight_scale and weight_scale_inv")
            return found[0].repeat_interleave(parts.to(found[0].device)).unsqueeze(1)
        scale, rows = params["weight_scale_inv"], self.block[0]
        per_part = scale.split([-(-int(n) // rows) for n in parts])
        return torch.cat([s.repeat_interleave(rows, 0)[:n] for s, n in zip(per_part, parts.tolist(), strict=True)])
