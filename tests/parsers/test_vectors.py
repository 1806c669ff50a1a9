"""Recorded outputs of other projects' tests: every format gives what a client must see, however the text is split."""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from lmkit.plugins.host import PluginHost
from lmkit.plugins.switches import Switches
from lmkit.text.formats import load_format
from lmkit_testing.parsers import Vector, load_vectors

HERE = Path(__file__).parent
DATA = HERE.parents[1].parent / "shared" / "data" / "parsers"
EXCEPTIONS: dict[str, str] = tomllib.loads((HERE / "exceptions.toml").read_text())
SWITCHES: dict[str, dict[str, Any]] = tomllib.loads((HERE / "switches.toml").read_text())
MAX_EXCEPTIONS = 0.03
KINDS = {"tool": "tool_parser", "reasoning": "reasoning_parser"}


def vectors() -> Iterator[tuple[str, str, Vector]]:
    """(kind, name of the format, vector). Files that begin with _ are not about a format by name."""
    for folder, kind in KINDS.items():
        for file in sorted((DATA / folder).glob("[!_]*.json")):
            for vector in load_vectors(file):
                vector.template_kwargs.update(SWITCHES.get(vector.id, {}))
                yield kind, file.stem, vector


VECTORS = list(vectors())
HOST = PluginHost(switches=Switches())


@pytest.mark.parametrize(("kind", "name", "vector"), VECTORS, ids=[v.id for *_, v in VECTORS])
@pytest.mark.one_in(3)
def test_vector(
    kind: str, name: str, vector: Vector, count: Callable[..., None], shortened: Callable[[str], bool]
) -> None:
    """Whole, all single splits, single characters, 200 random chunkings, and the recorded deltas."""
    if vector.id not in EXCEPTIONS:
        vector.check(load_format(HOST, kind, name), num_random=20 if shortened(f"{kind}:{name}") else 200)
        count("vectors as expected")
        return
    count("vectors with a written exception")
    with pytest.raises(AssertionError, match=f"^{vector.id}: "):  # an exception that is none is to be removed
        vector.check(load_format(HOST, kind, name), num_random=10)


def test_the_vectors_are_here() -> None:
    if not DATA.is_dir():
        pytest.skip("recorded outputs are not beside the repository (../shared/data/parsers)")
    assert len(VECTORS) >= 400
    assert len(EXCEPTIONS) <= MAX_EXCEPTIONS * len(VECTORS)
    assert set(EXCEPTIONS) | set(SWITCHES) <= {v.id for *_, v in VECTORS}
