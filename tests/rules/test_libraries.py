"""Libraries that plugins are written with: what is in them has two users at least."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

import pytest
from lmkit.api import Routing
from lmkit_decoders.describe import DecoderConfig, LatentConfig, MixerConfig, MoEConfig

ROOT = Path(__file__).resolve().parents[2]
LIBRARY = "decoders"


def given_names(path: Path) -> Iterator[str]:
    """What a file gives by name: keywords of calls, and keys of tables."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.keyword) and node.arg:
            yield node.arg
        elif isinstance(node, ast.Dict):
            yield from (k.value for k in node.keys if isinstance(k, ast.Constant) and isinstance(k.value, str))


def users() -> dict[str, set[str]]:
    """Name -> the families that give it. The library counts as one where it gives it for all families."""
    found: dict[str, set[str]] = defaultdict(set)
    for path in ROOT.glob("plugins/models/*/src/**/*.py"):
        for name in given_names(path):
            found[name].add(path.relative_to(ROOT).parts[2])
    return found


@pytest.mark.parametrize("kind", [DecoderConfig, MoEConfig, LatentConfig, MixerConfig], ids=lambda kind: kind.__name__)
def test_a_field_has_two_users(kind: type) -> None:
    """What one family needs is a class of that family. What the library gives for everybody has enough users."""
    by = users()
    shared = {name for name, families in by.items() if LIBRARY in families and len(families) == 1}
    public = {f.name for f in fields(Routing)}
    own = [f.name for f in fields(kind) if f.name not in public | shared]
    assert not {name: by[name] for name in own if len(by[name] - {LIBRARY}) < 2}
