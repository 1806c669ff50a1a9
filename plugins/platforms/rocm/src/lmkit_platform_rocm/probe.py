"""Which AMD GPUs a process would see, without torch and without a device context: what the driver shows under /sys.

No driver means Unavailable.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
from lmkit.api import ConfigError, DeviceInfo, Unavailable
from lmkit_gpu.budget import process_bytes

TOPOLOGY = Path("sys/class/kfd/kfd/topology/nodes")
OVERRIDE = "HSA_OVERRIDE_GFX_VERSION"  # "11.0.0": ROCm then takes every GPU for a gfx1100


def probe(root: Path = Path("/"), environ: Mapping[str, str] | None = None) -> list[DeviceInfo] | Unavailable:
    """The GPUs that the environment leaves visible, numbered as the process will see them.

    `root` stands for the file system in tests.
    """
    environ = os.environ if environ is None else environ
    if not (root / TOPOLOGY).is_dir():
        fix = "load the amdgpu driver: amd-smi then lists the GPUs"
        return Unavailable("no AMD GPU driver (nothing in /sys/class/kfd)", fix)
    if not (root / "dev/kfd").exists():
        fix = "give the container the GPUs: --device /dev/kfd --device /dev/dri"
        return Unavailable("there is no /dev/kfd, through which GPUs compute", fix)
    nodes = sorted((root / TOPOLOGY).iterdir(), key=lambda node: int(node.name))
    devices = [device for node in nodes if (device := _device(root, node, environ.get(OVERRIDE))) is not None]
    if not devices:
        return Unavailable("the driver reports no GPU that this process may open")
    hip = "HIP_VISIBLE_DEVICES" if environ.get("HIP_VISIBLE_DEVICES") else "CUDA_VISIBLE_DEVICES"
    for variable in ("ROCR_VISIBLE_DEVICES", hip):  # one after the other: the second counts what the first leaves
        setting = environ.get(variable)
        devices = _visible(devices, setting)
        if not devices:
            return Unavailable(f"{variable}={setting} hides every GPU", f"unset {variable}")
    return devices


def describe(model: str, total_memory: int) -> DeviceInfo:
    """The device a user describes by the name of its instruction set, "gfx942", which is also what none given means.

    Raises ConfigError.
    """
    model = model or "gfx942"
    if re.fullmatch(r"gfx[1-9]\d?\d[0-9a-f]", model) is None:
        raise ConfigError(f"{model!r} is no name of an instruction set", fix="for example rocm:gfx942:192GB")
    return _info(model, total_memory, total_memory, described=True)


def _info(model: str, total: int, free: int, name: str = "", uuid: str = "", described: bool = False) -> DeviceInfo:
    """Flags: the instruction set, whose version is the capability (gfx942: 9.4), and the GPU's name in variables."""
    capability = (int(model[3:-2]), int(model[-2], 16))
    return DeviceInfo(
        platform="rocm",
        device_type="cuda",
        name=name or model,
        capability=capability,
        total_memory=total,
        free_memory=free,
        process_bytes=process_bytes(total),
        dtypes=dtypes(model),
        flags=(model, uuid) if uuid else (model,),
        described=described,
    )


def dtypes(model: str) -> tuple[str, ...]:
    """Matrix arithmetic in bfloat16 began with gfx908, and with gfx11 where graphics came first."""
    version = (int(model[3:-2]), model[-2:])
    bfloat16 = ("bfloat16",) if version >= (11, "") or (version[0] == 9 and version[1] >= "08") else ()
    return (*bfloat16, "float16", "float32")


def _device(root: Path, node: Path, override: str | None) -> DeviceInfo | None:
    """The GPU of a node of the topology; None for processors, and for what this process was not given."""
    try:
        fields = dict(line.split(maxsplit=1) for line in (node / "properties").read_text().splitlines() if " " in line)
    except PermissionError:  # as a container's limits have it
        return None
    version = int(fields.get("gfx_target_version", 0))
    render = f"renderD{fields.get('drm_render_minor', '')}"
    if not version or not (root / "dev/dri" / render).exists():
        return None
    if override:
        major, minor, step = map(int, override.split("."))
    else:
        major, minor, step = version // 10000, version // 100 % 100, version % 100
    card = root / "sys/class/drm" / render / "device"
    total, used = (_number(card / f"mem_info_vram_{what}") for what in ("total", "used"))
    unique = int(fields.get("unique_id", 0))
    product = card / "product_name"
    name = product.read_text().strip() if product.exists() else ""
    uuid = f"GPU-{unique:016x}" if unique else ""
    return _info(f"gfx{major}{minor:x}{step:x}", total, total - used, name, uuid)


def _number(path: Path) -> int:
    return int(path.read_text()) if path.exists() else 0


def _visible(devices: Sequence[DeviceInfo], setting: str | None) -> list[DeviceInfo]:
    """Numbers or UUIDs, in that order, up to the first that names no GPU; the indices are those of the answer."""
    chosen = list(devices)
    if setting is not None:
        chosen = []
        for item in (part.strip() for part in setting.split(",")):
            found = [d for i, d in enumerate(devices) if item == str(i) or item in d.flags[1:]]
            if not found:
                break
            chosen += found
    return [msgspec.structs.replace(device, index=index) for index, device in enumerate(chosen)]
