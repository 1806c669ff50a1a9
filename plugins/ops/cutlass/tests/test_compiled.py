"""The kernels compiled for GPUs that are not here: what they take, and what of a tile each thread holds."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl is not installed")
if find_spec("triton") is None:
    pytest.skip("triton, whose tools read machine code, is not installed", allow_module_level=True)

import cutlass
from cutlass import cute
from lmkit_op_cutlass import sm90, sm90_int4, sm100
from lmkit_op_cutlass.codes import fragment
from lmkit_op_cutlass.tiles import TILES, Tile
from lmkit_testing.triton_budget import SHARED, of_cubin

sys.path.insert(0, str(Path(__file__).parent))
from budgets import CASES, Case

FOR_NO_GPU = "--gpu-arch {} --keep-ptx --keep-cubin --dump-dir={}"


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_within_budget(case: Case, tmp_path: Path) -> None:
    """Registers, no spills, shared memory, and the instructions that the kernel is made for."""
    made, kernel = case.variant.compile(FOR_NO_GPU.format(case.variant.arch, tmp_path)), case.variant.kernel
    line = sm90_int4.BYTES // 64 if case.variant.group is not None else 128
    stage = kernel.tile.rows * line + kernel.tile.tokens * 128
    shared = 1024 + kernel.stages * stage  # barriers, up to where tiles begin
    asked = {int(n) for n in re.findall(r"constant\((\d{5,6}) : i64\)", str(made.ir_module)) if int(n) > 50_000}
    assert shared in asked, "what its host code asks for when it is launched"
    arch = case.variant.arch.removesuffix("a")
    warps = 6 if arch == "sm_100" else 4 + 4 * kernel.groups
    usage = of_cubin(made.__cubin__, shared, warps, opcodes=True)
    assert shared <= SHARED[arch]
    assert usage.spilled == 0
    assert usage.registers <= case.registers
    assert usage.blocks(arch) >= 1
    assert set(case.opcodes) <= usage.opcodes
    assert "local" not in re.findall(r"^\s*(?:ld|st)\.(\w+)", made.__ptx__, re.M)


def traced(look: Callable[[], None], arch: str = "sm_90a") -> None:
    """Runs a function while it is compiled, when numbers that are known are numbers of Python."""
    cute.compile(cute.jit(look), options=f"--gpu-arch {arch}")


@pytest.mark.parametrize("tile", [Tile(64, 16), Tile(128, 32)], ids=str)
def test_threads_hold_each_sum_once(tile: Tile) -> None:
    """`held` goes through all of a tile, and its features and tokens are those that factors are loaded for."""
    kernel, found = sm90.Linear(tile, cutlass.BFloat16, cutlass.BFloat16), Counter()

    def all_of(tiled: Any) -> None:
        for thread, half, eight, one in product(range(128 * kernel.groups), (0, 1), range(tile.tokens // 8), (0, 1)):
            places = tiled.get_slice(thread).partition_C(cute.make_identity_tensor((tile.rows, tile.tokens)))
            place = places[sm90.held(half, eight, one)]
            assert place == (places[sm90.held(half, 0, 0)][0], places[sm90.held(0, eight, one)][1])
            found[place] += 1

    def look() -> None:
        all_of(cute.make_tiled_mma(kernel.instruction(), (kernel.groups, 1, 1)))

    traced(look)
    assert found == Counter(product(range(tile.rows), range(tile.tokens)))


@pytest.mark.parametrize("tokens", [16, 64])
def test_storing_threads_read_each_sum_once(tokens: int) -> None:
    """On Blackwell a thread reads those of one feature."""
    kernel, found = sm100.Linear(Tile(128, tokens), cutlass.BFloat16, cutlass.BFloat16), Counter()

    def all_of(tiled: Any) -> None:
        sums = tiled.make_fragment_C(tiled.partition_shape_C(kernel.shape[:2]))
        for thread in range(128):
            _, _, places = kernel.reads(sums[(None, None), 0, 0], thread)
            for i in range(tokens // sm100.STEP):
                some = places[None, None, None, 0, i]
                assert {some[j][0] for j in range(sm100.STEP)} == {thread}
                found.update(some[j] for j in range(sm100.STEP))

    def look() -> None:
        all_of(cute.make_tiled_mma(kernel.instruction()))

    traced(look, "sm_100a")
    assert found == Counter(product(range(128), range(tokens)))


def test_fragments_are_those_of_the_instruction() -> None:
    """Where codes are put is where wgmma wants them: thread by thread, value by value."""
    kernel, found = sm90_int4.Int4Linear(Tile(128, 16), cutlass.BFloat16, 64), {}

    def all_of(tiled: Any) -> None:
        for thread in range(256):
            places = tiled.get_slice(thread).partition_A(cute.make_identity_tensor((128, 64)))
            found.update({(thread, i): places[i] for i in range(32)})

    def look() -> None:
        all_of(cute.make_tiled_mma(kernel.instruction(), (kernel.groups, 1, 1)))

    traced(look)
    assert len(found) == 256 * 32
    for (thread, i), place in found.items():
        row, column = fragment(thread % 128, i % 8)
        assert place == (row + 64 * (thread // 128), column + 16 * (i // 8))


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU would run them")
@pytest.mark.parametrize("arch", TILES)
def test_calls_reach_the_driver(arch: str) -> None:
    """Operands are those that each kernel was compiled for: what stops a call is that there is no driver."""
    script, environment = Path(__file__).with_name("called.py"), os.environ | {"CUTE_DSL_ARCH": arch}
    done = subprocess.run([sys.executable, script], env=environment, capture_output=True, text=True, timeout=300)
    said = [line.split() for line in done.stdout.splitlines()]
    assert len(said) == (8 if arch == "sm_90a" else 4), done.stderr[-2000:]
    assert {line[1] for line in said} == {"cudaErrorInsufficientDriver"}, done.stdout


def test_tiles_of_every_architecture_are_compiled() -> None:
    assert {(case.variant.arch, case.variant.tile) for case in CASES} == {(a, t) for a in TILES for t in TILES[a]}
