"""Each kind of trouble is found, named, and comes with a remedy; healthy plugins give no finding."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from lmkit.plugins import limits
from lmkit.plugins.host import PluginHost
from lmkit.plugins.switches import Pattern
from lmkit_cli.health import examine, import_budgets
from lmkit_testing.world import World


def findings(world: World, **switches: object) -> dict[tuple[str, str], str]:
    return {(f.subject, f.code): f.level for f in examine(world.host(**switches))}


def test_healthy(whole: World) -> None:
    assert findings(whole) == {}


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("source", "code", "level"),
    [
        ("1 / 0", "broken", "error"),
        ("import sys; sys.exit(0)", "broken", "error"),
        ("{good}\nimport numpy", "import-budget", "error"),
        ("{good}\nimport time; time.sleep(0.7)", "import-slow", "warning"),
        ("{good}\n@hookimpl\ndef lmkit_attention_backend(): return []", "unknown-hook", "warning"),
        ("{good}\ndef later():\n    from lmkit.plugins.host import PluginHost", "private-import", "error"),
        ("{good}\nfrom lmkit import config", "private-import", "error"),
        ("{two}", "no-entry-point", "warning"),
    ],
)
def test_trouble_in_a_module(world: World, source: str, code: str, level: str) -> None:
    good = (
        "from lmkit.api import AttentionSpec, hookimpl\n@hookimpl\ndef lmkit_attention_backends():\n"
        "    yield AttentionSpec(name='it', summary='it', target='it_x.hooks:x', dtypes=frozenset({'float32'}))\n"
    )
    two = good + good.splitlines()[-1].replace("'it',", "'second',", 1) + "\n"
    world.add("it-dist", {"attention": {"it": "it_x.hooks"}}, {"it_x.hooks": source.format(good=good, two=two)})
    found = examine(world.host())
    subject = "attention:second" if code == "no-entry-point" else "attention:it"
    assert (subject, code, level) in [(f.subject, f.code, f.level) for f in found]
    assert all(f.fix for f in found)


def test_trouble_in_metadata(world: World) -> None:
    world.attention("unranged", requires=[])
    world.attention("pinned", requires=["lmkit-core>=0.1,<0.3", "torch==2.4.0"])
    world.attention("old", requires=["lmkit-core<0.0.1"])
    world.attention("needy", "requires=('nowhere-to-be-found>=3',)")
    world.attention("twice", dist="first")
    world.attention("twice", dist="second")
    world.attention("off")
    found = findings(world, disable=(Pattern("attention:off", "flag"),))
    assert found == {
        ("toy-attention-unranged", "no-core-range"): "warning",
        ("toy-attention-pinned", "exact-pin"): "warning",
        ("toy-attention-pinned", "dependency"): "warning",
        ("attention:old", "core-too-new"): "error",
        ("attention:needy", "requirement-missing"): "info",
        ("attention:twice", "name-conflict"): "error",
        ("attention:off", "disabled"): "info",
    }


def test_shadowed_and_shared_files(world: World, tmp_path) -> None:
    world.attention("it", dist="first")
    world.add("second", {"attention": {"other": "first.hooks"}}, {"first.hooks": "x = 1"})
    behind = World(tmp_path / "behind")
    behind.path.mkdir()
    behind.attention("it", dist="first", version="0.0.1")
    from lmkit.plugins.switches import Switches

    host = PluginHost(path=[str(world.path), str(behind.path)], switches=Switches())
    found = {(f.subject, f.code) for f in examine(host)}
    assert {("attention:it", "shadowed"), ("first", "shared-file")} <= found


def test_targets_are_imported_on_request(world: World) -> None:
    world.attention("it", target="not_there:It")
    assert findings(world) == {}
    found = {(f.subject, f.code): f.level for f in examine(world.host(), imports=True)}
    assert found == {("attention:it", "target-import"): "error"}


def test_checks_that_plugins_bring(world: World) -> None:
    source = (
        "from lmkit.api import DoctorCheck, hookimpl\ndef low(): return 'battery is low'\ndef fine(): return None\n"
        "def bad(): raise SystemExit\n@hookimpl\ndef lmkit_doctor_checks():\n"
        "    for n in ('low', 'fine', 'bad'):\n"
        "        yield DoctorCheck(name=n, summary='x', target=f'toy_health.hooks:{n}')\n"
    )
    world.add("toy-health", {"extension": {"health": "toy_health.hooks"}}, {"toy_health.hooks": source})
    assert findings(world) == {
        ("toy_health.hooks", "toy_health.low"): "error",
        ("toy_health.hooks", "toy_health.bad"): "error",
    }


def test_budget_is_measured_in_a_fresh_process() -> None:
    budgets = import_budgets(["lmkit.builtin", "numpy", "no_such_module"])
    assert [heavy for heavy, _ in budgets.values()] == [[], ["numpy"], []]
    assert budgets["lmkit.builtin"][1] < 0.5


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    "source",
    ["while True: pass", "import time\ntime.sleep(3600)", "def lmkit_attention_backends():\n    while True: pass"],
)
def test_a_module_that_never_ends_is_named_and_ended(
    world: World, source: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LMKIT_PLUGIN_SECONDS", "1")
    world.attention("fine")
    world.add("it-dist", {"attention": {"it": "it_x.hooks"}}, {"it_x.hooks": source})
    found = {f.subject: f for f in examine(world.host())}
    assert found["attention:it"].code == "endless"
    assert "it-dist" in found["attention:it"].fix
    assert "attention:fine" not in found


def test_what_the_doctor_started_does_not_outlive_it(tmp_path: Path) -> None:
    (tmp_path / "endless.py").write_text(
        "import os\nfrom pathlib import Path\n"
        f"Path({str(tmp_path / 'new')!r}).write_text(str(os.getpid()))\n"
        f"os.rename({str(tmp_path / 'new')!r}, {str(tmp_path / 'pid')!r})\nwhile True: pass\n"
    )
    code = "from lmkit_cli.apart import examine_apart; examine_apart(['endless'], 600)"
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    with subprocess.Popen([sys.executable, "-c", code], env=environment) as process:
        try:
            _until(lambda: (tmp_path / "pid").exists())
        finally:
            process.kill()
    pid = int((tmp_path / "pid").read_text())
    try:
        _until(lambda: not Path(f"/proc/{pid}").exists() or "State:\tZ" in Path(f"/proc/{pid}/status").read_text())
    except BaseException:
        os.kill(pid, signal.SIGKILL)
        raise


def _until(done: object, seconds: float = 30.0) -> None:
    end = time.monotonic() + seconds
    while not done():  # type: ignore[operator]
        assert time.monotonic() < end
        time.sleep(0.02)


def test_a_slow_plugin_is_named_while_it_is_waited_for(
    world: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "lmkit.plugins")
    monkeypatch.setattr(limits, "NAMED_SECONDS", 0.05)
    source = "import time\ntime.sleep(0.3)\n"
    world.add("it-dist", {"attention": {"it": "it_x.hooks"}}, {"it_x.hooks": source})
    host = world.host()
    host.open(host.entries("attention", "it")[0])
    assert "LMKIT_PLUGINS_DISABLE=attention:it" in caplog.text


HOOKS_OF = """
from lmkit.api import hookimpl, {spec}

