"""The table and the loading of plugins: states instead of crashes, switches before imports."""

from __future__ import annotations

import logging
import sys
from types import ModuleType

import pytest
from lmkit.api import ConfigError, PluginError, SchedulerSpec, hookimpl
from lmkit.plugins.host import PluginHost
from lmkit.plugins.refs import missing_module
from lmkit.plugins.switches import Pattern, Switches
from lmkit_testing.host import OpenHost
from lmkit_testing.world import World

GOOD = """
from lmkit.api import SchedulerSpec, hookimpl

@hookimpl
def lmkit_schedulers():
    yield SchedulerSpec(name="{name}", summary="Fine", target="{module}:lmkit_schedulers"{extra})
"""


def scheduler(world: World, name: str, *, source: str = "", extra: str = "", dist: str = "", **kwargs: object) -> str:
    """Add a scheduler plugin; returns its module."""
    dist = dist or f"p-{name}"
    module = f"{dist.replace('-', '_')}.hooks"
    text = source or GOOD.format(name=name, module=module, extra=extra)
    world.add(dist, {"scheduler": {name: module}}, {module: text}, **kwargs)
    return module


def state(host: PluginHost, name: str, kind: str = "scheduler") -> tuple[str, str]:
    """State and refusal code of an entry after loading."""
    entry = host.entries(kind, name)[0]
    if entry.state == "ok":
        host.open(entry)
    return entry.state, entry.reason.code if entry.reason else ""


def test_scan_imports_nothing(world: World) -> None:
    module = scheduler(world, "good")
    host = world.host()
    assert [(e.key, e.dist, e.version, e.state) for e in host.scan()] == [("scheduler:good", "p-good", "0.1.0", "ok")]
    assert host.names("scheduler") == ["good"]
    assert module not in sys.modules


def test_loading_one_imports_one(world: World) -> None:
    good, other = scheduler(world, "good"), scheduler(world, "other")
    spec = world.host().load("scheduler", "good")
    assert good in sys.modules
    assert other not in sys.modules
    assert spec.origin is not None
    assert (spec.origin.dist, spec.origin.version, spec.origin.module) == ("p-good", "0.1.0", good)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("raise RuntimeError('no luck')", "RuntimeError: no luck"),
        ("import sys; sys.exit(3)", "SystemExit: 3"),
        ("import module_that_is_not_there", "ModuleNotFoundError"),
        ("def broken(:", "SyntaxError"),
        ("", "does not implement lmkit_schedulers"),
        ("class Stop(BaseException): pass\nraise Stop('deep')", "Stop: deep"),
        (GOOD.format(name="another", module="x", extra=""), "the entry point is named 'bad', but"),
        (GOOD.format(name="bad", module="x", extra=", capability=1/0"), "ZeroDivisionError"),
        (GOOD.format(name="Bad Name", module="x", extra=""), "name 'Bad Name' must match"),
        (GOOD.format(name="bad", module="no colon at all", extra=""), "target"),
        (
            "from lmkit.api import hookimpl\n@hookimpl\ndef lmkit_schedulers():\n    return ['text']",
            "not a SchedulerSpec",
        ),
        ("from lmkit.api import hookimpl\n@hookimpl\ndef lmkit_schedulers(request):\n    return []", "Argument"),
        (
            "from lmkit.api import hookimpl\n@hookimpl(wrapper=True)\ndef lmkit_schedulers():\n    yield",
            "wrappers are not supported",
        ),
    ],
)
def test_a_broken_plugin_is_a_state(world: World, source: str, message: str) -> None:
    scheduler(world, "bad", source=source or "x = 1")
    scheduler(world, "good")
    host = world.host()
    assert state(host, "bad") == ("broken", "broken")
    reason = host.entries("scheduler", "bad")[0].reason
    assert reason is not None
    assert message in reason.offered
    assert host.load("scheduler", "good").name == "good"
    with pytest.raises(PluginError, match="bad"):
        host.load("scheduler", "bad")


