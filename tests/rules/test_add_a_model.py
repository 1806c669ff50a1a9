"""The page "Add a model" shows code that is in use: what it prints stands so in plugins, which are tested."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "add_a_model.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```python\n(?:from .*?\n\n\n)?(.*?)```", PAGE, re.DOTALL)  # without what they import
SOURCES = [path for name in ("mellum", "lfm2") for path in (ROOT / "plugins" / "models" / name).rglob("*.py")]


@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: block.split("(")[0])
def test_what_the_page_shows_is_in_use(block: str) -> None:
    texts = [path.read_text(encoding="utf-8").replace("  # fmt: skip", "") for path in SOURCES]
    assert any(block.strip() in text for text in texts)


def test_it_shows_a_model_a_test_and_a_layer_with_state() -> None:
    assert [block.split()[1].partition("(")[0] for block in BLOCKS] == [
        "TestMellum",
        "mellum",
        "short_conv",
        "ShortConv",
    ]
