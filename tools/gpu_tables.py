"""The tables of docs/gpu.md: what declares that it runs on a GPU, and what proves its features on each device."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from importlib import import_module
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
DEVICES = "## Plugins of GPUs\n\n"
BY_DEVICE = "\n### Features by device\n\n"
PROVEN = {  # plugin -> what has shown that it is right; a run on a GPU is named here with its date and device
    "attention triton": "H100, 2026-11-27; laboratory, compiled ahead, simulated device",
    "attention flashinfer": "H100, 2026-11-26: time alone, heads of 128; contract, simulated device",
    "op fp8_scaled_mm": "the same operator of torch on a CPU",
    "attention flash_attn": "contract",
    "attention flash_attn_3": "contract",
    "attention flex": "not compiled, and compiled for CPUs",
    "op fp8_cutlass": "H100, 2026-11-27; compiled ahead; plain torch with its addresses",
    "op int4_cutlass": "H100, 2026-11-27; compiled ahead; plain torch with its addresses",
    "op linear_cutlass": "H100, 2026-11-27; compiled ahead; plain torch with its addresses",
    "op fp8_triton": "H100, 2026-11-27; laboratory, compiled ahead, simulated device",
    "op linear_triton": "H100, 2026-11-27; laboratory, compiled ahead, simulated device",
    "op moe_triton": "laboratory, compiled ahead, simulated device",
    "op plain_triton": "H100, 2026-11-27; laboratory, compiled ahead",
    "op rowwise_triton": "H100, 2026-11-27; laboratory, compiled ahead, simulated device",
    "op recurrent_triton": "laboratory, compiled ahead, simulated device",
    "platform cuda": "H100, 2026-11-26; simulated device; probes on stand-ins for NVML",
    "platform rocm": "simulated device; probes on stand-ins for sysfs",
}
NVIDIA = {"sm_80": (8, 0), "sm_89": (8, 9), "sm_90": (9, 0), "sm_100": (10, 0), "sm_120": (12, 0)}
ALL = (*NVIDIA, "gfx942", "gfx950", "gfx1100")
# What shows values where nothing is compiled for a device. "laboratory" is of every kernel of Triton.
ELSE = {"flash_attn": "contract", "flash_attn_3": "contract", "flashinfer": "contract", "flex": "CPU"}
CUTLASS = {"linear_cutlass", "fp8_cutlass", "int4_cutlass"}
RUN = {  # what an H100 has run and found right, with the kernel as it is
    "triton", "linear_triton", "fp8_triton", "plain_triton", "rowwise_triton", "linear_cutlass", "fp8_cutlass",
    "int4_cutlass",
}  # fmt: skip
Is = Callable[[Any, Any], bool]  # of a case's constants and types
ATTENTION: dict[str, Is] = {
    "causal": lambda c, t: c["CAUSAL"],
    "bidirectional": lambda c, t: not c["CAUSAL"] and not c["WINDOW"],
    "bidirectional_window": lambda c, t: not c["CAUSAL"] and c["WINDOW"] > 0,
    "sliding_window": lambda c, t: c["CAUSAL"] and c["WINDOW"] > 0 and not c["CHUNKED"],
    "chunked": lambda c, t: c["CHUNKED"],
    "softcap": lambda c, t: c["SOFTCAP"],
    "sinks": lambda c, t: c["SINKS"],
    "alibi": lambda c, t: c["ALIBI"],
    "mla": lambda c, t: c["REST"] > 0,
    "cache float8_e4m3fn": lambda c, t: t["kv"] == "*fp8e4nv",
    "cache float8_e5m2": lambda c, t: t["kv"] == "*fp8e5",
    "cache int8": lambda c, t: c["INT8"],
}
CODES, BYTES = "linear_kernels.multiply_codes", "linear_kernels.multiply_bytes"
EXPERTS, CODED = "moe_kernels.multiply", "moe_kernels.multiply_codes"
OPS: dict[str, dict[str, tuple[str, Is]]] = {  # op -> its features: whose kernel, and which of its cases
    "linear_triton": {
        "4 bits": (CODES, lambda c, t: c["BITS"] == 4),
        "8 bits": (CODES, lambda c, t: c["BITS"] == 8),
        "8 bits, activations too": (BYTES, lambda c, t: t["x"] == "*i8"),
    },
    "fp8_triton": {
        "weights alone": ("linear_kernels.multiply_wide", lambda c, t: True),
        "activations too": (BYTES, lambda c, t: t["x"] == "*fp8e4nv"),
    },
    "moe_triton": {
        "plain": (EXPERTS, lambda c, t: not c["FLOAT8"]),
        "float8": (EXPERTS, lambda c, t: c["FLOAT8"]),
        "4 bits": (CODED, lambda c, t: c["BITS"] == 4),
        "8 bits": (CODED, lambda c, t: c["BITS"] == 8),
    },
    "plain_triton": {"up to 16 rows": ("row_kernels.few_rows", lambda c, t: True)},
    "rowwise_triton": {"all": ("kernels.norm", lambda c, t: True)},
    "recurrent_triton": {
        "convolutions": ("recurrent_kernels.conv", lambda c, t: True),
        "scans": ("recurrent_kernels.ssd", lambda c, t: True),
        "delta rules": ("recurrent_kernels.delta", lambda c, t: True),
    },
}


def gpu_page(page: str, specs: Callable[[str], list[Any]]) -> str:
    """The page with both tables made anew. KeyError: nothing proves a plugin."""
    found = [
        (kind, spec)
        for kind in ("platform", "attention", "op")
        for spec in sorted(specs(kind), key=lambda spec: spec.name)
        if {"cuda", "rocm"} & set((spec.name,) if kind == "platform" else spec.platforms)
    ]
    rows = ["| plugin | platforms | dtypes | caches | features | proven by |", "|---|---|---|---|---|---|"]
    for kind, spec in found:
        platforms = (spec.name,) if kind == "platform" else spec.platforms
        cells = (getattr(spec, name, ()) for name in ("dtypes", "kv_dtypes", "features"))
        shown = " | ".join(", ".join(sorted(cell)) for cell in cells)
        proof = PROVEN[f"{kind} {spec.name}"]
        rows.append(f"| {kind} `{spec.name}` | {', '.join(platforms)} | {shown} | {proof} |")
    before, _, rest = page.partition(DEVICES)
    if find_spec("triton") is None:  # whose kernels the second table is made from
        return before + DEVICES + "\n".join(rows) + "\n" + BY_DEVICE + rest.partition(BY_DEVICE)[2]
    return before + DEVICES + "\n".join(rows) + "\n" + BY_DEVICE + ABOUT + "\n".join(by_device(found)) + "\n"


ABOUT = """*compiled*: the kernel is compiled for that device and within its budget, and the laboratory finds its values
right (of CUTLASS: plain torch does). *laboratory*: its values alone. *H100*: one has run it and found it right, and it
is compiled, too. *contract*: its calls are those that the library's own code takes. *CPU*: the same code runs there.
*torch*: the operator is torch's own. –: refused. Of all these H100 alone is a run on a GPU.

