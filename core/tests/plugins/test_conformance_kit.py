"""The kit common to all plugins finds each fault, and only that; its fixtures load as a pytest plugin."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from lmkit_testing.dists import write_dist

GOOD = """
from lmkit.api import SchedulerSpec, Tier, hookimpl
{top}

@hookimpl
def lmkit_schedulers():
    yield SchedulerSpec(name="{name}", summary={summary}, target="{module}:Policy", tier=Tier.PORTABLE{extra})
    {more}

class Policy:
    def admit_key(self, r): return (r.arrival,)
    def victim_key(self, r): return (r.arrival,)
{bottom}
"""

# name -> (parts of the source that differ, requirements, the tests that must fail)
FAULTS: dict[str, tuple[dict[str, str], list[str], set[str]]] = {
    "fine": ({}, ["lmkit-core>=0.1"], set()),
    "heavy": ({"top": "import numpy"}, ["lmkit-core>=0.1"], {"test_hooks_module_is_light"}),
    "slow": ({"top": "import time; time.sleep(0.8)"}, ["lmkit-core>=0.1"], {"test_hooks_module_is_light"}),
    "impure": (
        {"top": "from itertools import count\nnumbers = count()", "summary": "str(next(numbers))"},
        ["lmkit-core>=0.1"],
        {"test_registration_is_pure"},
    ),
    "private": (
        {"bottom": "def later():\n    import lmkit.plugins.host"},
        ["lmkit-core>=0.1"],
        {"test_imports_only_the_public_surface"},
    ),
    "unranged": ({}, [], {"test_core_range_is_stated"}),
    "unlisted": (
        {"more": "yield SchedulerSpec(name='second', summary='x', target='a:b')"},
        ["lmkit-core>=0.1"],
        {"test_entry_points_match_specs"},
    ),
    "pending": (
        {"bottom": "@hookimpl\ndef lmkit_schedulerz(): return []"},
        ["lmkit-core>=0.1"],
        {"test_hooks_are_known"},
    ),
    "dangling": ({"extra": ", check='nowhere:check'"}, ["lmkit-core>=0.1"], {"test_refs_resolve"}),
}


def run_pytest(folder: Path, source: str, *arguments: str) -> str:
    (folder / "test_generated.py").write_text(source)
    environment = {"PYTHONPATH": f"{folder}:{':'.join(p for p in sys.path if p)}"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", "/dev/null", "-rf", *arguments]
    done = subprocess.run(
        [*command, "test_generated.py"], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    return done.stdout + done.stderr


@pytest.mark.full
def test_each_fault_is_found(tmp_path: Path) -> None:
    classes = ["from lmkit_testing import PluginConformance"]
    for name, (parts, requires, _) in FAULTS.items():
        module = f"kit_{name}.hooks"
        defaults = {"top": "", "bottom": "", "more": "", "extra": "", "summary": "'One line'"}
        source = GOOD.format(**(defaults | parts), name=name, module=module)
        write_dist(tmp_path, f"kit-{name}", {"scheduler": {name: module}}, {module: source}, requires=requires)
        classes.append(f"class Test_{name}(PluginConformance):\n    plugin = 'scheduler:{name}'")
    printed = run_pytest(tmp_path, "\n\n".join(classes))
    failed: dict[str, set[str]] = {name: set() for name in FAULTS}
    for name, test in re.findall(r"^FAILED .*::Test_(\w+)::(\w+)", printed, re.MULTILINE):
        failed[name].add(test)
    assert failed == {name: expected for name, (_, _, expected) in FAULTS.items()}, printed[-4000:]


FIXTURES = """
from types import ModuleType
from lmkit.api import SchedulerSpec, hookimpl

def test_fixtures(lmkit_host, fake_device, dist_dir):
    assert fake_device("chip", cc=(9, 0), mem="80GiB").total_memory == 80 << 30
    assert lmkit_host.names("scheduler") == []
    assert dist_dir.host().scan() == []
"""


@pytest.mark.full
def test_fixtures_load_as_a_pytest_plugin(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text('pytest_plugins = ["lmkit_testing"]\n')
    assert "1 passed" in run_pytest(tmp_path, FIXTURES)