@hookimpl
def {registration}():
    yield {spec}(name="it", summary="it", target="it_x.hooks:hookimpl"{more})

@hookimpl
def {hook}({arguments}):
    return None
"""
LOADER = {"spec": "LoaderSpec", "registration": "lmkit_loaders", "more": ", formats=('x',)"}
DIALECT = {"spec": "DialectSpec", "registration": "lmkit_dialects", "more": ""}


@pytest.mark.parametrize(
    ("kind", "words", "hook", "arguments", "extension", "level"),
    [
        ("loader", LOADER, "lmkit_resolve_checkpoint", "ref, options", False, "error"),
        ("loader", LOADER, "lmkit_resolve_checkpoint", "ref, options", True, None),
        ("loader", LOADER, "lmkit_configure", "config, plan, info", False, None),  # once it is chosen
        ("dialect", DIALECT, "lmkit_configure", "config, plan, info", False, "error"),
        ("dialect", DIALECT, "lmkit_engine_started", "info", False, "error"),
        ("dialect", DIALECT, "lmkit_engine_started", "info", True, None),
        ("loader", LOADER, "lmkit_dialects", "", False, "error"),
        ("loader", LOADER, "lmkit_tokenizers", "", True, "error"),
    ],
)
def test_hooks_that_nobody_calls(
    world: World, kind: str, words: dict[str, str], hook: str, arguments: str, extension: bool, level: str | None
) -> None:
    """A4: the doctor names the entry point that is missing."""
    groups = {kind: {"it": "it_x.hooks"}} | ({"extension": {"it": "it_x.hooks"}} if extension else {})
    world.add("it-dist", groups, {"it_x.hooks": HOOKS_OF.format(hook=hook, arguments=arguments, **words)})
    found = [f for f in examine(world.host()) if f.code == "uncalled-hook"]
    assert {f.level for f in found} == ({level} if level else set())
    for f in found:
        assert hook in f.message
        group = "lmkit.extension" if arguments else f"lmkit.{hook.removeprefix('lmkit_').removesuffix('s')}"
        assert f'[project.entry-points."{group}"] it = "it_x.hooks"' in f.fix


@pytest.mark.parametrize(
    ("source", "hint"),
    [
        ("def lmkit_schedulers(): return []", "not marked with @hookimpl"),
        ("def lmkit_scheduler(): return []", "has a function lmkit_scheduler: is that a misspelling"),
    ],
)
def test_a_hook_that_is_not_found_has_a_hint(world: World, source: str, hint: str) -> None:
    world.add("it-dist", {"scheduler": {"it": "it_x.hooks"}}, {"it_x.hooks": source})
    (found,) = [f for f in examine(world.host()) if f.subject == "scheduler:it"]
    assert hint in found.message
    assert "broken: broken" not in found.message


def test_an_extension_without_hooks_and_an_unknown_group(world: World) -> None:
    world.add("it-dist", {"extension": {"it": "it_x.hooks"}, "shcheduler": {"it": "x:y"}}, {"it_x.hooks": "x = 1"})
    found = findings(world)
    assert found[("extension:it", "no-hook")] == "warning"
    assert found[("plugins", "table")] == "warning"


def test_a_name_that_is_settled_is_a_warning(world: World) -> None:
    world.attention("cpu", dist="lmkit-attention-cpu")
    world.attention("cpu", dist="another")
    assert findings(world) == {("attention:cpu", "name-conflict"): "warning"}


def test_the_name_of_our_dist_makes_no_plugin_ours(world: World) -> None:
    """B10: `--no-plugins` leaves out what the catalog does not have."""
    world.attention("mine", dist="lmkit-attention-flash-attn")
    (entry,) = world.host(official_only=True).entries("attention", "mine")
    assert (entry.official, entry.state) == (False, "disabled")
