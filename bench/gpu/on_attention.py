"""Every backend of the platform that is installed, on its declared grid against dense attention in float64."""

from __future__ import annotations

from typing import Any

from conformance import ELSEWHERE, tested
from lmkit.api import AttentionSpec
from lmkit.plugins.host import PluginHost
from lmkit_testing import AttentionConformance

MACHINE = tested()
PLATFORM = MACHINE.bind()


class OnDevice(AttentionConformance):
    """With the platform's own buffers and events."""

    device = str(MACHINE.device)
    device_info = MACHINE.info

    def platform(self) -> Any:
        return PLATFORM


def backends() -> list[str]:
    """Those that say they are for the platform, or for any."""
    host = PluginHost()
    specs = {name: host.load("attention", name) for name in host.names("attention")}
    asked = {"*", MACHINE.platform}
    return [name for name, spec in specs.items() if isinstance(spec, AttentionSpec) and asked & set(spec.platforms)]


for _name in backends():
    _class = f"Test_{_name}"
    globals()[_class] = type(_class, (OnDevice,), {**ELSEWHERE, "__module__": __name__, "plugin": f"attention:{_name}"})
del OnDevice
