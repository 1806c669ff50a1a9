"""The marker plugins put on their hook implementations."""

from pluggy import HookimplMarker

hookimpl = HookimplMarker("lmkit")
