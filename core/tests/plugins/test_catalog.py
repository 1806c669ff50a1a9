"""The catalog of official plugins is what the repository holds."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from lmkit.plugins.catalog import catalog, folders, install, install_command

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.skipif(not (ROOT / "tools" / "sync.py").exists(), reason="not a checkout of the repository")
def test_catalog_is_current() -> None:
    done = subprocess.run(
        [sys.executable, "tools/sync.py", "--check"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout


def test_commands() -> None:
    assert install_command("attention", "torch").endswith("plugins/attention/torch")
    assert install_command("model", "LlamaForCausalLM").endswith("plugins/models/llama")
    assert install_command("attention", "nothing") == ""
    assert all(dist.startswith("lmkit-") for names in catalog().values() for dist in names.values())
    assert {
        "lmkit-core",
        "lmkit-bench",
        *(d for names in catalog().values() for d in names.values()),
    } <= set(folders())


def test_only_folders_are_installed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """In a checkout: a path that is there, seen from here; without one: the path in it. Never a name of a registry."""
    module = sys.modules["lmkit.plugins.catalog"]
    monkeypatch.chdir(module.CHECKOUT)
    assert install("lmkit-bench", "plot") == "pip install -e 'plugins/frontends/bench[plot]'"
    monkeypatch.chdir(tmp_path)
    assert install("lmkit-core") == f"pip install -e {module.CHECKOUT / 'core'}"
    monkeypatch.setattr(module, "CHECKOUT", tmp_path)
    assert install("lmkit-core") == "pip install -e core, in a checkout of lmkit's repository"
