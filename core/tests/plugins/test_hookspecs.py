"""Each hook's example is a plugin: it is taken from the docstring, installed as a dist, and used through the host."""

from __future__ import annotations

import inspect
import re
import textwrap

import pytest
from lmkit.api import CheckpointOptions, DeviceInfo, ModelInfo, ResolvedPlan
from lmkit.config import EngineConfig
from lmkit.hookspecs import EngineInfo, RequestStats, hooks
from lmkit.kinds import KINDS, Kind
from lmkit_testing.world import World

HOOKS = hooks()
GROUP = re.compile(r'\[project\.entry-points\."lmkit\.(\w+)"\] (\w+) = "([\w.]+)"')

PLAN = ResolvedPlan(DeviceInfo(platform="toy", device_type="cpu"), ())
INFO = EngineInfo("toy", PLAN)
MODEL = ModelInfo("Toy", 10, 8, (), 16, "float32", num_parameters=1000)
ARGUMENTS: dict[str, dict[str, object]] = {
    "lmkit_configure": {"config": EngineConfig(), "plan": PLAN, "info": MODEL},
    "lmkit_resolve_checkpoint": {"ref": "toy://x", "options": CheckpointOptions()},
    "lmkit_engine_started": {"info": INFO},
    "lmkit_engine_stopping": {"info": INFO},
    "lmkit_request_finished": {"stats": RequestStats("r1", "stop", num_output_tokens=3)},
    "lmkit_doctor_checks": {},
    "lmkit_benchmarks": {},
}


def install_example(world: World, hook: str) -> tuple[str, str]:
    """Write the example of a hook as a dist; returns kind and entry-point name."""
    text = inspect.getdoc(HOOKS[hook]) or ""
    match = GROUP.search(text)
    assert match, f"{hook}: the docstring names no entry point"
    kind, name, module = match.groups()
    world.add("example", {kind: {name: module}}, {module: textwrap.dedent(text.split("::\n", 1)[1])})
    return kind, name


def test_every_kind_has_a_hook() -> None:
    assert {kind.hook for kind in KINDS} | set(ARGUMENTS) == set(HOOKS)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_registration_examples(world: World, kind: Kind) -> None:
    assert install_example(world, kind.hook)[0] == kind.name
    host = world.host(strict=True)
    entry = host.entries(kind.name)[0]
    assert host.open(entry) is None
    assert type(entry.spec) is kind.spec
    assert entry.warnings == []


@pytest.mark.parametrize("hook", sorted(ARGUMENTS))
def test_behaviour_examples(world: World, hook: str) -> None:
    kind, _ = install_example(world, hook)
    assert kind == "extension"
    host = world.host(strict=True)
    assert host.implements(hook)
    arguments = ARGUMENTS[hook]
    specification = getattr(host.hook, hook).spec
    assert set(specification.argnames) == set(arguments)
    if specification.opts["firstresult"]:
        result = host.first(hook, **arguments)
        assert result is not None
    elif hook in ("lmkit_engine_started", "lmkit_engine_stopping", "lmkit_request_finished"):
        host.notify(hook, **arguments)
    else:
        assert len(host.gather(hook, **arguments)) == 1


def test_hooks_are_typed() -> None:
    for hook in HOOKS:
        signature = inspect.signature(HOOKS[hook])
        assert signature.return_annotation is not inspect.Signature.empty
        for parameter in list(signature.parameters.values())[1:]:
            assert parameter.annotation is not inspect.Parameter.empty
