"""The page "Add a tool or reasoning format" is true: its declaration works as it stands there."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest
from lmkit.api import ToolChoice, ToolDef
from lmkit.text.constrain import constraint
from lmkit_testing.parsers import check_splits

PAGE = Path(__file__).resolve().parents[4] / "docs" / "add_a_format.md"
CALLS = [("get_time", {"zone": "UTC"}), ("now", {})]


@pytest.fixture
def files(tmp_path: Path) -> dict[str, Path]:
    blocks = re.findall(r"```python\n# (\w+\.py)\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    for name, code in blocks:
        (tmp_path / name).write_text(code, encoding="utf-8")
    return {name: tmp_path / name for name, _ in blocks}


def load(file: Path, name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_declaration_is_short_and_reads_what_it_writes(files: dict[str, Path]) -> None:
    formats = load(files["formats.py"], "toy_formats")
    num_lines = sum(len(files[name].read_text().splitlines()) for name in ("formats.py", "hooks.py"))
    assert num_lines < 60
    text = formats.TOY.write(CALLS)
    assert text == '<call>get_time:{"zone": "UTC"}</call>\n<call>now:{}</call>'
    got = check_splits([formats.TOY_THINK, formats.TOY], f"<mull>hm</mull>So: {text}")
    assert (got.reasoning, got.content) == ("hm", "So: ")
    assert [(name, json.loads(arguments)) for name, arguments in got.calls] == CALLS


def test_it_can_be_constrained(files: dict[str, Path]) -> None:
    formats = load(files["formats.py"], "toy_formats")
    grammar = constraint(None, [ToolDef("now")], ToolChoice("required"), formats.TOY)
    assert grammar is not None
    assert '"begin": "<call>now:"' in grammar.source


def test_it_registers(files: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    hooks = load(files["hooks.py"], "toy_hooks")
    (tool,), (reasoning,) = hooks.lmkit_tool_parsers(), hooks.lmkit_reasoning_parsers()
    monkeypatch.setitem(sys.modules, "lmkit_toy.formats", load(files["formats.py"], "lmkit_toy.formats"))
    for spec in (tool, reasoning):
        module, _, name = spec.target.partition(":")
        assert hasattr(sys.modules[module], name)
