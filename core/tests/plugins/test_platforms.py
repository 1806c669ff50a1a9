"""Choosing the device: a broken accelerator never becomes another platform in silence."""

from __future__ import annotations

import pytest
from lmkit.api import ConfigError, SelectionError
from lmkit.plugins.platforms import Description, choose_platform
from lmkit.plugins.switches import Pattern
from lmkit_testing.host import codes
from lmkit_testing.world import World

ABSENT = 'Unavailable("no chip in this machine", "buy one")'


@pytest.fixture
def machine(world: World) -> World:
    """A machine with a platform that runs anywhere."""
    world.platform("plain", fallback=True)
    return world


def test_the_fallback_is_used_when_nothing_better_is_there(machine: World) -> None:
    machine.platform("chip", probe=ABSENT)
    outcome, device = choose_platform(machine.host())
    assert device.platform == "plain"
    assert codes(outcome) == {"chip": {"platform"}}
    assert outcome.refused[0].reasons[0].offered == "no chip in this machine"


def test_an_accelerator_is_preferred(machine: World) -> None:
    machine.platform("chip")
    outcome, device = choose_platform(machine.host())
    assert device.platform == "chip"
    assert outcome.chosen is not None
    assert codes(outcome) == {"plain": {"platform"}}


def test_an_experimental_accelerator_is_used_only_when_named(machine: World) -> None:
    machine.platform("chip", stability="experimental")
    outcome, device = choose_platform(machine.host())
    assert device.platform == "plain"
    assert codes(outcome) == {"chip": {"experimental"}}
    assert choose_platform(machine.host(), "chip")[1].platform == "chip"


@pytest.mark.parametrize(
    ("probe", "text"),
    [
        ("1 / 0", "ZeroDivisionError"),
        ("__import__('sys').exit(1)", "SystemExit"),
        ("None", "the probe answered None"),
        ("[]", "the probe answered []"),
        ("['a device']", "the probe answered"),
    ],
)
def test_a_probe_that_fails_stops_auto(machine: World, probe: str, text: str) -> None:
    machine.platform("chip", probe=probe)
    with pytest.raises(SelectionError, match="nothing slower is used in its place") as caught:
        choose_platform(machine.host())
    assert text in caught.value.message
    assert "--platform plain" in caught.value.fix
    assert choose_platform(machine.host(), "plain")[1].platform == "plain"
    with pytest.raises(SelectionError, match="platform 'chip' cannot be used"):
        choose_platform(machine.host(), "chip")


def test_a_broken_platform_plugin_stops_auto(machine: World) -> None:
    machine.add(
        "chip-dist", {"platform": {"chip": "chip_x.hooks"}}, {"chip_x.hooks": "raise ImportError('libchip.so')"}
    )
    with pytest.raises(SelectionError, match=r"libchip\.so"):
        choose_platform(machine.host())
    assert choose_platform(machine.host(), "plain")[1].platform == "plain"
    assert choose_platform(machine.host(disable=(Pattern("chip-dist", "flag"),)))[1].platform == "plain"


def test_an_incompatible_platform_plugin_stops_auto(machine: World) -> None:
    machine.add("chip-dist", {"platform": {"chip": "chip_x.hooks"}}, {}, requires=["lmkit-core>=9"])
    with pytest.raises(SelectionError, match="core-too-old"):
        choose_platform(machine.host())


def test_a_device_whose_plugin_lacks_a_requirement_stops_auto(machine: World) -> None:
    machine.platform("chip")
    source = machine.path / "toy_platform_chip" / "hooks.py"
    source.write_text(source.read_text().replace("fallback=False", "fallback=False, requires=('chip-driver>=2',)"))
    with pytest.raises(SelectionError, match="requirement-missing"):
        choose_platform(machine.host())


def test_two_accelerators_must_be_named(machine: World) -> None:
    machine.platform("chip")
    machine.platform("slab")
    with pytest.raises(SelectionError, match="several accelerators are available: chip, slab"):
        choose_platform(machine.host())
    assert choose_platform(machine.host(), "slab")[1].platform == "slab"


def test_a_named_platform_that_is_absent_is_an_error(machine: World) -> None:
    machine.platform("chip", probe=ABSENT)
    with pytest.raises(SelectionError, match="no chip in this machine") as caught:
        choose_platform(machine.host(), "chip")
    assert "buy one" in caught.value.fix
    assert choose_platform(machine.host(), "chip,plain")[1].platform == "plain"


def test_none_installed(world: World) -> None:
    with pytest.raises(SelectionError, match="no platform plugin can be used: none is installed") as caught:
        choose_platform(world.host())
    assert "plugins/platforms/cpu" in caught.value.fix


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("chip", Description("chip")),
        ("chip:9.0", Description("chip", "9.0")),
        ("chip:9.0:80GB", Description("chip", "9.0", 80_000_000_000)),
        ("chip:80GiB", Description("chip", "", 80 << 30)),
        ("chip:x942:512MiB", Description("chip", "x942", 512 << 20)),
    ],
)
def test_descriptions(text: str, expected: Description) -> None:
    assert Description.parse(text) == expected


@pytest.mark.parametrize("text", ["", "chip:", "chip:9.0:", "chip:512MiB:9.0", "chip:a:b", "Chip:9.0", "chip:-1GB"])
def test_descriptions_that_cannot_be_read(text: str) -> None:
    with pytest.raises(ConfigError, match="cannot read device"):
        Description.parse(text)


DESCRIBED = """
from lmkit.api import ConfigError, DeviceInfo

def describe(model, total_memory):
    if not model.startswith("x"):
        raise ConfigError(f"no model {model}")
    return DeviceInfo("chip", "cpu", model, (int(model[1:]), 0), total_memory, described=True)
"""


def test_a_described_device(machine: World) -> None:
    """Its platform says what a model is."""
    machine.platform("chip", probe=ABSENT)
    source = machine.path / "toy_platform_chip" / "hooks.py"
    ref = "fallback=False, describe='toy_platform_chip.hooks:describe'"
    source.write_text(source.read_text().replace("fallback=False", ref) + DESCRIBED)
    _, device = choose_platform(machine.host(), "auto", "chip:x7:16GiB")
    assert (device.platform, device.capability, device.total_memory, device.described) == (
        "chip",
        (7, 0),
        16 << 30,
        True,
    )
    with pytest.raises(ConfigError, match=r"no model 9\.0"):
        choose_platform(machine.host(), "auto", "chip:9.0")


def test_a_described_device_of_a_platform_that_knows_no_models(machine: World) -> None:
    machine.platform("chip", probe=ABSENT)
    _, device = choose_platform(machine.host(), "auto", "chip:7.5:16GiB")
    assert (device.platform, device.name, device.capability, device.described) == ("chip", "7.5", None, True)
    with pytest.raises(ConfigError, match="is not of platform 'plain'"):
        choose_platform(machine.host(), "plain", "chip:7.5")
    with pytest.raises(SelectionError, match="not-installed"):
        choose_platform(machine.host(), "auto", "slab:7.5")
