"""Kinds of device. `probe` says, without torch and without a device context, which devices are here.

Example, entry point `[project.entry-points."lmkit.platform"] toy = "toy_platform.hooks"`::

    from lmkit.api import DeviceInfo, PlatformSpec, Tier, hookimpl


    def probe():
        return [DeviceInfo(platform="toy", device_type="cpu", dtypes=("float32",))]


    @hookimpl
    def lmkit_platforms():
        yield PlatformSpec(
            name="toy", summary="A pretend device", target="toy_platform.device:ToyPlatform",
            probe=f"{__name__}:probe", device_type="cpu", tier=Tier.REFERENCE,
        )
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from lmkit.contracts.specs import Ref, Spec
from lmkit.kinds.base import Kind


@dataclass(frozen=True, slots=True, kw_only=True)
class PlatformSpec(Spec):
    """target: a Platform class; its module imports torch in the worker's methods only, for the resolver asks it for
    `defaults` and the parent for `worker_env`.

    `probe` is torch-free: () -> list[DeviceInfo] | Unavailable, no device context."""

    probe: Ref
    device_type: str  # torch device type
    prefers: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # kind -> names, best first (measured)
    describe: Ref | None = None  # (capability | None, total_memory) -> DeviceInfo for "name:9.0:80GB"; torch-free
    fallback: bool = False  # True: runs anywhere, chosen when no accelerator is available


KIND = Kind(
    "platform",
    spec=PlatformSpec,
    hook="lmkit_platforms",
    used_by="lmkit.engine.platform",
    setting="platform",
    words="auto or a platform plugin's name",
    doc=__doc__,
)
