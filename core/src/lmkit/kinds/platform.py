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

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from lmkit.contracts.specs import Ref, Spec
from lmkit.kinds.base import Kind

if TYPE_CHECKING:
    import torch

    from lmkit.contracts.config import EngineConfig
    from lmkit.contracts.device import DeviceInfo
    from lmkit.contracts.execution import Buffer, Collectives, Event, Graphs, StepLimits
    from lmkit.contracts.model import ModelInfo


class Platform(Protocol):
    """A kind of device. One object per process; passed to whoever needs it, never a global."""

    name: str
    device_type: str

    def worker_env(self, config: EngineConfig, rank: int) -> dict[str, str]:
        """Environment of a worker process; set there before torch is imported, only there (thread counts, affinity)."""

    def bind(self, rank: int, threads: int | None = None) -> torch.device:
        """In the worker: select the device, memory policy and thread pool. `threads`: how many the user wants."""

    def free_memory(self) -> int:
        """Bytes that can still be allocated on the device."""

    def measure(self, work: Callable[[], None]) -> int | None:
        """Bytes that `work` takes of the device at its most; None: this platform does not measure, nothing was run."""

    def defaults(self, model: ModelInfo, device: DeviceInfo) -> dict[str, object]:
        """Suggested configuration values ("cache.block_size": 16); values of the user win."""

    def upload(self, source: torch.Tensor) -> torch.Tensor:
        """A tensor of the host, on the device; there it may be the same. Else the source may change at once."""

    def buffer(self, shape: tuple[int, ...], dtype: torch.dtype) -> Buffer: ...
    def event(self) -> Event: ...
    def graphs(self, limits: StepLimits) -> Graphs: ...
    def collectives(self, rank: int, size: int, init_method: str = "") -> Collectives:
        """`init_method`: where several ranks find each other, as torch.distributed names it: "file://..." on one host,
        "tcp://host:port" between hosts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlatformSpec(Spec):
    """target: a Platform class; its module imports torch in the worker's methods only, for the resolver asks it for
    `defaults` and the parent for `worker_env`.

    `probe` is torch-free: () -> list[DeviceInfo] | Unavailable, no device context."""

    probe: Ref
    device_type: str  # torch device type
    prefers: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # kind -> names, best first (measured)
    describe: Ref | None = None  # (model or "", total_memory) -> DeviceInfo for "name:model:80GB"; torch-free
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
