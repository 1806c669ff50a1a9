"""`pytest --quick` takes all of what a change can have broken, and of the rest what covers it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from lmkit_testing import ModelConformance
from lmkit_testing.quick import COVER, Choice, changed_dists

git = pytest.mark.skipif(shutil.which("git") is None, reason="needs git")


def run_git(root: Path, *arguments: str) -> None:
    who = ["-c", "user.name=a", "-c", "user.email=a@b"]
    env = {k: v for k, v in os.environ.items() if not k.startswith("GIT_")} | {"HOME": str(root)}
    subprocess.run(["git", *who, *arguments], cwd=root, check=True, capture_output=True, env=env)


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """Three dists: the second depends on the first, the third on nobody. Their tests lie beside them."""
    for name, needs in (("one", []), ("two", ["lmkit-one>=0.1"]), ("three", ["torch>=2"])):
        folder = tmp_path / "plugins" / "models" / name
        (folder / "tests").mkdir(parents=True)
        dependencies = json.dumps(["lmkit-core>=0.1", *needs])
        (folder / "pyproject.toml").write_text(f'[project]\nname = "lmkit-{name}"\ndependencies = {dependencies}\n')
    return tmp_path


@git
@pytest.mark.parametrize("commit", [False, True])
def test_changed_are_dists_with_other_files_than_main_and_their_dependents(repository: Path, commit: bool) -> None:
    run_git(repository, "init", "-b", "main")
    run_git(repository, "add", "-A")
    run_git(repository, "commit", "-m", "a")
    run_git(repository, "switch", "-c", "work")
    assert changed_dists(repository) == {}
    (repository / "plugins" / "models" / "one" / "new.py").touch()
    if commit:
        run_git(repository, "add", "-A")
        run_git(repository, "commit", "-m", "b")
    assert set(changed_dists(repository)) == {"lmkit-one", "lmkit-two"}


def test_without_main_nothing_has_changed(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(repository.parent))
    assert changed_dists(repository) == {}


class Llama(ModelConformance):
    plugin = "model:LlamaForCausalLM"


class Mistral(ModelConformance):
    plugin = "model:MistralForCausalLM"  # of the same dist and module


def item(name: str, cls: Any = None, marks: tuple[pytest.Mark, ...] = (), **params: str) -> Any:
    path = Path("/repository/plugins/models/llama/tests/test_llama.py")
    find = {mark.name: mark for mark in marks}.get
    return SimpleNamespace(
        name=name, originalname=name, cls=cls, path=path, callspec=SimpleNamespace(params=params),
        get_closest_marker=find,
    )  # fmt: skip


@pytest.fixture
def choice(tmp_path: Path) -> Choice:
    file = tmp_path / COVER
    file.parent.mkdir(parents=True)
    known = {"LlamaForCausalLM": {"base": False, "tied": True, "biases": False}}
    file.write_text(json.dumps({"configurations": known, "greedy": {"LlamaForCausalLM": False}}))
    made = Choice(tmp_path)
    made.changed = {}
    return made


def test_a_configuration_that_others_cover_is_left_out_but_for_its_first(choice: Choice) -> None:
    def takes(name: str, variant: str, cls: Any = Llama) -> bool:
        return choice.takes(item(name, cls, variant=variant))

    assert takes("test_chunks_equal_the_whole", "tied")
    assert not takes("test_chunks_equal_the_whole", "biases")
    assert not takes("test_float32", "biases")
    assert takes("test_float32", "base")
    assert not takes("test_chunks_equal_the_whole", "base")
    assert takes("test_chunks_equal_the_whole", "unheard of")
    assert takes("test_chunks_equal_the_whole", "base", Mistral), "the file does not know it"
    assert choice.takes(item("test_refs_resolve", Llama))
    assert not choice.takes(item("test_greedy_tokens", architecture="LlamaForCausalLM"))
    assert choice.takes(item("test_greedy_tokens", architecture="MistralForCausalLM"))


def test_what_is_said_of_a_dist_is_asked_once(choice: Choice) -> None:
    for name in ("test_works_alone", "test_hooks_module_is_light", "test_registration_is_pure"):
        assert [choice.takes(item(name, cls)) for cls in (Llama, Mistral, Llama)] == [True, False, False]


def test_full_is_left_out_unless_a_dist_that_it_names_has_changed(choice: Choice) -> None:
    plain, named = pytest.mark.full.mark, pytest.mark.full("lmkit-bench").mark
    assert not choice.takes(item("test_a", marks=(plain,)))
    assert not choice.takes(item("test_a", marks=(named,)))
    choice.changed = {"lmkit-bench": Path("/repository/plugins/frontends/bench")}
    assert not choice.takes(item("test_a", marks=(plain,)))
    assert choice.takes(item("test_a", marks=(named,)))


def test_all_of_a_changed_dist_is_taken(choice: Choice) -> None:
    choice.changed = {"lmkit-model-llama": Path("/repository/plugins/models/llama")}
    assert choice.takes(item("test_chunks_equal_the_whole", Llama, variant="biases"))
    assert choice.takes(item("test_greedy_tokens", plugin="model:LlamaForCausalLM", architecture="LlamaForCausalLM"))
    assert choice.takes(item("test_a", marks=(pytest.mark.full.mark,)))
    assert [choice.takes(item("test_works_alone", cls)) for cls in (Llama, Mistral)] == [True, True]
