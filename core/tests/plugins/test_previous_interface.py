"""Plugins of the interface before go on working through an adapter; those of older ones are refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from lmkit.api import PluginError
from lmkit.config import EngineConfig, ModelConfig
from lmkit.contracts.refs import load_target
from lmkit.kinds import BY_NAME, KINDS
from lmkit.plugins.chat_templates import chosen_template
from lmkit.plugins.resolve import resolve
from lmkit_cli.health import examine
from lmkit_testing.world import World

FROZEN = Path(__file__).parent / "frozen"
RAISED = [kind for kind in KINDS if kind.interface > 1]


@pytest.mark.parametrize("kind", RAISED, ids=lambda kind: kind.name)
def test_a_raised_interface_has_an_adapter_and_a_plugin_from_before(kind) -> None:
    assert kind.adapter, f"raising {kind.name} needs an adapter: nobody's plugin breaks by an upgrade"
    assert (FROZEN / f"{kind.name}_{kind.interface - 1}.py").exists()


def frozen(world: World, kind: str, name: str = "frozen") -> World:
    source = (FROZEN / f"{kind}_{BY_NAME[kind].interface - 1}.py").read_text()
    world.add("frozen-plugin", {kind: {name: "frozen_plugin.hooks"}}, {"frozen_plugin.hooks": source})
    return world


def test_a_template_of_interface_1_is_read(whole: World) -> None:
    config = EngineConfig(model=ModelConfig(model="toy"), wanted={"template": "frozen"})
    plan, checkpoint, _ = resolve(config, frozen(whole, "template").host())
    choice = plan.choice("template")
    assert choice is not None
    assert (choice.name, choice.adapter) == ("frozen", "lmkit.kinds.template:of_interface_1")
    assert load_target(choice)(Path("x"), checkpoint).startswith("{# old #}")
    assert chosen_template(plan.choices, None, checkpoint).startswith("{# old #}")
    new = replace(config, wanted={"template": "toy"})
    assert resolve(new, whole.host())[0].choice("template").adapter == ""


def test_the_doctor_says_that_its_time_is_running_out(whole: World) -> None:
    found = [f for f in examine(frozen(whole, "template").host()) if f.subject == "template:frozen"]
    assert [(f.level, f.code) for f in found] == [("info", "interface-before")]


@pytest.mark.parametrize("interface", [0, 3])
def test_only_the_one_before_is_adapted(whole: World, interface: int) -> None:
    world = frozen(whole, "template")
    file = world.path / "frozen_plugin" / "hooks.py"
    file.write_text(file.read_text().replace("interface=1", f"interface={interface}"))
    with pytest.raises(PluginError, match="interface"):
        world.host().load("template", "frozen")


def test_without_an_adapter_the_one_before_is_refused(whole: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(BY_NAME, "template", replace(BY_NAME["template"], adapter=""))  # type: ignore[arg-type]
    with pytest.raises(PluginError, match="template interface 2"):
        frozen(whole, "template").host().load("template", "frozen")


WITH_OPTIONS = """
from dataclasses import dataclass
from lmkit.api import TemplateSpec, hookimpl

@dataclass
class Options:
    name: str = "role"

def template(path, checkpoint, name):
    return "{# " + name + " #}"

@hookimpl
def lmkit_templates():
    yield TemplateSpec(name="tuned", summary="It", target=f"{__name__}:template", models=("ToyForCausalLM",),
                       interface=2, options=f"{__name__}:Options")
"""


def test_options_of_a_template_reach_it(whole: World) -> None:
    whole.add("tuned-plugin", {"template": {"tuned": "tuned_plugin.hooks"}}, {"tuned_plugin.hooks": WITH_OPTIONS})
    config = EngineConfig(model=ModelConfig(model="toy"), wanted={"template": "tuned"})
    config = replace(config, plugins={"template.tuned": {"name": "mine"}})
    plan, checkpoint, _ = resolve(config, whole.host())
    assert chosen_template(plan.choices, None, checkpoint) == "{# mine #}"
