"""The catalog of official plugins is what the repository holds."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from lmkit.plugins.catalog import catalog, install_command, official_dists

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.skipif(not (ROOT / "tools" / "sync.py").exists(), reason="not a checkout of the repository")
def test_catalog_is_current() -> None:
    done = subprocess.run(
        [sys.executable, "tools/sync.py", "--check"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout


def test_commands() -> None:
    assert install_command("attention", "torch") == "pip install lmkit-attention-torch"
    assert install_command("model", "LlamaForCausalLM") == "pip install lmkit-model-llama"
    assert install_command("attention", "nothing") == ""
    assert {"lmkit-core", "lmkit-platform-cpu"} <= official_dists()
    assert all(dist.startswith("lmkit-") for names in catalog().values() for dist in names.values())
