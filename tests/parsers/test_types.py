"""Values of XML formats have the type that the tool's schema means, in whatever language it spells it."""

from __future__ import annotations

import json

import pytest
from lmkit.api import ToolDef
from lmkit.plugins.host import PluginHost
from lmkit.plugins.switches import Switches
from lmkit.text.formats import load_format
from lmkit_formats import ToolFormat
from lmkit_formats.params import kinds_of
from lmkit_testing.parsers import check_splits, parse

HOST = PluginHost(switches=Switches())
NAMES = ("qwen3_coder", "qwen3_xml", "mimo", "glm45", "minimax_m2", "seed_oss", "step3p5", "minicpm5", "deepseek_v4")
SPELLED = {
    "integer": ("int", "int64", "uint8", "long", "unsigned int", "Integer", "short"),
    "number": ("float", "double", "float32", "num", "decimal"),
    "object": ("dict", "dict[str, int]", "map", "Dict[str, Any]"),
    "array": ("list", "list[int]", "tuple", "List"),
    "boolean": ("bool", "Boolean"),
    "string": ("str", "text", "varchar(8)"),
}
VALUES = {"integer": 3, "number": 2.5, "object": {"x": 1}, "array": [1, "y"], "boolean": True, "string": "3"}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kind", SPELLED)
def test_a_type_may_be_spelled_in_other_ways(name: str, kind: str) -> None:
    fmt = load_format(HOST, "tool_parser", name)
    assert isinstance(fmt, ToolFormat)
    for spelled in SPELLED[kind]:
        tool = ToolDef("f", parameters={"type": "object", "properties": {"a": {"type": spelled}}, "required": ["a"]})
        got = parse(fmt, list(fmt.write([("f", {"a": VALUES[kind]})], [tool])), tools=[tool])
        assert [json.loads(arguments) for _, arguments in got.calls] == [{"a": VALUES[kind]}], spelled
        tag = json.dumps(fmt.tag([tool], free=False, parallel=True))
        if kind != "string":
            assert f'"type": ["{kind}"]' in tag, f"{spelled}: a grammar knows only the names of JSON schema"


def test_python_values_have_the_type_too() -> None:
    tool = ToolDef("f", parameters={"properties": {k: {"type": k} for k in ("bool", "list", "dict", "float")}})
    fmt = load_format(HOST, "tool_parser", "qwen3_coder")
    shown = {"bool": "True", "list": "['a', None]", "dict": "{'a': 1}", "float": "5"}
    text = "".join(f"<parameter={k}>\n{v}\n</parameter>\n" for k, v in shown.items())
    got = check_splits(fmt, f"<tool_call>\n<function=f>\n{text}</function>\n</tool_call>", tools=[tool])
    assert json.loads(got.calls[0][1]) == {"bool": True, "list": ["a", None], "dict": {"a": 1}, "float": 5}


@pytest.mark.parametrize("spelled", ["any", "date", "interval", "mapper", "settings", "listing", "", "stringent"])
def test_a_name_that_says_nothing_is_no_type(spelled: str) -> None:
    assert kinds_of({"type": spelled}, {}) is None
