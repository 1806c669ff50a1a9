"""Tile registers (AMX), on processors without: the same kernels, with each tile instruction in plain C."""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess
import sys
from hashlib import sha256
from pathlib import Path

import pytest
import torch
from lmkit.api import AttnNeed
from lmkit_bench.pages import PlainPlatform
from lmkit_platform_cpu import integer, packed
from lmkit_platform_cpu.native import Native, load
from lmkit_testing.attention import Rows

FOLDER = Path(__file__).parent
CSRC = FOLDER.parent / "csrc"
COMPILER = shutil.which("g++") or shutil.which("clang++")
LIBRARY = load()
pytestmark = [
    pytest.mark.skipif(COMPILER is None, reason="no C++ compiler here"),
    pytest.mark.skipif(
        LIBRARY is None or "avx512_bf16" not in LIBRARY.isas, reason="the rest of these kernels needs AVX512-BF16"
    ),
]


def build(*families: str) -> Path:
    """The library with these families of operators for tile registers only, emulated (csrc/amx_emulated.inc).

    Kept beside other builds under a hash of what it is made from: compiled again when that has changed.
    """
    assert COMPILER is not None
    sanitize = os.environ.get("SANITIZE")  # as in setup.py
    flags = ["-std=c++17", "-O1", "-w", "-fPIC", "-shared", "-pthread", "-fvisibility=hidden", "-ffp-contract=off"]
    flags += [f"-fsanitize={sanitize}", "-fno-sanitize-recover=all"] if sanitize else []
    flags += ["-DLK_EMULATE_AMX", "-DFAMILIES(X)=" + "".join(f"X({family})" for family in families)]
    sources = [CSRC / f"{name}.cpp" for name in (*families, "pool", "registry")]
    made_from = sha256(f"{COMPILER} {flags}".encode())
    for path in sorted(CSRC.iterdir()):
        made_from.update(path.read_bytes())
    library = FOLDER.parent / "build" / "emulated" / f"{made_from.hexdigest()[:16]}.so"
    if not library.exists():
        library.parent.mkdir(parents=True, exist_ok=True)
        part = library.with_suffix(f".{os.getpid()}")  # another process may compile the same
        subprocess.run([COMPILER, *flags, *map(str, sources), "-o", str(part)], check=True, timeout=600)
        part.replace(library)
    return library


def test_products() -> None:
    """bfloat16 within its rounding, integers bit for bit as without tiles; where there are tiles, as those do it."""
    assert LIBRARY is not None
    emulated = Native(build("linear", "integer"))
    assert emulated.isas == ("amx",)
    noise = torch.Generator().manual_seed(0)
    for rows, (n, k) in itertools.product((1, 9, 16, 49), ((33, 7), (70, 333), (40, 128))):
        weight = torch.randn(n, k, generator=noise).bfloat16()
        x = torch.full((rows, k + 3), torch.nan, dtype=torch.bfloat16)[:, :k]
        x.copy_(torch.randn(rows, k, generator=noise))
        plain = packed.pack(LIBRARY, weight, torch.bfloat16)
        got, expected = packed.linear(emulated, x, plain), x.double() @ weight.double().T
        assert (got.double() - expected).abs().max() <= 1e-2 * expected.abs().max()
        assert torch.equal(packed.linear(emulated, x[-1:], plain)[0], got[-1]), "whatever its neighbours"
        if "amx" in LIBRARY.isas:
            assert LIBRARY.isa == "amx", "auto takes it"
            assert torch.equal(packed.linear(LIBRARY, x, plain), got)
        for bits, group, planes in itertools.product((8, 4), (0, 64), (1, 2)):
            codes = integer.round_and_pack(LIBRARY, weight, bits, group, planes, "range" if bits == 4 else "symmetric")
            assert torch.equal(integer.linear(emulated, x, codes), integer.linear(LIBRARY, x, codes))


class NativePlatform(PlainPlatform):
    def __init__(self, native: Native) -> None:
        super().__init__()
        self.native = native


def run_emulated(library: Path, tests: list[Path], chosen: str) -> None:
    """These tests with the emulated library in place of the installed one, in another process."""
    code = (
        "import sys, pytest, lmkit_platform_cpu.native as native\n"
        "library = native.Native(sys.argv[1])\n"
        "native.load = lambda: library\n"
        "sys.exit(pytest.main(['-q', '-p', 'no:cacheprovider', '-k', *sys.argv[2:]]))\n"
    )
    command = [sys.executable, "-P", "-c", code, str(library), chosen, *map(str, tests)]
    subprocess.run(command, check=True, timeout=3600)


@pytest.mark.slow
def test_grids() -> None:
    """All tests of linears and experts on the emulated library; not those that need another instruction set."""
    tests = [FOLDER / f"test_{name}.py" for name in ("packed", "integer", "experts")]
    run_emulated(build("linear", "integer", "experts"), tests, "not works_alone and not stay_plain")


@pytest.mark.slow
def test_attention_emulated() -> None:
    """The backend's tests; not those that need another family of operators."""
    pytest.importorskip("lmkit_attention_cpu")
    tests = FOLDER.parents[2] / "attention" / "cpu" / "tests" / "test_cpu_attention.py"
    run_emulated(build("attention"), [tests], "not turned and not rotat")


@pytest.mark.full
def test_attention() -> None:
    """Prompts and decoding by tile registers: what they compute is what the emulation does, bit for bit."""
    backend = pytest.importorskip("lmkit_attention_cpu.backend")
    assert LIBRARY is not None
    libraries = [Native(build("attention"))] + ([LIBRARY] if "amx" in LIBRARY.isas else [])
    noise = torch.Generator().manual_seed(0)
    for kv_dtype, dim, block_size in (
        ("bfloat16", 64, 32),
        ("bfloat16", 48, 16),
        ("int8", 64, 48),
        ("float8_e5m2", 80, 32),
    ):
        need = AttnNeed(dim, 6, 2, "bfloat16", kv_dtype, block_size)
        steps = [[(0, 550), (1, 3)], [(0, 1), (1, 40)], [(0, 1)]]
        inputs = [
            [torch.randn(sum(n for _, n in work), heads, dim, generator=noise).bfloat16() for heads in (6, 2, 2)]
            for work in steps
        ]
        results = []
        for library in libraries:
            rows = Rows(backend.CpuAttention(), need, num_rows=2, platform=NativePlatform(library), length=640)
            for work, (q, k, v) in zip(steps, inputs, strict=True):
                plan = rows.planner.plan(rows.paged.grow(work))
                rows.backend.write_kv(k, v, rows.kv, plan.slots)
                results.append(torch.full_like(q, torch.nan))
                rows.backend.forward(q, rows.kv, plan, dim**-0.5, results[-1])
        assert all(r.isfinite().all() for r in results)
        for one, other in zip(results[: len(steps)], results[len(steps) :], strict=False):
            assert torch.equal(one, other)
