"""Triton kernels compiled for GPUs that are not here, and what their machine code takes, against a budget.

    python -m lmkit_testing.triton_budget MODULE [ARCH...]

MODULE has `CASES`: what each kernel is compiled with, and what it may take. Neither a GPU nor a driver is needed; but
TRITON_INTERPRET must not be set, so this runs in a process of its own. One line is printed per case and device; the
exit status is 1 when one is over its budget.

The first case of each kernel is compiled for every device, and every other one for a device of each family, turn about:
what it takes of NVIDIA's is held against the shared memory and the threads of the others, too. `BUDGETS=all` in the
environment, or devices that are named, compile every case for each.
"""

from __future__ import annotations

import gc
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

# Bytes of shared memory that a block may have
SHARED: Mapping[str, int] = {
    "sm_80": 166_912, "sm_89": 101_376, "sm_90": 232_448, "sm_100": 232_448, "sm_120": 101_376,
    "gfx942": 65_536, "gfx950": 163_840, "gfx1100": 65_536,
}  # fmt: skip
REGISTERS = 65_536  # of a multiprocessor
THREADS: Mapping[str, int] = {"sm_80": 2048, "sm_89": 1536, "sm_90": 2048, "sm_100": 2048, "sm_120": 1536}
MULTIPROCESSOR: Mapping[str, int] = {  # its shared memory
    "sm_80": 167_936, "sm_89": 102_400, "sm_90": 233_472, "sm_100": 233_472, "sm_120": 102_400,
}  # fmt: skip
NO_SPILLS = 0
FAMILIES = (  # matrix units of a warp, and of a group of warps or a block; of AMD's the third has fewer registers
    ("sm_80", "sm_89", "sm_120"), ("sm_90", "sm_100"), ("gfx942", "gfx950", "gfx1100"),
)  # fmt: skip


@dataclass(frozen=True)
class Case:
    """A kernel with the types of its arguments ("*bf16", "i32", "fp32"; constants by value) and its budget."""

    kernel: Any
    types: Mapping[str, str]
    constants: Mapping[str, Any]
    warps: int = 4
    stages: int = 2
    unaligned: Sequence[str] = ()  # arguments that need not be multiples of 16, beside floats
    registers: int = 255
    limit: int = 0  # of registers that the launch sets; 0: none
    blocks: int = 1  # per multiprocessor, at least
    opcodes: Sequence[str] = ()  # that NVIDIA's machine code must have
    spills: Mapping[str, int] = field(default_factory=dict)  # registers by device, where some are let through
    archs: Sequence[str] = tuple(SHARED)
    everywhere: bool = False  # compiled for each of them at all times, as the first case of a kernel is
    note: str = ""

    @property
    def name(self) -> str:
        return f"{self.kernel.__name__}{f' {self.note}' if self.note else ''}"


