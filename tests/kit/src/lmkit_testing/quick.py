"""A pytest plugin: `--quick` leaves out what another test of the same run says already. Without it everything runs.

This is left out, and none of a plugin that a change can have broken:

- checks of a module of hooks or of a dist, but for one class of those that repeat them;
- configurations of models (an architecture and a variant of its kit) and greedy tokens of architectures, but for a set
  that covers whatever any of them declares (`cover.json`, see `lmkit_testing.cover`). Of every third architecture its
  first configuration remains, compared with `transformers` in float32;
- of a test with the marker `one_in(n)` all but every n-th case, of all plugins together;
- tests with the marker `full`, and what tests that ask `shortened` leave out themselves.

Properties (Hypothesis) that say no number of their own are tried with fewer examples, those of changed plugins too.

What a change can have broken: the dists whose files differ from the merge base with main, committed or not, and those
that depend on them, the core apart, on which all depend. Where git or main is missing that is nothing.
"""

from __future__ import annotations

import json
import subprocess
import tomllib
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any
from zlib import crc32

import pytest

COVER = "tests/parity/cover.json"  # relative to the repository
ONCE_PER_DIST = ("test_works_alone", "test_core_range_is_stated")
ONCE_PER_MODULE = (
    "test_hooks_module_is_light", "test_hooks_are_known", "test_imports_only_the_public_surface",
    "test_registration_is_pure", "test_entry_points_match_specs",
)  # fmt: skip
OF_EVERY_THIRD = (
    "test_float32", "test_loading_is_strict", "test_number_of_parameters_is_exact", "test_description_is_plain_data",
    "test_needs_are_declared",
)  # fmt: skip
CORE = "lmkit-core"
EXAMPLES = 20  # of each property; 100 otherwise


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--quick", action="store_true", help="leave out what other tests of the run say already")


def pytest_configure(config: pytest.Config) -> None:
    what = "left out of a quick run, unless a change can have broken one of the dists that it names"
    config.addinivalue_line("markers", f"full(*dists): {what}")
    config.addinivalue_line("markers", "one_in(n): a quick run takes every n-th case, and all of a plugin that changed")
    if config.getoption("quick"):
        from hypothesis import settings

        settings.register_profile("quick", max_examples=EXAMPLES)
        settings.load_profile("quick")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    choice = choice_of(config)
    if choice is None:
        return
    left_out = [item for item in items if not choice.takes(item)]
    if left_out:
        gone = set(map(id, left_out))
        items[:] = [item for item in items if id(item) not in gone]
        config.hook.pytest_deselected(items=left_out)


CHOICE: pytest.StashKey[Choice | None] = pytest.StashKey()


def choice_of(config: pytest.Config) -> Choice | None:
    """None: everything runs."""
    if CHOICE not in config.stash:
        config.stash[CHOICE] = Choice(config.rootpath) if config.getoption("quick") else None
    return config.stash[CHOICE]


@pytest.fixture(scope="session")
def shortened(pytestconfig: pytest.Config) -> Callable[[str], bool]:
    """shortened("tool_parser:hermes"): whether a test of that plugin may do with a part of its cases."""
    choice = choice_of(pytestconfig)
    return lambda plugin: choice is not None and choice.dists.get(plugin) not in choice.changed


class Choice:
    """Says of one test after the other whether a quick run of the repository at `root` has it."""

    def __init__(self, root: Path) -> None:
        from lmkit.plugins.host import PluginHost
        from lmkit.plugins.switches import Switches

        entries = PluginHost(switches=Switches()).entries()
        self.dists = {entry.key: entry.dist for entry in entries}
        self.modules = {entry.key: (entry.module, entry.kind) for entry in entries}
        self.changed = changed_dists(root)
        path = root / COVER
        self.cover: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
        self.seen: Counter[object] = Counter()

    def takes(self, item: pytest.Item) -> bool:
        parameters = getattr(getattr(item, "callspec", None), "params", {})
        name = getattr(item, "originalname", item.name)
        format = f"{parameters.get('kind', 'tool_parser')}:{parameters.get('name')}"
        plugin = str(parameters.get("plugin") or getattr(getattr(item, "cls", None), "plugin", "") or format)
        if self.dists.get(plugin) in self.changed or self._lies_in_changed(item):
            return True
        if marker := item.get_closest_marker("full"):
            return bool(self.changed.keys() & set(marker.args))
        if name in ONCE_PER_DIST:
            return self._first((name, self.dists.get(plugin, plugin)))
        if name in ONCE_PER_MODULE:
            return self._first((name, self.modules.get(plugin, plugin)))
        if not self._covers(item, name, parameters):
            return False
        marker = item.get_closest_marker("one_in")  # other plugins for each test
        return not marker or (self._nth(name) + crc32(name.encode())) % marker.args[0] == 0

    def _covers(self, item: pytest.Item, name: str, parameters: dict[str, Any]) -> bool:
        """Whether a test of a model's configuration is one of those that cover what any of them declares."""
        if name == "test_greedy_tokens":
            return bool(self.cover.get("greedy", {}).get(parameters.get("architecture"), True))
        variant, architecture = parameters.get("variant"), getattr(getattr(item, "cls", None), "name", None)
        if variant is None or architecture is None:
            return True
        covering = self.cover.get("configurations", {}).get(architecture(), {}).get(variant, True)
        third = crc32(architecture().encode()) % 3 == 0
        return bool(covering or (variant == "base" and third and name in OF_EVERY_THIRD))

    def _first(self, what: object) -> bool:
        return self._nth(what) == 0

    def _nth(self, what: object) -> int:
        """How often it was asked for before."""
        self.seen[what] += 1
        return self.seen[what] - 1

    def _lies_in_changed(self, item: pytest.Item) -> bool:
        return any(folder in item.path.parents for folder in self.changed.values())


def changed_dists(root: Path) -> dict[str, Path]:
    """Dist -> its folder: those with other files than main has, and those that depend on one of them."""
    folders, needs = {}, {}
    for path in root.glob("plugins/*/*/pyproject.toml"):
        project = tomllib.loads(path.read_text(encoding="utf-8"))["project"]
        folders[project["name"]] = path.parent
        needs[project["name"]] = {_name(line) for line in project.get("dependencies", ())}
    files = changed_files(root)
    found = {name for name, folder in folders.items() if any(folder in file.parents for file in files)}
    while more := {name for name in folders if name not in found and needs[name] & found}:
        found |= more
    return {name: folders[name] for name in sorted(found)}


def _name(requirement: str) -> str:
    from packaging.requirements import Requirement

    return Requirement(requirement).name


def changed_files(root: Path) -> set[Path]:
    """Files of the work tree that are not as in the merge base with main; none where there is no such base."""
    for main in ("origin/main", "main"):
        try:
            base = _git(root, "merge-base", "HEAD", main)[0]
            names = [*_git(root, "diff", "--name-only", base), *_git(root, "ls-files", "-o", "--exclude-standard")]
        except (OSError, subprocess.CalledProcessError, IndexError):
            continue
        return {root / name for name in names}
    return set()


def _git(root: Path, *arguments: str) -> list[str]:
    done = subprocess.run(
        ["git", "--no-optional-locks", *arguments], cwd=root, capture_output=True, text=True, check=True
    )
    return done.stdout.splitlines()
