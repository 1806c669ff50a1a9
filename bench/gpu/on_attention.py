"""Every backend of the platform that is installed, on its declared grid against dense attention in float64."""

from __future__ import annotations

from typing import Any

from conformance import ELSEWHERE, tested
from lmkit_testing import AttentionConformance

MACHINE = tested()
PLATFORM = MACHINE.bind()


class OnDevice(AttentionConformance):
    """With the platform's own buffers and events."""

    device = str(MACHINE.device)
    device_info = MACHINE.info

    def platform(self) -> Any:
        return PLATFORM


for _name in MACHINE.offered("attention"):
    _class = f"Test_{_name}"
    globals()[_class] = type(_class, (OnDevice,), {**ELSEWHERE, "__module__": __name__, "plugin": f"attention:{_name}"})
del OnDevice