@dataclass(frozen=True)
class Usage:
    """What one kernel takes on one device."""

    registers: int
    spilled: int  # registers of AMD's; bytes of stack of NVIDIA's
    shared: int
    warps: int
    opcodes: frozenset[str]

    def blocks(self, arch: str) -> int:
        """How many a multiprocessor of NVIDIA's has room for."""
        block = -(-self.registers * 32 // 256) * 256 * self.warps
        of_memory = MULTIPROCESSOR[arch] // (self.shared + 1024)
        return min(REGISTERS // block, THREADS[arch] // (32 * self.warps), of_memory, 32)


def compiled(case: Case, arch: str) -> Usage:
    """Raises what the compiler raises."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    amd = arch.startswith("gfx")
    target = (
        GPUTarget("hip", arch, 64 if arch.startswith("gfx9") else 32) if amd else GPUTarget("cuda", int(arch[3:]), 32)
    )
    signature = {**case.types, **dict.fromkeys(case.constants, "constexpr")}
    names: list[str] = case.kernel.arg_names
    bind(case, target)
    aligned = [n for n, t in case.types.items() if t.startswith(("*", "i")) and n not in case.unaligned]
    attributes = {(names.index(name),): [["tt.divisibility", 16]] for name in aligned}
    ordered = {name: signature[name] for name in names}
    constants = {(names.index(name),): value for name, value in case.constants.items()}
    source = ASTSource(fn=case.kernel, signature=ordered, constexprs=constants, attrs=attributes)
    options = {"num_warps": case.warps, "num_stages": case.stages}
    if case.limit:
        options["maxnreg"] = case.limit
    made = triton.compile(source, target=target, options=options)
    shared = made.metadata.shared
    if amd:
        text = made.asm["amdgcn"]
        found = {key: int(value) for key, value in re.findall(r"\.(vgpr_count|vgpr_spill_count):?\s+(\d+)", text)}
        return Usage(found["vgpr_count"], found["vgpr_spill_count"], shared, case.warps, frozenset())
    return of_cubin(made.asm["cubin"], shared, made.metadata.num_warps, bool(case.opcodes))


def bind(case: Case, target: Any) -> None:
    """Gives the launcher an argument for each of the kernel's, as a launch does: it has names of its own, and a kernel
    whose argument is called like one of them (`params`) compiles and cannot be launched. Raises what it raises."""
    from triton.compiler.compiler import make_backend
    from triton.runtime.jit import create_function_from_signature

    given = {name: 1.0 if kind.startswith(("fp", "bf")) else 16 for name, kind in case.types.items()}
    launcher = create_function_from_signature(case.kernel.signature, case.kernel.params, make_backend(target))
    launcher(**given, **case.constants)


def of_cubin(cubin: bytes, shared: int, warps: int, opcodes: bool) -> Usage:
    """Read by the tools in Triton's wheel: a kernel says nothing of itself where there is no driver. Its `opcodes` take
    longer than all else."""
    usage = _said("--dump-resource-usage", cubin)
    fields = {key: int(value) for key, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", usage)}
    names = frozenset[str]()
    if opcodes:
        code = _said("--dump-sass", cubin)
        found = re.findall(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]*)", code, re.M)
        names = frozenset(name for op in found for name in (op, op.partition(".")[0]))
    return Usage(fields["REG"], fields["STACK"] + fields["LOCAL"], shared, warps, names)


def _said(how: str, cubin: bytes) -> str:
    found = find_spec("triton")
    assert found is not None
    assert found.origin is not None
    tool = Path(found.origin).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run([tool, how, file.name], capture_output=True, text=True, check=True).stdout


def over(case: Case, arch: str, usage: Usage, like: Sequence[str] = ()) -> list[str]:
    """What is beyond the budget. `like`: devices for which the case isn't compiled, as it is for this one."""
    found = []
    for each in (arch, *(other for other in like if not other.startswith("gfx"))):  # AMD's each use memory their way
        of = f" of {each}" if each != arch else ""
        if usage.shared > SHARED[each]:
            found.append(f"{usage.shared} bytes of shared memory, a block{of} has {SHARED[each]}")
        if not each.startswith("gfx") and usage.blocks(each) < case.blocks:
            found.append(f"{usage.blocks(each)} blocks per multiprocessor{of}, {case.blocks} are planned")
    if usage.spilled > case.spills.get(arch, NO_SPILLS):
        found.append(f"{usage.spilled} spilled")
    if not arch.startswith("gfx"):
        if usage.registers > case.registers:
            found.append(f"{usage.registers} registers, {case.registers} are planned")
        found += [f"no {op} in its machine code" for op in case.opcodes if op not in usage.opcodes]
    return found


def asked(
    cases: Sequence[Case], archs: Sequence[str] = (), every: bool = False
) -> Iterator[tuple[Case, str, list[str]]]:
    """What to compile for which device, and what devices that stands for besides."""
    seen = Counter[str]()
    for case in cases:
        turn = seen[case.kernel.__name__]
        seen[case.kernel.__name__] += 1
        for family in FAMILIES:
            able = [arch for arch in family if arch in case.archs]
            if every or archs or case.everywhere or turn == 0:
                yield from ((case, arch, []) for arch in able if not archs or arch in archs)
            elif able:
                arch = able[turn % len(able)]
                yield case, arch, [other for other in able if other != arch]


def within_budget(folder: Path) -> None:
    """Runs this module on `budgets` in that folder; AssertionError with what is over."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment |= {"PYTHONPATH": str(folder), "TRITON_DEFAULT_FP_FUSION": "1"}  # it warns where nobody says
    command = [sys.executable, "-m", "lmkit_testing.triton_budget", "budgets"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    lines = [line for line in done.stdout.splitlines() if "OVER" in line] or [done.stderr[-2000:]]
    assert done.returncode == 0, "\n".join(lines)


def main(arguments: Sequence[str]) -> int:
    os.environ.setdefault("TRITON_CACHE_DIR", tempfile.mkdtemp())
    cases: Sequence[Case] = import_module(arguments[0]).CASES
    gc.freeze()  # torch's objects: there are many, and each collection would look at all
    failed = 0
    for case, arch, like in asked(cases, arguments[1:], os.environ.get("BUDGETS") == "all"):
        try:
            usage = compiled(case, arch)
            problems = over(case, arch, usage, like)
            blocks = "" if arch.startswith("gfx") else f", {usage.blocks(arch)} blocks"
            said = f"{usage.registers} registers, {usage.shared} B shared{blocks}"
        except Exception as e:
            problems, said = [f"{type(e).__name__}: {str(e).strip().splitlines()[-1:]}"], "not compiled"
        failed += bool(problems)
        print(f"{arch} {case.name}: {said}{'; OVER: ' + '; '.join(problems) if problems else ''}", flush=True)
    return int(bool(failed))


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
