"""Tiles, their order, and what of a weight of 4 bits lies where."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lmkit.api import Integers
from lmkit_layouts.grouped import dequantize
from lmkit_op_cutlass.codes import PIECE, THREADS, factors, fragment, fragments, nibble
from lmkit_op_cutlass.tiles import BAND, LINE, SHARED, TILES, WIDEST, band_of, place, tile_for, tiles_of


@given(st.integers(1, 300), st.integers(1, 40), st.integers(1, 148))
def test_each_tile_is_computed_once(rows: int, columns: int, blocks: int) -> None:
    """Blocks go through numbers in steps of their own number, as kernels do."""
    band = band_of(rows)
    assert rows % band == 0
    assert 1 <= band <= BAND
    found = [place(n, rows, band) for block in range(blocks) for n in range(block, rows * columns, blocks)]
    assert sorted(found) == [(row, column) for row in range(rows) for column in range(columns)]


@given(st.integers(1, 40), st.integers(1, 20))
def test_a_band_is_whole_before_the_next(rows: int, columns: int) -> None:
    band = band_of(rows)
    order = [place(n, rows, band) for n in range(rows * columns)]
    assert [column * rows + row for row, column in order] == list(range(rows * columns))


@pytest.mark.parametrize("arch", TILES)
@pytest.mark.parametrize("twice", [False, True])
def test_tiles(arch: str, twice: bool) -> None:
    tiles = tiles_of(arch, twice)
    assert [tile.tokens for tile in tiles] == sorted({tile.tokens for tile in tiles})
    for tile in tiles:
        assert tile.rows in (64, 128)
        assert tile.tokens % 16 == 0
        assert tile.tokens <= (WIDEST if twice and arch == "sm_90a" else 256)
        for line in (LINE, 32):  # 32: weights of 4 bits
            stages = tile.stages(line)
            assert stages >= 3
            assert stages * (tile.rows * line + tile.tokens * LINE) + 2 * stages * 8 + 1024 <= SHARED


@given(st.sampled_from(sorted(TILES)), st.integers(1, 5000), st.booleans())
def test_the_tile_for_some_tokens(arch: str, tokens: int, twice: bool) -> None:
    """The smallest that takes them all, else the largest."""
    tile, tiles = tile_for(arch, tokens, twice), tiles_of(arch, twice)
    assert tile in tiles
    fitting = [each.tokens for each in tiles if each.tokens >= tokens]
    assert tile.tokens == (min(fitting) if fitting else tiles[-1].tokens)


def test_threads_hold_each_value_of_the_left_operand_once() -> None:
    """Each has another place of 64 x 16; pairs lie side by side, and their codes 16 bits apart in a word."""
    places = {fragment(thread, value) for thread in range(THREADS) for value in range(8)}
    assert places == {(row, column) for row in range(64) for column in range(16)}
    for thread in range(THREADS):
        for value in range(0, 8, 2):
            row, column = fragment(thread, value)
            assert fragment(thread, value + 1) == (row, column + 1)
    assert sorted(map(nibble, range(8))) == list(range(8))
    assert all(nibble(value + 1) == nibble(value) + 4 for value in range(0, 8, 2))


@settings(max_examples=20, deadline=None)
@given(st.integers(1, 300), st.integers(1, 300), st.integers(0, 99))
def test_codes_lie_by_piece_and_thread(n: int, k: int, seed: int) -> None:
    codes = torch.randint(0, 16, (n, k), generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)
    words = fragments(codes)
    assert words.shape == (-(-n // 128) * 2, -(-k // PIECE), THREADS, 4)
    assert words.is_contiguous()
    for row, column in ((0, 0), (n - 1, k - 1), (n // 2, k // 3), (n // 3, k // 2)):
        piece = words[row // PIECE, column // PIECE]
        found = [
            int(piece[thread, column % PIECE // 16]) >> 4 * nibble(value) & 15
            for thread in range(THREADS)
            for value in range(8)
            if fragment(thread, value) == (row % PIECE, column % 16)
        ]
        assert found == [int(codes[row, column])]


@settings(max_examples=20, deadline=None)
@given(st.integers(1, 200), st.integers(1, 4), st.sampled_from([torch.bfloat16, torch.float16]), st.booleans())
def test_factors_hold_scales_and_zeros(n: int, groups: int, dtype: torch.dtype, one: bool) -> None:
    noise = torch.Generator().manual_seed(n)
    scales = torch.randn(n, groups, generator=noise).half()
    zeros = 8 if one else torch.randint(0, 16, (n, groups), generator=noise, dtype=torch.uint8)
    codes = torch.randint(0, 16, (n, 32 * groups), generator=noise, dtype=torch.uint8)
    words = factors(Integers(codes, scales, zeros), dtype)
    assert words.shape == (groups, -(-n // 128) * 128)
    low = (words[:, :n] & 0xFFFF).to(torch.int16).view(torch.float16).t()
    high = (words[:, :n] >> 16).to(torch.int16).view(dtype).t().float()
    base = 128 if dtype is torch.bfloat16 else 1024
    weight = (codes.float() + base - high.repeat_interleave(32, 1)) * low.float().repeat_interleave(32, 1)
    assert torch.equal(weight, dequantize(Integers(codes, scales, zeros), 32))
