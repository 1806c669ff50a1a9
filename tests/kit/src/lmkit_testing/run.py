"""Running a kind's conformance kit against an installed plugin, without a test file of its own."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path

import pytest
from lmkit.api import OpSpec, ProposerSpec, Spec
from lmkit.kinds import EXTENSION
from lmkit.plugins.host import PluginHost
from lmkit.plugins.switches import Switches

import lmkit_testing
from lmkit_testing.specs import loaded_entry

MORE = {  # what a kit cannot know: a test of the plugin's own says it
    "dialect": "`asked`, requests that are understood, and `text`, which reads answers, are said in a test of its own",
    "loader": "`write`, which writes a format of its own, is said in a test of its own",
    "logits_processor": "`asked`, options of requests, are said in a test of its own",
    "model": "`values` of a tiny configuration and the `family` to compare with are said in a test of its own",
    "op": "formats are tested by QuantizationConformance with `kernels`, other operators in a test of its own",
    "proposer": "a model is needed, and said in a test of its own",
    "quantization": "`configs` and `kernels` are said in a test of its own",
    "reasoning_parser": "`samples` of outputs are said in a test of its own",
    "template": "`file`, which writes what it reads, is said in a test of its own",
    "tokenizer": "`files`, which writes what it reads, is said in a test of its own",
    "tool_parser": "`samples` of outputs are said in a test of its own",
}
OF_ITS_OWN = {"model": "ModelConformance", "op": "LinearConformance"}  # what the kit named after the kind cannot be


def kit_for(kind: str) -> str:
    """The kit that a plugin's own test subclasses."""
    return OF_ITS_OWN.get(kind) or kit_of(kind)


def kit_of(kind: str) -> str:
    """The kit named after a kind, or the one common to all. A model's needs to know the family: its tests name it."""
    kit = kind.title().replace("_", "") + "Conformance"
    kit = kit.replace("KvConnector", "KVConnector")
    return kit if kind != "model" and kit in lmkit_testing.__all__ else "PluginConformance"


def kit_and_rest(kind: str, spec: Spec | None) -> tuple[str, str, str]:
    """The kit that is run for a plugin, the one that its own test would subclass, and what that would say; "" where the
    first does all."""
    if isinstance(spec, OpSpec):
        plain = spec.op == "linear" and (not spec.formats or "plain" in spec.formats)
        rest = "" if plain and not spec.formats - {"plain"} else MORE[kind]
        formats = "QuantizationConformance" if spec.formats - {"plain"} else "PluginConformance"
        return ("LinearConformance" if plain else "PluginConformance"), formats, rest
    if isinstance(spec, ProposerSpec):
        return ("PluginConformance", "DraftConformance", MORE[kind]) if spec.draft else (kit_of(kind), kit_of(kind), "")
    if kind == "loader" and "safetensors" in getattr(spec, "formats", ()):
        return kit_of(kind), kit_of(kind), ""
    if kind == "tokenizer" and spec is not None and "tokenizer.json" in getattr(spec, "files", ()):
        return kit_of(kind), kit_of(kind), ""
    return kit_of(kind), kit_for(kind), MORE.get(kind, "")


def run_conformance(kind: str, name: str, arguments: Sequence[str] = ()) -> int:
    """Exit code of pytest over the kit of `kind` (or the one common to all kinds) for plugin "kind:name".

    Raises PluginError when the plugin cannot be used at all.
    """
    host = PluginHost(switches=Switches())
    entry = loaded_entry(host, f"{kind}:{name}")
    kit, own, rest = kit_and_rest(kind, None if kind == EXTENSION else host.load(kind, entry.name, entry.dist))
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / f"test_{kind}_{name.replace('/', '_')}.py"
        skip = {"test_a_format_of_its_own": "`write` is not overridden: a test of the plugin's own does that"}
        more = f"    skip = {skip!r}\n" if kind == "loader" else ""
        text = f"from lmkit_testing import {kit}\n\n\nclass Test({kit}):\n    plugin = {f'{kind}:{name}'!r}\n{more}"
        file.write_text(text)
        if rest and kit == "PluginConformance":
            print(f"of {kind}:{name} nothing is tested that is special to it; {rest}: subclass {own}")
        elif rest:
            print(f"of {kind}:{name} this tests what the kit knows by itself; {rest}: subclass {own}")
        quiet = ["-q", "-p", "no:cacheprovider", "--import-mode=importlib", "-c", "/dev/null", f"--rootdir={folder}"]
        return int(pytest.main([*quiet, str(file), *arguments]))
