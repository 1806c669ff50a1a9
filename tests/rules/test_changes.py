"""A change of the public surface says so in CHANGELOG.md: in the same commit, or before it is committed."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LOCK, CHANGES = "core/api.lock.json", "CHANGELOG.md"


def git(*arguments: str, root: Path = ROOT) -> list[str]:
    command = ["git", "-C", str(root), *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()


def silent(root: Path, rule: str) -> list[str]:
    """Commits since the one that has `rule` that change the lock without a word; "not committed" for what is not. What
    was merged counts as one.

    A clone without history has nothing to look at but what is not committed.
    """
    begin = git("log", "--diff-filter=A", "--format=%H", "--", rule, root=root)[-1:]
    since = [f"{begin[0]}..HEAD"] if begin else []
    commits = git("log", "--first-parent", "--format=%h", *since, "--", LOCK, root=root) if begin else []
    found = [c for c in commits if CHANGES not in git("diff", "--name-only", f"{c}^1", c, root=root)]
    changed = git("diff", "HEAD", "--name-only", "--", LOCK, CHANGES, root=root)
    return found + (["not committed"] if LOCK in changed and CHANGES not in changed else [])


@pytest.mark.skipif(
    bool(subprocess.run(["git", "-C", str(ROOT), "rev-parse", "-q"], check=False).returncode), reason="not a clone"
)
def test_changes_of_the_surface_are_told() -> None:
    rule = Path(__file__).relative_to(ROOT).as_posix()
    assert not silent(ROOT, rule), f"{LOCK} changed, and {CHANGES} does not say what that means for plugins"


def test_a_silent_change_is_found(tmp_path: Path) -> None:
    def commit(*files: str) -> str:
        for file in files:
            path = tmp_path / file
            path.parent.mkdir(exist_ok=True)
            path.write_text(path.read_text() + "x\n" if path.exists() else "x\n")
        git("add", "-A", root=tmp_path)
        who = ("-c", "user.name=x", "-c", "user.email=x@x")
        git(*who, "commit", "-q", "-m", "x", root=tmp_path)
        return git("log", "-1", "--format=%h", root=tmp_path)[0]

    git("init", "-q", root=tmp_path)
    commit(LOCK)  # before there was a rule
    commit("rule.py")
    commit(LOCK, CHANGES)
    commit("other")
    assert silent(tmp_path, "rule.py") == []
    bad = commit(LOCK)
    assert silent(tmp_path, "rule.py") == [bad]
    (tmp_path / LOCK).write_text("again")
    assert silent(tmp_path, "rule.py") == [bad, "not committed"]
    (tmp_path / CHANGES).write_text("again")
    assert silent(tmp_path, "rule.py") == [bad]
