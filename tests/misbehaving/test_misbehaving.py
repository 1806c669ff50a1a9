"""A hundred plugins that do what they must not: each is named by the doctor and where it is used; the others work."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path

import pytest
from lmkit.api import LmkitError
from lmkit.config import EngineConfig, ModelConfig
from lmkit.plugins.resolve import resolve
from lmkit_cli.health import Finding, examine
from lmkit_testing.host import dist_dir
from lmkit_testing.world import World

from .plugins import ENDLESS, HEAD, ROWS, Row

__all__ = ["dist_dir"]
TOY = ModelConfig(model="toy")


@pytest.fixture
def whole(dist_dir: World) -> World:
    return World(dist_dir.path).everything()


def add(world: World, rows: Iterable[Row]) -> None:
    for r in rows:
        world.add(r.dist, {r.kind: {r.name: r.module}}, {r.module: r.source}, requires=r.requires)


def of(row: Row, findings: Iterable[Finding]) -> list[Finding]:
    """Those that name it, by key, dist or module."""
    return [f for f in findings if f.subject in (f"{row.kind}:{row.name}", row.dist, row.module)]


def test_the_doctor_names_each_and_the_others_are_well(whole: World) -> None:
    add(whole, ROWS)
    host = whole.host()
    findings = examine(host, imports=True)
    wrong = []
    for row in ROWS:
        own = of(row, findings)
        if row.code and (row.code, row.level) not in [(f.code, f.level) for f in own]:
            wrong.append(f"{row.id}: needs {row.level} {row.code}, has {own}")
        if not row.code and own:
            wrong.append(f"{row.id}: is well at rest, but {own}")
    wrong += [f"{f.subject} has no fix" for f in findings if not f.fix and not f.code.endswith((".look", "broken"))]
    wrong += [f"{f.subject}: {f.fix}" for f in findings if "lmkit plugins doctor" in f.fix]
    bad = {f.subject for row in ROWS for f in of(row, findings)} | {"scheduler:somebody_else", "scheduler:Bad Name"}
    wrong += [f"{f.subject} is well, but {f}" for f in findings if f.subject not in bad]
    assert not wrong, "\n".join(wrong)
    assert host.load("attention", "ref").name == "ref"


def test_the_line_of_the_plugin_is_shown(whole: World) -> None:
    rows = [row for row in ROWS if row.id in ("raises-late", "syntax", "hook-raises", "probe-raises", "missing-module")]
    add(whole, rows)
    lines = {"raises-late": 2, "syntax": 1, "hook-raises": 6, "probe-raises": 7, "missing-module": 1}
    findings = examine(whole.host())
    for row in rows:
        place = f"{whole.path / row.module.replace('.', '/')}.py:{lines[row.id]}"
        assert any(place in f.fix for f in of(row, findings)), (row.id, of(row, findings))


def used(world: World, row: Row) -> str:
    """What is said where a plugin is used: the error and its fix, or the warnings of the plan."""
    wanted = {row.kind: row.name} if row.asked == "named" else {}
    try:
        plan = resolve(EngineConfig(model=TOY, wanted=wanted), world.host(), imports=True)[0]
    except LmkitError as e:
        return f"{e} {e.fix}"
    return "\n".join(plan.warnings) if row.asked == "warned" else ""


@pytest.mark.parametrize(
    "row", [pytest.param(r, marks=pytest.mark.one_in(2)) for r in ROWS if r.asked], ids=lambda r: r.id
)
def test_it_is_named_where_it_is_used(row: Row, whole: World) -> None:
    add(whole, [row])
    said = used(whole, row)
    assert row.name in said or row.dist in said, said
    if row.asked == "named":  # who does not name it does not notice it
        assert resolve(EngineConfig(model=TOY, wanted={"platform": "plain"}), whole.host())[0].choice("scheduler")


@pytest.mark.parametrize(
    "row", [pytest.param(r, marks=pytest.mark.one_in(3)) for r in ENDLESS if r.asked], ids=lambda r: r.id
)
def test_nothing_waits_for_ever(row: Row, whole: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LMKIT_PLUGIN_SECONDS", "2")
    add(whole, [row])
    said = used(whole, row)
    assert row.name in said or row.dist in said, said
    assert "has not ended after 2 s" in said


@pytest.mark.parametrize("row", [pytest.param(r, marks=pytest.mark.one_in(3)) for r in ENDLESS], ids=lambda r: r.id)
def test_the_doctor_ends_what_does_not_end(row: Row, whole: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LMKIT_PLUGIN_SECONDS", "2")
    add(whole, [row])
    found = of(row, examine(whole.host()))
    assert [f.code for f in found if f.code == "endless"] == ([row.code] if row.code else []), found


def test_ctrl_c_names_who_is_waited_for(whole: World) -> None:
    """In a process of its own, as somebody at a terminal would."""
    (whole.path / "started").unlink(missing_ok=True)
    source = f"import time\nfrom pathlib import Path\nPath({str(whole.path / 'started')!r}).touch()\ntime.sleep(3600)"
    whole.add("bad-import", {"extension": {"sleeper": "bad_sleeper.hooks"}}, {"bad_sleeper.hooks": source})
    environment = os.environ | {"PYTHONPATH": str(whole.path)}
    command = [sys.executable, "-m", "lmkit", "explain", "attention", "--model", "toy"]
    with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True) as process:
        try:
            _until((whole.path / "started").exists)
            process.send_signal(signal.SIGINT)
            _, said = process.communicate(timeout=60)
        finally:
            process.kill()
    assert process.returncode == 130
    assert "extension:sleeper" in said
    assert "interrupted" in said


@pytest.mark.one_in(3)
@pytest.mark.parametrize("command", [["--help"], ["plugins", "list"], ["--version"]])
def test_who_only_looks_loads_no_plugin(command: list[str], whole: World) -> None:
    add(whole, [row for row in (*ROWS, *ENDLESS) if row.id in ("exits-hard", "import-sleeps", "killed")])
    whole.add("bad-extension", {"extension": {"x": "bad_x.hooks"}}, {"bad_x.hooks": "import os; os._exit(9)"})
    environment = os.environ | {"PYTHONPATH": str(whole.path)}
    subprocess.run([sys.executable, "-m", "lmkit", *command], env=environment, check=True, stdout=subprocess.DEVNULL)


def test_a_command_that_is_never_run_is_named(whole: World, monkeypatch: pytest.MonkeyPatch) -> None:
    whole.add("bad-command", {"command": {"serve": "bad_command:serve"}})
    assert [f.code for f in examine(whole.host()) if f.subject == "command:serve"] == ["shadowed"]


def _until(done: object, seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not done():  # type: ignore[operator]
        assert time.monotonic() < end
        time.sleep(0.02)


def test_a_name_of_lmkits_own_stays_its_own(whole: World) -> None:
    """A second dist of the name is warned of; `dist/name` takes it, of models too."""
    whole.attention("cpu", dist="lmkit-attention-cpu")  # as ours is called
    whole.attention("cpu", dist="another")
    whole.add("shadow", {"model": {"ToyForCausalLM": "shadow.hooks"}}, {"shadow.hooks": _model_source(whole)})
    host = whole.host()
    assert [(e.dist, e.state) for e in host.entries("attention", "cpu")] == [
        ("another", "ambiguous"), ("lmkit-attention-cpu", "ok"),
    ]  # fmt: skip
    with pytest.raises(LmkitError) as caught:
        resolve(EngineConfig(model=TOY), host)
    assert "toy-model/ToyForCausalLM" in caught.value.fix
    for impl in ("toy-model/ToyForCausalLM", "shadow/native"):
        config = EngineConfig(model=ModelConfig(model="toy", impl=impl), wanted={"attention": "another/cpu"})
        plan = resolve(config, whole.host())[0]
        assert [c.dist for c in plan.choices if c.kind in ("model", "attention")] == [impl.partition("/")[0], "another"]
        assert any("attention:cpu is a name of several dists" in text for text in plan.warnings)
    assert host.load("attention", "cpu").origin.dist == "lmkit-attention-cpu"
    assert host.load("attention", "another/cpu").origin.dist == "another"


def _model_source(world: World) -> str:
    return Path(world.path, "toy_model", "hooks.py").read_text()


def test_what_is_printed_at_import_does_not_reach_standard_output(whole: World) -> None:
    """B4: `--json` stays JSON, and the doctor names who prints."""
    source = (
        "print('hello from import')\nimport sys\nsys.stdout.close()\nfrom lmkit.api import hookimpl\n@hookimpl\n"
        "def lmkit_configure(config, plan, info):\n    print('hello from a hook')\n    return []\n"
    )
    whole.add("bad-talker", {"extension": {"talker": "bad_talker.hooks"}}, {"bad_talker.hooks": source})
    environment = os.environ | {"PYTHONPATH": str(whole.path)}
    command = [sys.executable, "-m", "lmkit", "explain", "attention", "--model", "toy", "--json"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["topics"]
    assert "hello from import" in done.stderr
    assert "hello from a hook" in done.stderr
    (found,) = [f for f in examine(whole.host()) if f.code == "prints"]
    assert (found.level, found.subject) == ("error", "extension:talker")
    assert "hello from import" in found.message


@pytest.mark.parametrize("leave", ["os._exit(7)", "from posix import _exit as leave; import signal; os.abort()"])
def test_a_plugin_that_nobody_chose_and_ends_the_process_is_named(whole: World, leave: str) -> None:
    """B5: by the error of the plugin, or by the stack where the process cannot go on."""
    whole.add("bad-ender", {"extension": {"ender": "bad_ender.hooks"}}, {"bad_ender.hooks": f"import os\n{leave}"})
    environment = os.environ | {"PYTHONPATH": str(whole.path)}
    code = "from lmkit.command import main; main()"
    command = [sys.executable, "-c", code, "explain", "attention", "--model", "toy", "--json"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=120)
    if "abort" in leave:
        assert done.returncode < 0
        assert "bad_ender/hooks.py" in done.stderr
    else:
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout)["topics"]
        assert "ender" in done.stdout + done.stderr


@pytest.mark.parametrize(
    "body", ["raise OSError", "return 5", "yield 'sched.max_tokens=5'", "raise SystemExit", "raise KeyboardInterrupt"]
)
def test_hooks_that_stop_the_start_say_how_to_start_without_them(whole: World, body: str) -> None:
    """B9."""
    source = f"{HEAD}@hookimpl\ndef lmkit_configure(config, plan, info):\n    {body}\n"
    whole.add("bad-hook", {"extension": {"bad": "bad_hook.hooks"}}, {"bad_hook.hooks": source})
    with pytest.raises(LmkitError) as caught:
        resolve(EngineConfig(model=TOY), whole.host())
    assert caught.value.code == "plugin"
    assert "LMKIT_PLUGINS_DISABLE=extension:bad" in caught.value.fix
