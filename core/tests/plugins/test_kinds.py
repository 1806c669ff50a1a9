"""A kind is one file: what follows from it does, and one without a consumer is none."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lmkit
import pytest
from lmkit.api import ConfigError
from lmkit.config.schema import leaves
from lmkit.kinds import BY_NAME, GROUPS, KINDS, Kind, in_order, kv_connector
from lmkit.plugins.resolve import NEEDS, STEPS
from lmkit_testing.run import kit_of
from lmkit_testing.world import World

CORE = Path(lmkit.__file__).parent

ECHO = '''"""Repeaters of what was said.

Example, entry point `[project.entry-points."lmkit.echo"] twice = "toy_echo.hooks"`::

    from lmkit.api import EchoSpec, hookimpl


    @hookimpl
    def lmkit_echoes():
        yield EchoSpec(name="twice", summary="Says it twice", target="toy_echo.run:twice", times=2)
"""

from __future__ import annotations

from dataclasses import dataclass

from lmkit.contracts.refusal import Refusal
from lmkit.contracts.specs import SelectRequest, Spec
from lmkit.kinds.base import Kind, Refusals


@dataclass(frozen=True, slots=True, kw_only=True)
class EchoSpec(Spec):
    """target: (str) -> str."""

    times: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class EchoRequest(SelectRequest):
    kind: str = "echo"
    times: int = 1


def refusals(spec: EchoSpec, request: EchoRequest) -> Refusals:
    if spec.times < request.times:
        yield Refusal("feature", f"{request.times} times", str(spec.times))


KIND = Kind(
    "echo", spec=EchoSpec, hook="lmkit_echoes", used_by="toy_echo.caller", request=EchoRequest, refusals=refusals,
    ask=lambda known: [EchoRequest()], setting="echo", words="auto, or who repeats", doc=__doc__,
)
'''

USE = """
import json, sys
from lmkit.config import EngineConfig, from_options, read_environment
from lmkit.config.schema import leaves
from lmkit.hookspecs import hooks
from lmkit.kinds.echo import EchoRequest
from lmkit_cli.story import explain
from lmkit.plugins.host import PluginHost
from lmkit.plugins.refs import load_target
from lmkit.plugins.select import consider

host = PluginHost(path=[sys.argv[1]])
entry = host.entries("echo")[0]
choice = consider(host, EchoRequest(times=2), "twice").choice()
print(json.dumps({
    "key": entry.key,
    "hook": hooks()["lmkit_echoes"].__annotations__["return"],
    "said": load_target(choice)("ho"),
    "refused": consider(host, EchoRequest(times=3), "twice").refused[0].reasons[0].code,
    "topic": explain(EngineConfig(), host, topic="echo").topics[0].candidates[0].name,
    "named": from_options({"echo": "twice"}).wants("echo"),
    "variable": dict(read_environment({"LMKIT_ECHO": "twice"}).values),
    "flag": [leaves()["echo"].flag, leaves()["echo"].doc],
    "option": from_options({"echo.twice.loud": True}).plugins["echo.twice"],
}))
"""


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_every_kind_has_a_consumer(kind: Kind) -> None:
    """The module that a kind says it is used by loads targets, and speaks of that kind by name."""
    spec = find_spec(kind.used_by)
    assert spec is not None
    assert spec.origin is not None
    text = Path(spec.origin).read_text()
    assert f'"{kind.name}"' in text
    assert any(
        f"{call}(" in text for call in ("load_target", "load_ref", "make", "make_target")
    )  # which is `lmkit_worker.chosen`'s


def test_names_are_unique() -> None:
    assert len({kind.name for kind in KINDS}) == len({kind.hook for kind in KINDS}) == len(BY_NAME)
    assert set(GROUPS) == {*BY_NAME, "extension"}
    assert {kind.spec for kind in KINDS} == {kind.spec for kind in BY_NAME.values()}


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_a_kind_is_named_where_plugins_look(kind: Kind) -> None:
    import lmkit.api

    assert getattr(lmkit.api, kind.spec.__name__) is kind.spec
    assert f"lmkit.{kind.name}" in (kind.doc or "")
    assert kit_of(kind.name).endswith("Conformance")


def test_settings_are_keys_of_the_configuration() -> None:
    assert {leaf.key: leaf.kind for leaf in leaves().values() if leaf.kind} == {
        kind.setting: kind.name for kind in KINDS if kind.setting
    }


def test_steps_follow_what_they_need() -> None:
    """Each step once, after those it needs; whatever needs itself, through others too, is refused."""
    assert sorted(STEPS) == sorted(NEEDS)
    for i, name in enumerate(STEPS):
        assert set(NEEDS[name]) <= set(STEPS[:i])
    assert in_order({"c": ("b",), "a": (), "b": ("a",)}) == ["a", "b", "c"]
    with pytest.raises(AssertionError, match="a -> b -> a"):
        in_order({"a": ("b",), "b": ("a",)})


def test_a_new_kind_touches_nothing_else(world: World, tmp_path: Path) -> None:
    """One file, its line among the kinds, and its names in the public face: hooks, host, choice, explain follow."""
    core = tmp_path / "core" / "lmkit"
    shutil.copytree(CORE, core, ignore=shutil.ignore_patterns("__pycache__"))
    (core / "kinds" / "echo.py").write_text(ECHO)
    kinds, api = core / "kinds" / "__init__.py", core / "api" / "__init__.py"
    line = "from lmkit.kinds import echo\n\nKINDS = (\n    echo.KIND,"
    kinds.write_text(kinds.read_text().replace("KINDS: tuple[Kind, ...] = (", line))
    api.write_text(api.read_text().replace("\n__all__", "\nfrom lmkit.kinds.echo import EchoSpec\n\n__all__"))
    hooks = ECHO.split("::\n", 1)[1].split('"""')[0]
    world.add(
        "toy-echo",
        {"echo": {"twice": "toy_echo.hooks"}},
        {
            "toy_echo.hooks": "\n".join(line[4:] for line in hooks.splitlines()),
            "toy_echo.run": "def twice(text):\n    return text * 2\n",
        },
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(core.parent), str(world.path)])}
    command = [sys.executable, "-c", USE, str(world.path)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {
        "key": "echo:twice",
        "hook": "Iterable[EchoSpec]",
        "said": "hoho",
        "refused": "feature",
        "topic": "twice",
        "named": "twice",
        "variable": {"echo": "twice"},
        "flag": ["--echo", "auto, or who repeats"],
        "option": {"loud": True},
    }


def test_every_kind_is_called_and_proven() -> None:
    """The table of the reference says where, by which kit, and in which test: no cell is empty, each file is there."""
    root = Path(__file__).parents[3]
    page = (root / "docs" / "reference" / "hooks.md").read_text()
    table = page.split("| kind | called at | kit | a test |\n")[1].split("\n\n")[0].splitlines()[1:]
    rows = [[cell.strip(" `") for cell in line.strip("|").split("|")] for line in table]
    assert [row[0] for row in rows] == [kind.name for kind in KINDS]
    for _, called, kit, test in rows:
        file, _, function = called.partition(":")
        assert f"def {function}(" in (root / file).read_text()
        assert kit in (root / "tests/kit/src/lmkit_testing/__init__.py").read_text()
        assert (root / test).is_file()


def test_several_kv_connectors_are_refused() -> None:
    """Only one can run: taking the first would drop what the others were named for."""
    known: Any = SimpleNamespace(config=SimpleNamespace(wants=lambda kind: "offload,shared"))
    with pytest.raises(ConfigError, match=r"one KV connector runs at a time, 'offload,shared' names several"):
        kv_connector.ask(known)
