"""Calls as published templates and recorded outputs of 2026 write them: formats read them, however they are split."""

from __future__ import annotations

import json

import pytest
from lmkit.api import ParserRequest, ToolDef
from lmkit.plugins.host import PluginHost
from lmkit.plugins.select import consider
from lmkit.plugins.switches import Switches
from lmkit.text.formats import load_format
from lmkit_testing.parsers import check_splits

HOST = PluginHost(switches=Switches())
CITY = {"city": {"type": "string"}, "days": {"type": "integer"}}
TOOLS = [ToolDef("get_weather", "", {"type": "object", "properties": CITY}), ToolDef("g", "", {"type": "object"})]
WRITTEN = {
    "gigachat35": (
        'Hi\n\n<｜GCML｜tool_calls>\n<｜GCML｜invoke name="get_weather">\n<｜GCML｜parameter name="city" stri'
        'ng="true">Paris</｜GCML｜parameter>\n<｜GCML｜parameter name="days" string="false">3</｜GCML｜par'
        'ameter>\n</｜GCML｜invoke>\n<｜GCML｜invoke name="g">\n</｜GCML｜invoke>\n</｜GCML｜tool_calls>'
    ),
    "dots2": (
        '<dots_function_call>\n<invoke name="get_weather">\n<parameter name="city">\nParis\n</parameter'
        '>\n<parameter name="days">3</parameter>\n</invoke>\n<invoke name="g"> </invoke>\n</dots_functi'
        "on_call>"
    ),
    "solar2": (
        "<|tool_call:start|>get_weather\n<|tool_arg:start|>city<|tool_arg:value|>Paris<|tool_arg:end"
        "|>\n<|tool_arg:start|>days<|tool_arg:value|>3<|tool_arg:end|>\n<|tool_call:end|>\n<|tool_call"
        ":start|>g\n<|tool_call:end|>"
    ),
    "hy_v4": (
        "<tool_calls:opensource>\n<tool_call:opensource>get_weather<tool_sep:opensource>\n<arg_key:op"
        "ensource>city</arg_key:opensource>\n<arg_value:opensource>Paris</arg_value:opensource>\n<arg"
        "_key:opensource>days</arg_key:opensource>\n<arg_value:opensource>3</arg_value:opensource>\n<"
        "/tool_call:opensource>\n<tool_call:opensource>g<tool_sep:opensource>\n</tool_call:opensource"
        ">\n</tool_calls:opensource>"
    ),
    "kimi_k3": (
        '<|open|>response<|sep|>Hi<|close|>response<|sep|><|open|>tools<|sep|><|open|>call tool="ge'
        't_weather" index="1"<|sep|><|open|>argument key="city" type="string"<|sep|>Paris<|close|>a'
        'rgument<|sep|><|open|>argument key="days" type="number"<|sep|>3<|close|>argument<|sep|><|c'
        'lose|>call<|sep|><|open|>call tool="g" index="2"<|sep|><|close|>call<|sep|><|close|>tools<'
        "|sep|><|close|>message<|sep|>"
    ),
}


@pytest.mark.parametrize("name", WRITTEN)
def test_calls_of_a_new_family(name: str) -> None:
    got = check_splits(load_format(HOST, "tool_parser", name), WRITTEN[name], tools=TOOLS)
    calls = [(called, json.loads(arguments)) for called, arguments in got.calls]
    assert calls == [("get_weather", {"city": "Paris", "days": 3}), ("g", {})]
    assert got.content.strip() in ("", "Hi")


@pytest.mark.parametrize("name", WRITTEN)
def test_a_template_with_its_marker_is_of_the_family(name: str) -> None:
    template = (
        "{{- open_tag('call', [('tool', fn.name), ('index', loop.index)]) -}}" if name == "kimi_k3" else WRITTEN[name]
    )
    request = ParserRequest(kind="tool_parser", model="model", architecture="", chat_template=template)
    outcome = consider(HOST, request)
    assert outcome.chosen is not None
    assert outcome.chosen.name == name