def test_ctrl_c_passes(world: World) -> None:
    """Pressed while a plugin is imported, and not raised by its code: that is a fault of the plugin."""
    source = "import os, signal, time\nos.kill(os.getpid(), signal.SIGINT)\ntime.sleep(60)"
    scheduler(world, "slow", source=source)
    with pytest.raises(KeyboardInterrupt):
        world.host().load("scheduler", "slow")


def test_a_keyboard_interrupt_of_a_plugin_is_its_fault(world: World) -> None:
    scheduler(world, "bad", source="raise KeyboardInterrupt")
    with pytest.raises(PluginError, match="KeyboardInterrupt"):
        world.host().load("scheduler", "bad")


def test_strict_raises(world: World) -> None:
    scheduler(world, "bad", source="raise RuntimeError('no luck')")
    host = world.host(strict=True)
    with pytest.raises(PluginError, match="no luck") as caught:
        host.load("scheduler", "bad")
    assert isinstance(caught.value.__cause__, RuntimeError)


def test_a_broken_module_leaves_no_hooks_behind(world: World) -> None:
    scheduler(
        world, "bad",
        source="from lmkit.api import hookimpl\n@hookimpl\ndef lmkit_schedulers(): return []\n"
        "@hookimpl\ndef lmkit_models(nonsense): return []",
    )  # fmt: skip
    host = world.host()
    assert state(host, "bad") == ("broken", "broken")
    assert not any(p.__name__ == "p_bad.hooks" for p in host.get_plugins())


def test_unknown_hooks_are_pending_not_errors(world: World) -> None:
    extra = "\n@hookimpl\ndef lmkit_scheduler():\n    return []\n\ndef lmkit_helper():\n    return 1\n"
    scheduler(world, "good", source=GOOD.format(name="good", module="x", extra="") + extra, dist="p-good")
    world_host = world.host()
    entry = world_host.entries("scheduler", "good")[0]
    world_host.open(entry)
    assert entry.state in ("ok", "broken")
    assert "implements lmkit_scheduler, unknown to lmkit-core" in entry.warnings[0]
    assert "did you mean lmkit_schedulers?" in entry.warnings[0]


@pytest.mark.parametrize(
    ("requires", "code"),
    [
        (["lmkit-core>=9"], "core-too-old"),
        (["lmkit-core<0.0.1"], "core-too-new"),
        (["lmkit-core>=0.1,<0.1.0"], "core-too-new"),
        (["LMKIT_Core >= 9 ; python_version > '3'"], "core-too-old"),
        (["lmkit-core~=9.1"], "core-too-old"),
        (["lmkit-core==0.0.*"], "core-too-new"),
        (["lmkit-core>=9 ; extra == 'never'"], ""),
        (["other>=9"], ""),
        ([], ""),
    ],
)
def test_core_range_is_checked_before_import(world: World, requires: list[str], code: str) -> None:
    module = scheduler(world, "plugin", requires=requires)
    host = world.host()
    entry = host.scan()[0]
    assert (entry.state, entry.reason.code if entry.reason else "") == ("incompatible" if code else "ok", code)
    assert module not in sys.modules


def test_interface_number(world: World) -> None:
    scheduler(world, "old", extra=", interface=0")
    scheduler(world, "new", extra=", interface=2")
    host = world.host()
    assert state(host, "old") == ("incompatible", "interface-unsupported")
    assert state(host, "new") == ("incompatible", "interface-unsupported")


def test_duplicate_names_are_ambiguous_only_themselves(world: World) -> None:
    scheduler(world, "same", dist="first")
    scheduler(world, "same", dist="second")
    scheduler(world, "good")
    host = world.host()
    assert [e.state for e in host.entries("scheduler", "same")] == ["ambiguous", "ambiguous"]
    with pytest.raises(PluginError, match="name-conflict"):
        host.load("scheduler", "same")
    assert host.load("scheduler", "same", "Second").origin.dist == "second"  # type: ignore[union-attr]
    assert host.load("scheduler", "good").name == "good"


def test_disabling_one_settles_a_conflict(world: World) -> None:
    scheduler(world, "same", dist="first")
    scheduler(world, "same", dist="second")
    host = world.host(disable=(Pattern("first", "flag"),))
    assert host.load("scheduler", "same").origin.dist == "second"  # type: ignore[union-attr]


