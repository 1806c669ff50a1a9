"""How a product is divided among blocks of threads: plain numbers, for tests on any machine."""

from __future__ import annotations

from dataclasses import dataclass

ALIGNED = 16  # bytes: where tensors and their rows begin, for TMA
LINE = 128  # bytes of a row that one step of the loop reads: the widest swizzle of shared memory
SHARED = 232_448  # bytes of shared memory that a block may have, of sm_90 and sm_100
RESERVED = 4096  # of these, for barriers, alignment and what the compiler keeps
STAGES = 16  # steps in shared memory, at most
BAND = 8  # rows of tiles that are gone through together, at most


@dataclass(frozen=True, slots=True)
class Tile:
    """A block of threads computes `rows` output features of `tokens` tokens; a warpgroup has 64 of the rows."""

    rows: int
    tokens: int

    def stages(self, line: int = LINE) -> int:
        """Steps of the loop that are in shared memory at a time; a row of weights takes `line` bytes of each."""
        return min((SHARED - RESERVED) // (self.rows * line + self.tokens * LINE), STAGES)


TILES = {
    "sm_90a": (Tile(64, 16), Tile(64, 32), Tile(128, 64), Tile(128, 128), Tile(128, 256)),
    "sm_100a": tuple(Tile(128, tokens) for tokens in (16, 32, 64, 128, 256)),  # lanes of tensor memory
}
WIDEST = 128  # tokens of a tile whose sums a thread keeps twice, in registers


def tiles_of(arch: str, twice: bool) -> tuple[Tile, ...]:
    """Those for few tokens first. `twice`: sums of a step are added to those of all outside the tensor cores."""
    return tuple(tile for tile in TILES[arch] if tile.tokens <= WIDEST or not (twice and arch == "sm_90a"))


def tile_for(arch: str, tokens: int, twice: bool) -> Tile:
    """For so many tokens."""
    tiles = tiles_of(arch, twice)
    return next((tile for tile in tiles if tokens <= tile.tokens), tiles[-1])


def band_of(rows: int) -> int:
    """The largest divisor of `rows` up to BAND."""
    return next(band for band in range(min(BAND, rows), 0, -1) if rows % band == 0)


def place(tile, rows, band):  # numbers of Python, or of a kernel that is being compiled
    """Number of a tile -> (row of tiles, column of tiles): `band` rows of a column, then those of the next column.

    So those that run at the same time share weights and activations in the cache. `band` divides `rows`.
    """
    rest = tile // band
    bands = rows // band
    columns_done = rest // bands
    return rest % bands * band + tile % band, columns_done
