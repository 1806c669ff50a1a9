"""The lock of the public surface is current, and the tool tells additions from breaking changes."""

from __future__ import annotations

import copy
import importlib.util
import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[3]
TOOL = ROOT / "tools" / "api_lock.py"

pytestmark = pytest.mark.skipif(not TOOL.exists(), reason="not a checkout of the repository")


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("api_lock_tool", TOOL)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_lock_is_current(tool: ModuleType) -> None:
    found = json.loads(tool.render(tool.surface()))
    assert json.loads(tool.LOCK.read_text()) == found, "run: python tools/api_lock.py --write"


def add_field(s: Any) -> None:
    s["names"]["AttnNeed"]["fields"]["extra"] = "int = ..."


def add_required_field(s: Any) -> None:
    s["names"]["AttnNeed"]["fields"]["extra"] = "int"


def remove_field(s: Any) -> None:
    del s["names"]["AttnNeed"]["fields"]["window"]


def reorder_fields(s: Any) -> None:
    fields = s["names"]["AttnNeed"]["fields"]
    s["names"]["AttnNeed"]["fields"] = dict(reversed(fields.items()))


def retype_field(s: Any) -> None:
    s["names"]["AttnNeed"]["fields"]["head_dim"] = "str"


def remove_name(s: Any) -> None:
    del s["names"]["AttentionSpec"]


def add_name(s: Any) -> None:
    s["names"]["NewSpec"] = {"is": "constant"}


def add_optional_parameter(s: Any) -> None:
    s["names"]["AttentionBackend"]["methods"]["can_run"].insert(-1, "strict: bool = ...")


def add_parameter(s: Any) -> None:
    s["names"]["AttentionBackend"]["methods"]["can_run"].insert(-1, "strict: bool")


def remove_hook(s: Any) -> None:
    del s["hooks"]["lmkit_models"]


@pytest.mark.parametrize("change", [add_field, add_name, add_optional_parameter])
def test_additions(tool: ModuleType, change: Callable[[Any], None]) -> None:
    old = json.loads(tool.render(tool.surface()))
    new = copy.deepcopy(old)
    change(new)
    breaking, added = tool.compare(old, new)
    assert not breaking
    assert len(added) == 1


@pytest.mark.parametrize(
    "change",
    [add_required_field, remove_field, reorder_fields, retype_field, remove_name, add_parameter, remove_hook],
)
def test_breaking_changes(tool: ModuleType, change: Callable[[Any], None]) -> None:
    old = json.loads(tool.render(tool.surface()))
    new = copy.deepcopy(old)
    change(new)
    breaking, _ = tool.compare(old, new)
    assert breaking


def test_breaking_changes_need_an_interface_number(
    tool: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock = tmp_path / "api.lock.json"
    monkeypatch.setattr(tool, "LOCK", lock)
    old = json.loads(tool.render(tool.surface()))
    old["names"]["AttnNeed"]["fields"]["gone"] = "int"
    lock.write_text(tool.render(old))
    assert tool.main([]) == 2
    assert tool.main(["--write"]) == 2
    old["interfaces"]["attention"] = 0  # the current number is higher
    lock.write_text(tool.render(old))
    assert tool.main(["--write"]) == 0
    assert tool.main([]) == 0


def test_a_break_raises_the_kind_that_it_concerns(
    tool: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lock = tmp_path / "api.lock.json"
    monkeypatch.setattr(tool, "LOCK", lock)
    old = json.loads(tool.render(tool.surface()))
    old["names"]["OrderPolicy"]["methods"]["gone"] = ["self", "-> int"]
    assert tool.owners("names.OrderPolicy.methods.gone is gone") == {"scheduler"}
    assert tool.owners("hooks.lmkit_models is gone") == {"model"}
    assert tool.owners("names.AttnNeed.fields.gone is gone") == set()  # all have it
    for kind, status in (("attention", 2), ("scheduler", 0)):
        old["interfaces"][kind] = 0
        lock.write_text(tool.render(old))
        assert tool.main(["--write"]) == status
    assert "of scheduler" in capsys.readouterr().out


def test_libraries_and_kits_are_locked(tool: ModuleType) -> None:
    """Every module that plugins of others may import."""
    from lmkit_cli.health import PUBLIC

    assert {name for name in PUBLIC if name != "lmkit.api"} <= {*tool.LIBRARIES, "lmkit_http"}
    found = tool.surface()["libraries"]
    assert all(found[name] for name in tool.LIBRARIES)
    old = copy.deepcopy(found)
    old["lmkit_testing"]["SchedulerConformance"]["attributes"]["gone"] = "str"
    breaking, _ = tool.compare({"interfaces": {}, "libraries": old}, {"interfaces": {}, "libraries": found})
    assert breaking == ["libraries.lmkit_testing.SchedulerConformance.attributes.gone is gone"]


def test_notes_of_a_release_say_what_changed(tool: ModuleType) -> None:
    old = json.loads(tool.render(tool.surface()))
    new = copy.deepcopy(old)
    remove_field(new)
    add_name(new)
    new["interfaces"]["attention"] += 1
    text = tool.notes(old, new)
    assert "### Interfaces" in text
    assert "- `names.AttnNeed.fields.window is gone`" in text.partition("### Breaking")[2].partition("### Added")[0]
    assert "- `names.NewSpec is new`" in text.partition("### Added")[2]
    assert "Nothing changed" in tool.notes(old, old)