"""


def by_device(found: Iterable[tuple[str, Any]]) -> list[str]:
    """A line for each feature of each plugin."""
    rows = ["| plugin | feature | " + " | ".join(ALL) + " |", "|---" * (2 + len(ALL)) + "|"]
    attention, ops = cases("attention"), cases("ops")
    for kind, spec in found:
        features: dict[str, set[str] | None] = {}  # with the devices that it is compiled for
        if kind == "attention":
            names = sorted(spec.features) + [f"cache {name}" for name in sorted(spec.kv_dtypes) if name != "auto"]
            for name in names:
                of = compiled(attention, "kernels.attend", ATTENTION[name]) if spec.name == "triton" else None
                features[name] = of
        elif kind == "op":
            for name, (kernel, which) in OPS.get(spec.name, {}).items():
                features[name] = compiled(ops, kernel, which)
            if not features:
                features = {", ".join(sorted(spec.formats)): None}
        alike: dict[str, list[str]] = {}
        for name, devices in features.items():
            cells = " | ".join(cell(kind, spec, device, name, devices) for device in ALL)
            alike.setdefault(cells, []).append(name)
        rows += [f"| `{spec.name}` | {', '.join(names)} | {cells} |" for cells, names in alike.items()]
    return rows


def cell(kind: str, spec: Any, device: str, feature: str, compiled: set[str] | None) -> str:
    """What shows that a plugin's feature runs on a device; – where it declares that it does not."""
    if refused(kind, spec, device, feature) or (kind == "op" and compiled is not None and device not in compiled):
        return "–"
    if compiled is None and spec.name not in CUTLASS:
        return ELSE.get(spec.name, "torch")
    if compiled is not None and device not in compiled:
        return "laboratory"
    return "H100" if device == "sm_90" and spec.name in RUN else "compiled"


def refused(kind: str, spec: Any, device: str, feature: str) -> bool:
    """Whether it does not declare that device, or its check refuses a cache there."""
    from lmkit.api import AttentionRequest, AttnNeed, DeviceInfo

    capability = NVIDIA.get(device)
    platform = "cuda" if capability else "rocm"
    if platform not in spec.platforms or (capability and spec.capability and capability not in spec.capability):
        return True
    if kind != "attention" or not feature.startswith("cache ") or not spec.check:
        return False
    module, _, name = spec.check.partition(":")
    described = DeviceInfo(platform, "cuda", device, capability, described=True)
    need = AttnNeed(128, 32, 8, "bfloat16", feature.removeprefix("cache "))
    return bool(list(getattr(import_module(module), name)(AttentionRequest(need=need, device=described))))


def cases(kind: str) -> list[Any]:
    """The cases of the budgets of a plugin of Triton's kernels."""
    for path in ("tests/kit/src", f"plugins/{kind}/triton/src"):
        if str(ROOT / path) not in sys.path:
            sys.path.insert(0, str(ROOT / path))
    spec = spec_from_file_location(f"budgets_of_{kind}", ROOT / "plugins" / kind / "triton" / "tests" / "budgets.py")
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return list(module.CASES)


def compiled(found: Iterable[Any], kernel: str, which: Is) -> set[str]:
    """The devices for which any such case is compiled."""
    return {
        device
        for case in found
        if f"{case.kernel.__module__.rpartition('.')[2]}.{case.kernel.__name__}" == kernel
        and which(case.constants, case.types)
        for device in case.archs
    }
