"""Running a kind's conformance kit against an installed plugin, without a test file of its own."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path

import pytest
from lmkit.plugins.host import PluginHost
from lmkit.plugins.switches import Switches

import lmkit_testing
from lmkit_testing.specs import loaded_entry

MORE = {  # what a kit cannot know: a test of the plugin's own says it
    "dialect": "requests and their answers are a test of its own",
    "logits_processor": "`asked`, options of requests, are said in a test of its own",
    "model": "`values` of a tiny configuration and the `family` to compare with are said in a test of its own",
    "op": "plain linears are tested by LinearConformance, formats by QuantizationConformance with `kernels`",
    "quantization": "`configs` and `kernels` are said in a test of its own",
    "reasoning_parser": "`samples` of outputs are said in a test of its own",
    "tool_parser": "`samples` of outputs are said in a test of its own",
}


def kit_for(kind: str) -> str:
    """The kit that a plugin's own test subclasses."""
    return {"model": "ModelConformance", "op": "LinearConformance"}.get(kind) or kit_of(kind)


def kit_of(kind: str) -> str:
    """The kit named after a kind, or the one common to all. A model's needs to know the family: its tests name it."""
    kit = kind.title().replace("_", "") + "Conformance"
    return kit if kind != "model" and kit in lmkit_testing.__all__ else "PluginConformance"


def run_conformance(kind: str, name: str, arguments: Sequence[str] = ()) -> int:
    """Exit code of pytest over the kit of `kind` (or the one common to all kinds) for plugin "kind:name".

    Raises PluginError when the plugin cannot be used at all.
    """
    loaded_entry(PluginHost(switches=Switches()), f"{kind}:{name}")
    kit = kit_of(kind)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / f"test_{kind}_{name.replace('/', '_')}.py"
        file.write_text(f"from lmkit_testing import {kit}\n\n\nclass Test({kit}):\n    plugin = {f'{kind}:{name}'!r}\n")
        if kind in MORE:
            print(f"of {kind}:{name} this tests what the kit knows by itself; {MORE[kind]}: subclass {kit_for(kind)}")
        quiet = ["-q", "-p", "no:cacheprovider", "--import-mode=importlib", "-c", "/dev/null", f"--rootdir={folder}"]
        return int(pytest.main([*quiet, str(file), *arguments]))
