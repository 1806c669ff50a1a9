"""`cover.json` says which configurations of models a quick run takes: together they have all that any declares.

What it does not know a quick run takes. `nox -s expected` renews it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from lmkit.api import CheckpointOptions
from lmkit.checkpoint import open_checkpoint
from lmkit.plugins import load_target
from lmkit_testing import ArchitectureConformance
from lmkit_testing.checkpoints import tiny_checkpoint
from lmkit_testing.cover import Trait, covering, traits
from lmkit_testing.specs import find_plugin

from .classes import conformance_classes

FILE = Path(__file__).with_name("cover.json")
Configuration = tuple[str, str]  # architecture, variant


def variants(kit: type[ArchitectureConformance]) -> dict[str, dict[str, Any]]:
    """Name of each variant -> its configuration values; "base" is the first."""
    found = {"base": {**kit.values}} | {name: {**kit.values, **values} for name, values in kit.variants.items()}
    return found | ({"published": {**kit.values, **kit.published}} if kit.published else {})


def declared(folder: Path) -> Iterator[tuple[Configuration, frozenset[Trait]]]:
    """What each configuration of every kit declares."""
    for kit in conformance_classes():
        describe = load_target(find_plugin(kit.plugin)[2].target)().describe
        for variant, values in variants(kit).items():
            directory = tiny_checkpoint(kit.family or kit.name(), folder / kit.name() / variant, **values)
            kit.name_architecture(directory)
            checkpoint = open_checkpoint(str(directory), CheckpointOptions())
            assert checkpoint is not None
            yield (kit.name(), variant), traits(describe(checkpoint.config))


def in_engines(found: dict[Configuration, frozenset[Trait]]) -> dict[str, frozenset[Trait]]:
    """Of each architecture what the configuration declares with which the whole engine runs."""
    return {name: found[name, "published" if (name, "published") in found else "base"] for name, _ in found}


def as_file(known: Collection[Configuration], chosen: Sequence[Configuration], engines: Sequence[str]) -> str:
    """Text of `cover.json`: whether a quick run takes each configuration, and greedy tokens of each architecture."""
    names = sorted({name for name, _ in known})
    rows = {
        "configurations": {name: {v: (n, v) in chosen for n, v in sorted(known) if n == name} for name in names},
        "greedy": {name: name in engines for name in names},
    }
    parts = []
    for part, entries in rows.items():
        lines = ",\n".join(f"  {json.dumps(name)}: {json.dumps(entry)}" for name, entry in entries.items())
        parts.append(f" {json.dumps(part)}: {{\n{lines}\n }}")
    return "{\n" + ",\n".join(parts) + "\n}\n"


@pytest.mark.full
def test_the_chosen_have_whatever_any_declares(tmp_path: Path) -> None:
    found = dict(declared(tmp_path))
    if os.environ.get("EXPECTED") == "write":
        FILE.write_text(as_file(found, covering(found), covering(in_engines(found))))
    known = json.loads(FILE.read_text())
    taken = {(name, variant) for name, row in known["configurations"].items() for variant in row if row[variant]}
    assert {(name, variant) for name, row in known["configurations"].items() for variant in row} == set(found)
    assert frozenset().union(*(found[key] for key in taken)) == frozenset().union(*found.values())
    engines = in_engines(found)
    chosen = [name for name, takes in known["greedy"].items() if takes]
    assert frozenset().union(*(engines[name] for name in chosen)) == frozenset().union(*engines.values())


def test_covering_takes_few_and_all() -> None:
    a, b, c = (("config.a", 1),), (("config.b", 1),), (("config.c", True),)
    assert list(covering({"x": [*a], "y": [*a, *b], "z": [*c], "w": [*b]})) == ["y", "z"]
