"""`lmkit plugins` and `lmkit explain` as commands."""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import lmkit_cli
import pytest
from lmkit.api import ConfigError, UnknownName
from lmkit.plugins.catalog import folders
from lmkit_cli import plugins
from lmkit_cli.scaffold import MORE_DEPENDENCIES, entry_name, kinds, write_plugin
from lmkit_testing.dists import write_dist
from packaging.requirements import Requirement


@dataclass
class Done:
    code: int
    stdout: str
    stderr: str


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Callable[..., Done]:
    """run("plugins", "list") -> Done, in this process."""

    def call(*arguments: str) -> Done:
        capsys.readouterr()
        code = lmkit_cli.run(arguments)
        return Done(code, *capsys.readouterr())

    return call


@pytest.fixture
def extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder on sys.path with a broken plugin and one of another core."""
    folder = tmp_path / "extra"
    folder.mkdir()
    monkeypatch.syspath_prepend(str(folder))
    write_dist(folder, "p-broken", {"scheduler": {"broken": "p_broken.hooks"}}, {"p_broken.hooks": "1 / 0"})
    write_dist(folder, "p-old", {"scheduler": {"old": "p_old.hooks"}}, {}, requires=["lmkit-core<0.0.1"])
    return folder


def test_list_imports_no_plugin(extra: Path) -> None:
    code = (
        f"import sys\nsys.path.insert(0, {str(extra)!r})\nimport lmkit_cli\n"
        "assert lmkit_cli.run(['plugins', 'list', '--json']) == 0\n"
        "heavy = ('torch', 'numpy', 'transformers')\n"
        "found = [m for m in sys.modules if m in heavy or m.startswith(('lmkit_', 'p_')) and m[:9] != 'lmkit_cli']\n"
        "print(found, file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr.splitlines()[-1] == "[]"
    rows = {f"{r['kind']}:{r['name']}": r for r in json.loads(done.stdout)["plugins"]}
    assert rows["executor:uniproc"]["state"] == "ok"
    assert rows["scheduler:broken"]["state"] == "ok"  # nobody has tried
    assert (rows["scheduler:old"]["state"], rows["scheduler:old"]["code"]) == ("incompatible", "core-too-new")


def test_list_with_load_and_kind(extra: Path, run: Callable[..., Done]) -> None:
    done = run("plugins", "list", "--kind", "scheduler", "--load", "--json")
    rows = {r["name"]: r for r in json.loads(done.stdout)["plugins"]}
    assert {r["kind"] for r in rows.values()} == {"scheduler"}
    assert rows["broken"]["state"] == "broken"
    assert "ZeroDivisionError" in rows["broken"]["reason"]
    done = run("plugins", "list", "--kind", "scheduller")
    assert done.code == 2
    assert "scheduler" in done.stderr


def test_names_are_whole_in_a_pipe(extra: Path, run: Callable[..., Done]) -> None:
    lines = run("plugins", "list", "--kind", "executor").stdout.splitlines()
    assert any(line.split()[:3] == ["executor", "uniproc", "lmkit-worker"] for line in lines)
    assert all(len(line.split()) >= 4 for line in lines)


def test_list_available(run: Callable[..., Done]) -> None:
    done = run("plugins", "list", "--available", "--json")
    rows = json.loads(done.stdout)["plugins"]
    assert {r["state"] for r in rows} <= {"ok", "not installed"}
    assert all(r["reason"].startswith("pip install ") for r in rows if r["state"] == "not installed")


def test_show(run: Callable[..., Done]) -> None:
    done = run("plugins", "show", "loader:safetensors", "--json")
    shown = json.loads(done.stdout)
    assert shown["spec"]["formats"] == ["safetensors"]
    assert shown["origin"]["dist"] == "lmkit-worker"
    done = run("plugins", "show", "loader:safetensors")
    assert "Memory-mapped" in done.stdout
    done = run("plugins", "show", "extension:demo", "--json")
    assert json.loads(done.stdout)["hooks"] == ["lmkit_resolve_checkpoint"]
    assert run("plugins", "show", "extension:demo").stdout.splitlines()[-1].split() == [
        "hooks",
        "lmkit_resolve_checkpoint",
    ]
    assert run("plugins", "show", "extension:nothing").code == 3
    assert run("plugins", "show", "nonsense").code == 2
    assert run("plugins", "show", "loader:nothing").code == 3


@pytest.mark.full
def test_doctor(extra: Path, run: Callable[..., Done]) -> None:
    done = run("plugins", "doctor", "--json")
    assert done.code == 1
    found = {(f["subject"], f["code"]) for f in json.loads(done.stdout)["findings"]}
    assert {("scheduler:broken", "broken"), ("scheduler:old", "core-too-new")} <= found


def test_explain_without_a_model(run: Callable[..., Done]) -> None:
    done = run("explain", "attention", "--model", "./no-such-folder", "--json")
    assert done.code == 0, done.stderr
    topic = json.loads(done.stdout)["topics"][0]
    assert (topic["kind"], topic["after"]) == ("attention", "checkpoint")
    assert run("explain", "atention").code == 2


@pytest.mark.parametrize("kind", [pytest.param(k, marks=[pytest.mark.full] * (k != "scheduler")) for k in kinds()])
def test_new_plugins_pass_their_own_tests(tmp_path: Path, kind: str, run: Callable[..., Done]) -> None:
    """The written dist is put on the path with the metadata that pip would write, and its test is run."""
    root = tmp_path / "project"
    done = run("plugins", "new", kind, "my_own", "--folder", str(root))
    assert done.code == 0, done.stderr
    module = f"lmkit_{kind}_my_own"
    write_dist(
        root / "src", f"lmkit-{kind}-my-own".replace("_", "-"), {kind: {entry_name(kind, "my_own"): f"{module}.hooks"}}
    )
    tests = next((root / "tests").glob("test_*.py"))
    code = f"import sys, pytest; sys.path.insert(0, {str(root / 'src')!r}); sys.exit(pytest.main(sys.argv[1:]))"
    arguments = ["-q", "-p", "no:cacheprovider", "-c", "/dev/null", "-k", NEW_TESTS, str(tests)]
    environment = {"PYTHONPATH": f"{root / 'src'}:{':'.join(p for p in sys.path if p)}"}
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=False, env=environment, cwd=root
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "passed" in done.stdout


NEW_TESTS = "not trials"  # the long part of the scheduler's kit


def test_new_refuses(tmp_path: Path) -> None:
    with pytest.raises(UnknownName, match="atention"):
        write_plugin("atention", "x", tmp_path / "a")
    with pytest.raises(ConfigError, match="no name for a plugin"):
        write_plugin("attention", "My-Own", tmp_path / "a")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    with pytest.raises(ConfigError, match="not empty"):
        write_plugin("attention", "mine", tmp_path / "full")


def test_test_runs_the_kit() -> None:
    code = "import lmkit_cli, sys; sys.exit(lmkit_cli.run(sys.argv[1:]))"
    command = ["plugins", "test", "loader:safetensors", "--", "-k", "light or pure"]
    done = subprocess.run([sys.executable, "-c", code, *command], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 passed" in done.stdout


def test_new_never_takes_a_name_that_exists(tmp_path: Path, run: Callable[..., Done], extra: Path) -> None:
    """A2: installing the scaffold would uninstall the dist of that name, and stand in for it."""
    taken = [
        ("attention", "cpu", "lmkit-attention-cpu is one of lmkit's own dists"),
        ("attention", "flash_attn", "lmkit-attention-flash-attn is one of lmkit's own dists"),  # not installed anywhere
        ("model", "llama", "lmkit-model-llama is one of lmkit's own dists"),
        ("tokenizer", "json", "lmkit-tokenizer-json is one of lmkit's own dists"),
        ("op", "linear_native", "lmkit-platform-cpu of lmkit's own has a op 'linear_native'"),
        ("extension", "demo", "of lmkit's own has a extension 'demo'"),
        ("scheduler", "broken", "p-broken has a scheduler 'broken'"),
    ]
    for i, (kind, name, why) in enumerate(taken):
        folder = tmp_path / str(i)
        done = run("plugins", "new", kind, name, "--folder", str(folder))
        said = " ".join(done.stderr.split())
        assert (done.code, folder.exists()) == (2, False), (kind, name)
        assert why in said
        assert "--force" in said
    assert run("plugins", "new", "attention", "cpu", "--folder", str(tmp_path / "forced"), "--force").code == 0


@pytest.mark.parametrize("name", ["3d", "1", "9x_y"])
def test_new_refuses_names_that_no_class_can_have(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="no name for a plugin"):
        write_plugin("attention", name, tmp_path / "a")


def test_the_first_line_of_new_installs_the_kit_where_it_is_missing(
    tmp_path: Path, run: Callable[..., Done], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A1: the environment of README's first command has no kit."""
    root = Path(lmkit_cli.__file__).parents[5]
    line = run("plugins", "new", "scheduler", "mine", "--folder", str(tmp_path / "a")).stdout.splitlines()[-1]
    assert line == f"next: pip install -e '{tmp_path / 'a'}[test]' && pytest {tmp_path / 'a'}"
    monkeypatch.setattr(plugins, "find_spec", lambda name: None)
    line = run("plugins", "new", "scheduler", "mine", "--folder", str(tmp_path / "b")).stdout.splitlines()[-1]
    first = line.removeprefix("next: ").partition(" && ")[0]
    assert first.startswith("pip install -e ")
    assert Path(first.removeprefix("pip install -e ")).resolve() == root / "tests" / "kit"


def test_what_a_scaffold_needs_is_in_the_default_set() -> None:
    """A1: else the lines that `plugins new` prints would look for dists that are on no index."""
    root = Path(lmkit_cli.__file__).parents[5]
    folders_of = folders()
    installed = {line.removeprefix("-e ./").partition("[")[0].strip() for line in
                 (root / "requirements.txt").read_text().splitlines() if line.startswith("-e ")}  # fmt: skip
    project = tomllib.loads((root / "tests/kit/pyproject.toml").read_text())["project"]
    needed = {Requirement(text).name for text in project["dependencies"]}
    needed |= {Requirement(part.strip(' "')).name for text in MORE_DEPENDENCIES.values()
               for part in text.format(range=">=0").split(",") if part.strip(' "')}  # fmt: skip
    own = {name for name in needed if name in folders_of}
    assert own
    assert {name for name in own if folders_of[name] not in installed} == set()
