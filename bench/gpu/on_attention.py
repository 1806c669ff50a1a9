"""Every backend of the platform that is installed, on its declared grid against dense attention in float64.

Each point of the grid has kernels of its own to be compiled: the grid is divided, so that several processes share it.
"""

from __future__ import annotations

from typing import Any

from conformance import ELSEWHERE, tested
from lmkit_testing import AttentionConformance

MACHINE = tested()
PLATFORM = MACHINE.bind()
PARTS = 24 if MACHINE.kind != "cpu" else 1


class OnDevice(AttentionConformance):
    """With the platform's own buffers and events."""

    device = str(MACHINE.device)
    device_info = MACHINE.info

    def platform(self) -> Any:
        return PLATFORM


class Part(OnDevice):
    """A part of the grid, and nothing else."""

    part = 0

    def grid(self, spec: Any, backend: Any) -> Any:
        return super().grid(spec, backend)[self.part :: PARTS]


GRID = "test_declared_grid"
OTHERS = {name: None for name in dir(AttentionConformance) if name.startswith("test_") and name != GRID}
for _name in MACHINE.offered("attention"):
    _about = {**ELSEWHERE, "__module__": __name__, "plugin": f"attention:{_name}"}
    for _i in range(PARTS):
        _class = f"Test_{_name}_{_i}"
        globals()[_class] = type(_class, (Part,), {**_about, **OTHERS, "part": _i})
    globals()[f"Test_{_name}"] = type(f"Test_{_name}", (OnDevice,), {**_about, GRID: None})
del OnDevice, Part
