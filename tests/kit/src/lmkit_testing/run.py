"""Running a kind's conformance kit against an installed plugin, without a test file of its own."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path

import pytest
from lmkit.plugins.host import PluginHost
from lmkit.plugins.switches import Switches

from lmkit_testing.specs import loaded_entry

KITS = {
    "attention": "AttentionConformance",
    "executor": "ExecutorConformance",
    "extension": "ExtensionConformance",
    "platform": "PlatformConformance",
    "quantization": "QuantizationConformance",
    "reasoning_parser": "ReasoningParserConformance",
    "scheduler": "SchedulerConformance",
    "tool_parser": "ToolParserConformance",
}  # a model's kit needs to know the family, so it is run from the plugin's own tests


def run_conformance(kind: str, name: str, arguments: Sequence[str] = ()) -> int:
    """Exit code of pytest over the kit of `kind` (or the one common to all kinds) for plugin "kind:name".

    Raises PluginError when the plugin cannot be used at all.
    """
    loaded_entry(PluginHost(switches=Switches()), f"{kind}:{name}")
    kit = KITS.get(kind, "PluginConformance")
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / f"test_{kind}_{name}.py"
        file.write_text(f"from lmkit_testing import {kit}\n\n\nclass Test({kit}):\n    plugin = {f'{kind}:{name}'!r}\n")
        quiet = ["-q", "-p", "no:cacheprovider", "--import-mode=importlib", "-c", "/dev/null", f"--rootdir={folder}"]
        return int(pytest.main([*quiet, str(file), *arguments]))
