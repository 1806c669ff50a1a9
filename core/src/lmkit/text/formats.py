"""Tool and reasoning formats by name."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lmkit.plugins import load_ref
from lmkit.text.parsing import AnyFormat

if TYPE_CHECKING:
    from lmkit.plugins.host import PluginHost


def load_format(host: PluginHost, kind: str, name: str) -> AnyFormat:
    """`kind`: tool_parser or reasoning_parser. Raises PluginError with the reason when it cannot be used."""
    target = load_ref(host.load(kind, name).target, f"{kind} {name!r}")
    return target() if isinstance(target, type) else target
