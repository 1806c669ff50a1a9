"""How products are launched: tiles by device, weights and rows, as data. Nothing is tuned at run time."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import torch


@dataclass(frozen=True, slots=True)
class Tile:
    """How a product is launched where there are at most `rows` rows (None: any number); of an expert, on average."""

    rows: int | None
    m: int  # rows of a program
    n: int  # rows of weights of a program, of all parts
    k: int  # columns at a time
    warps: int
    stages: int
    full: int = 264  # programs that keep a large device busy: two for each of 132 multiprocessors


@lru_cache
def tables() -> dict[str, dict[str, tuple[Tile, ...]]]:
    """By device ("sm_90", "gfx942", else "cuda" or "rocm") and weights; those for few rows first.

    Weights of experts are "2" or "4" bytes each, "codes", whose groups say how many columns are taken at a time, or
    "float8". Those of linears are "linear codes" or "linear bytes", with the bytes of an activation behind them, or
    "linear plain"; of "row of codes" k counts bytes.
    """
    found = json.loads(Path(__file__).with_name("tiles.json").read_text(encoding="utf-8"))
    return {
        device: {size: tuple(Tile(**tile) for tile in tiles) for size, tiles in sizes.items()}
        for device, sizes in found.items()
    }


def tiles_of(name: str, weights: str) -> tuple[Tile, ...]:
    """For a device by the name of its architecture."""
    general = "rocm" if name.startswith("gfx") else "cuda"
    return tables().get(name, {}).get(weights) or tables()[general][weights]


@lru_cache
def architecture(device: torch.device) -> str:
    """The name of a GPU: "sm_90", "gfx942"; "cuda" where torch knows none."""
    if device.type != "cuda":
        return "cuda"
    properties = torch.cuda.get_device_properties(device)
    if torch.version.hip:
        return str(properties.gcnArchName).partition(":")[0]
    return f"sm_{properties.major}{properties.minor}"


def takes_ptx(device: torch.device) -> bool:
    """Whether kernels may have instructions of NVIDIA's in them. Not where they are interpreted."""
    return architecture(device).startswith("sm_")


def tile_for(device: torch.device, weights: str, rows: int) -> Tile:
    """`rows`: of x, or of an expert on average."""
    return next(t for t in tiles_of(architecture(device), weights) if t.rows is None or rows <= t.rows)