def test_a_dist_installed_twice_is_shadowed(world: World, tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler(world, "good")
    behind = World(tmp_path / "behind")
    behind.path.mkdir()
    scheduler(behind, "good", version="0.0.9")
    host = PluginHost(path=[str(world.path), str(behind.path)], switches=Switches())
    assert [(e.version, e.state) for e in host.entries("scheduler", "good")] == [("0.1.0", "ok"), ("0.0.9", "shadowed")]
    assert host.load("scheduler", "good").origin.version == "0.1.0"  # type: ignore[union-attr]


def test_damaged_metadata_is_a_warning(world: World) -> None:
    scheduler(world, "good")
    scheduler(world, "bad")
    next(world.path.glob("p_bad-*/METADATA")).unlink()
    scheduler(world, "worse")
    next(world.path.glob("p_worse-*/entry_points.txt")).write_text("[lmkit.scheduler\nworse = p_worse.hooks\n")
    host = world.host()
    assert host.names("scheduler") == ["good"]
    assert len(host.warnings) >= 1
    assert all("damaged" in w for w in host.warnings)


def test_unknown_groups_are_warnings(world: World) -> None:
    world.add("future", {"telepathy": {"mind": "future.hooks"}}, {})
    host = world.host()
    assert host.scan() == []
    assert host.warnings == ["future: unknown entry-point group lmkit.telepathy (newer plugin? typo?)"]


# --------------------------------------------------------------------------------------------------- switches


def switched(world: World, **environ: str) -> dict[str, str]:
    switches = Switches.build({f"LMKIT_PLUGINS_{k.upper()}": v for k, v in environ.items()})
    host = PluginHost(path=[str(world.path)], switches=switches)
    return {e.key: e.state for e in host.scan()}


@pytest.fixture
def several(world: World) -> World:
    scheduler(world, "one")
    scheduler(world, "two")
    world.attention("fast")
    world.platform("chip")
    return world


def test_the_environment_is_read(several: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LMKIT_PLUGINS_DISABLE", "scheduler:one")
    monkeypatch.setenv("LMKIT_STRICT_PLUGINS", "1")
    monkeypatch.setenv("LMKIT_TRACE_PLUGINS", "0")
    host = PluginHost(path=[str(several.path)])
    assert host.switches.strict
    with pytest.raises(PluginError, match="disabled by LMKIT_PLUGINS_DISABLE"):
        host.load("scheduler", "one")


def test_disable_patterns(several: World) -> None:
    assert switched(several, disable="scheduler:one")["scheduler:one"] == "disabled"
    assert switched(several, disable="toy-attention-*")["attention:fast"] == "disabled"
    off = switched(several, disable="scheduler:*, platform:chip")
    assert off == {
        "platform:chip": "disabled",
        "attention:fast": "ok",
        "scheduler:one": "disabled",
        "scheduler:two": "disabled",
    }


def test_only_acts_per_kind(several: World) -> None:
    """Allowing one scheduler does not take the platform away."""
    assert switched(several, only="scheduler:two") == {
        "platform:chip": "ok",
        "attention:fast": "ok",
        "scheduler:one": "disabled",
        "scheduler:two": "ok",
    }


def test_a_pattern_that_matches_nothing(several: World) -> None:
    host = PluginHost(path=[str(several.path)], switches=Switches.build({"LMKIT_PLUGINS_DISABLE": "scheduler:onne"}))
    host.scan()
    assert host.warnings == ["LMKIT_PLUGINS_DISABLE: 'scheduler:onne' matches no plugin"]
    with pytest.raises(ConfigError, match="onne") as caught:
        switched(several, only="scheduler:onne")
    assert "did you mean 'scheduler:one'?" in caught.value.fix


def test_switches_act_before_import(several: World) -> None:
    host = several.host(disable=(Pattern("scheduler:one", "lmkit.toml"),))
    with pytest.raises(PluginError, match=r"disabled by lmkit\.toml"):
        host.load("scheduler", "one")
    assert "p_one.hooks" not in sys.modules


def test_safe_mode_keeps_official_dists_only(several: World) -> None:
    scheduler(several, "fcfs", dist="lmkit-scheduler-fcfs")
    host = PluginHost(path=[str(several.path)], switches=Switches.build({}, official_only=True))
    assert {e.name for e in host.scan() if e.state == "ok"} == {"fcfs"}


# ------------------------------------------------------------------------------------------- behaviour hooks

EXTENSION = """
import logging
from lmkit.api import hookimpl

@hookimpl
def lmkit_resolve_checkpoint(ref, options):
    {body}

@hookimpl
def lmkit_engine_started(info):
    {observer}
"""


def extension(world: World, name: str, body: str = "return None", observer: str = "pass") -> None:
    module = f"{name}.hooks"
    world.add(name, {"extension": {name: module}}, {module: EXTENSION.format(body=body, observer=observer)})


def test_first_result_that_is_not_none(world: World) -> None:
    extension(world, "ext_a")
    extension(world, "ext_b", "return 'answer of b'")
    assert world.host().first("lmkit_resolve_checkpoint", ref="x", options=None) == "answer of b"


def test_an_exception_of_a_behaviour_hook_names_the_plugin(world: World) -> None:
    extension(world, "ext_bad", "raise ValueError('what')")
    with pytest.raises(PluginError, match=r"ext_bad\.hooks raised ValueError: what"):
        world.host().first("lmkit_resolve_checkpoint", ref="x", options=None)


def test_observers_never_fail(world: World, caplog: pytest.LogCaptureFixture) -> None:
    extension(world, "ext_bad", observer="raise SystemExit(1)")
    extension(world, "ext_good", observer="logging.getLogger('seen').warning('saw %s', info)")
    world.host().notify("lmkit_engine_started", info="it")
    assert "saw it" in caplog.text
    assert "ext_bad.hooks failed" in caplog.text


def test_a_broken_extension_is_a_warning(world: World) -> None:
    world.add("ext-bad", {"extension": {"bad": "ext_bad2.hooks"}}, {"ext_bad2.hooks": "raise RuntimeError('x')"})
    host = world.host()
    assert host.gather("lmkit_doctor_checks") == []
    assert host.warnings == ["extension bad (ext-bad) is off: RuntimeError: x"]


def test_hooks_of_plugins_that_were_not_selected_stay_silent(world: World) -> None:
    source = GOOD.format(name="loud", module="x", extra="") + (
        "\n@hookimpl\ndef lmkit_configure(config):\n    yield 'loud'\n"
    )
    scheduler(world, "loud", source=source)
    host = world.host()
    host.load("scheduler", "loud")
    assert not host.implements("lmkit_engine_started")
    nothing = {"config": None, "plan": None, "info": None}
    assert host.gather("lmkit_configure", **nothing) == []
    host.activate("p_loud.hooks")
    assert host.gather("lmkit_configure", **nothing) == [("p_loud.hooks", "loud")]


def test_trace_logs_what_plugins_are_asked(
    world: World, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    scheduler(world, "good")
    monkeypatch.setenv("LMKIT_TRACE_PLUGINS", "1")
    with caplog.at_level(logging.WARNING, "lmkit.plugins"):
        world.host().load("scheduler", "good")
    assert [record.message.partition(" -> ")[0] for record in caplog.records] == [
        *["scheduler:good of p-good: importing p_good.hooks"] * 2, *["lmkit_schedulers of p_good.hooks"] * 2
    ]  # fmt: skip


def test_add_registers_a_module_without_installation(lmkit_host: OpenHost) -> None:
    module = ModuleType("made_up.hooks")

    @hookimpl
    def lmkit_schedulers() -> list[SchedulerSpec]:
        return [SchedulerSpec(name="made_up", summary="Made up", target="made_up.hooks:x")]

    module.lmkit_schedulers = lmkit_schedulers  # type: ignore[attr-defined]
    lmkit_host.add(module)
    assert lmkit_host.load("scheduler", "made_up").summary == "Made up"
    assert lmkit_host.names("scheduler") == ["made_up"]


def test_what_only_the_program_itself_has_is_refused_with_what_to_do() -> None:
    assert "put the class into a module of its own" in (missing_module("__main__:Mine") or "")
