"""Chat templates: real ones render, hostile ones end quickly and reach nothing."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from lmkit.api import ConfigError, InvalidParam, TemplateFailed
from lmkit_testing import RendererConformance
from lmkit_tokenizer_json.render import Renderer


class TestJinja(RendererConformance):
    plugin = "renderer:jinja"


SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
HELLO = [{"role": "user", "content": "Hello"}]
TOOL = {
    "type": "function",
    "function": {"name": "f", "description": "d", "parameters": {"type": "object", "properties": {}, "required": []}},
}
PLAIN = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def render(source: str, messages: Any = HELLO, **options: Any) -> str:
    return Renderer(source, SPECIAL).render(messages, **options)


def templates() -> list[Path]:
    folder = Path(__file__).resolve().parents[4].parent / "shared" / "data" / "chat_templates"
    return sorted(folder.glob("*.jinja")) if folder.is_dir() else []


@pytest.mark.parametrize("file", templates(), ids=lambda f: f.stem)
def test_real_templates(file: Path) -> None:
    """Every published template renders a conversation; text never appears as a Python or JSON list."""
    renderer = Renderer(file.read_text(encoding="utf-8"), SPECIAL)
    for content in ("What is 2+3?", [{"type": "text", "text": "What is "}, {"type": "text", "text": "2+3?"}]):
        messages = [
            {"role": "user", "content": "Hi"},
            {"role": "assistant", "content": "Yes?"},
            {"role": "user", "content": content},
        ]
        # the variants named tool_use take it for granted that there are tools
        prompt = renderer.render(messages, [TOOL] if file.stem.endswith("tool_use") else ())
        assert "2+3?" in prompt
        assert "{'type'" not in prompt
        assert '"type": "text"' not in prompt
    assert renderer.render(HELLO, [TOOL])


@pytest.mark.parametrize(
    ("name", "tools", "tool_results", "system"),
    [
        ("Qwen-Qwen3-0.6B", True, True, True),
        ("Qwen-Qwen2.5-7B-Instruct", True, True, True),
        ("meta-llama-Llama-3.1-8B-Instruct", True, True, True),
        ("mistralai-Mistral-Nemo-Instruct-2407", True, True, True),
        ("google-gemma-2-2b-it", False, False, False),
        ("deepseek-ai-DeepSeek-R1-Distill-Qwen-32B", False, True, True),
    ],
)
def test_what_templates_can_do(data: Path, name: str, tools: bool, tool_results: bool, system: bool) -> None:
    renderer = Renderer((data / "chat_templates" / f"{name}.jinja").read_text(encoding="utf-8"), SPECIAL)
    assert (renderer.takes_tools, renderer.takes_tool_results, renderer.takes_system) == (tools, tool_results, system)


def test_special_tokens_and_prompt() -> None:
    assert render("{{ bos_token }}" + PLAIN) == "<s><|user|>Hello<|end|><|assistant|>"
    assert render(PLAIN, add_generation_prompt=False) == "<|user|>Hello<|end|>"


def test_continue_final_message() -> None:
    messages = [*HELLO, {"role": "assistant", "content": "It is "}]
    assert render(PLAIN, messages, continue_final_message=True) == "<|user|>Hello<|end|><|assistant|>It is "
    with pytest.raises(TemplateFailed, match="drops the final message"):
        render("{{ messages[0].content }}", messages, continue_final_message=True)


def test_helpers() -> None:
    assert render("{{ {'a': 'é<'} | tojson }}") == '{"a": "é<"}'
    assert render("{{ [1] | tojson(indent=1) }}") == "[\n 1\n]"
    assert len(render("{{ strftime_now('%Y') }}")) == 4
    assert render("a{% generation %}b{% endgeneration %}c") == "abc"
    assert render("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}") == "01"
    assert render("{% for i in [1, 2] %}{{ loop.length }}{{ loop.last }} {% endfor %}") == "2False 2True "
    assert (
        render("{% set ns = namespace(x=0) %}{% for i in range(3) %}{% set ns.x = ns.x + i %}{% endfor %}{{ ns.x }}")
        == "3"
    )
    assert render("{{ 'a' ~ 1 ~ none }}") == "a1None"
    assert render("{% for k, v in {'a': 1}.items() %}{{ k }}{{ v }}{% endfor %}") == "a1"


def test_content_shapes() -> None:
    listy = "{% for m in messages %}{% for p in m.content %}{{ p.text }}{% endfor %}{% endfor %}"
    assert Renderer(listy, {}).content == "list"
    assert render(listy) == "Hello"
    assert Renderer(PLAIN, {}).content == "string"
    parts = [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]
    assert render(PLAIN, parts, add_generation_prompt=False) == "<|user|>a\nb<|end|>"
    both = "{% if messages[0].content is string %}{{ messages[0].content }}{% else %}"
    both += "{% for p in messages[0].content %}[{{ p.text }}]{% endfor %}{% endif %}"
    assert Renderer(both, {}).content == "both"
    assert render(both, parts) == "[a][b]"
    assert (
        render(PLAIN, [{"role": "assistant", "content": None}], add_generation_prompt=False) == "<|assistant|><|end|>"
    )


def test_arguments_of_earlier_calls_are_objects() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    source = "{% for c in messages[0].tool_calls %}{{ c.function.arguments.a + 1 }}{% endfor %}"
    assert render(source, [{"role": "assistant", "content": None, "tool_calls": [call]}]) == "2"


def test_errors_name_the_line() -> None:
    with pytest.raises(TemplateFailed, match="line 2: only one user"):
        render("ok\n{{ raise_exception('only one user') }}")
    with pytest.raises(TemplateFailed, match=r"line 3: .*nothing"):
        render("a\nb\n{{ messages[0].nothing.more }}")
    with pytest.raises(ConfigError, match="does not compile: line 2"):
        render("a\n{% for %}")


@pytest.mark.parametrize(
    "name",
    ["messages", "tools", "tokenize", "chat_template", "add_generation_prompt", "bos_token", "documents", "_budget"],
)
def test_reserved_variables(name: str) -> None:
    with pytest.raises(InvalidParam, match="chat_template_kwargs"):
        render(PLAIN, kwargs={name: 1})


def test_kwargs_must_be_variables_of_the_template() -> None:
    renderer = Renderer("{{ range(3)|join }}{{ enable_thinking }}{% set x = 1 %}{{ x }}{{ strftime_now('') }}", SPECIAL)
    assert renderer.options == {"enable_thinking"}
    with pytest.raises(InvalidParam, match="enable_thinking"):
        renderer.render(HELLO, kwargs={"enable_thinkin": True})


def test_variables_with_a_default_may_be_given() -> None:
    source = "{% if think is not defined %}{% set think = 1 %}{% endif %}{% set own = 1 %}{{ think }}{{ own }}"
    assert Renderer(source + "{{ x|default(2) }}", {}).options == {"think", "x"}


def test_kwargs_reach_the_template() -> None:
    assert render("{{ enable_thinking }}", kwargs={"enable_thinking": False}) == "False"


HOSTILE = {
    "range": "{% for i in range(10**9) %}{% endfor %}",
    "nested": "{% for i in range(99999) %}{% for j in range(99999) %}{{ i }}{% endfor %}{% endfor %}",
    "macro recursion": "{% macro f(n) %}{{ f(n - 1) }}{{ f(n - 1) }}{% endmacro %}{{ f(1) }}",
    "deep macros": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "recursive loop": "{% for x in [1] recursive %}{{ loop([1]) }}{{ loop([1]) }}{% endfor %}",
    "repeat": "{{ 'a' * 10**10 }}",
    "repeat list": "{% set x = [0] * 10**10 %}",
    "power": "{{ 10 ** (10 ** 10) }}",
    "doubling ~": "{% set ns = namespace(x='aaaa') %}{% for i in range(60) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
    "doubling +": "{% set ns = namespace(x='aaaa') %}{% for i in range(60) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
    "doubling join": "{% set ns = namespace(x='aaaa') %}{% for i in range(60) %}"
    "{% set ns.x = [ns.x, ns.x]|join %}{% endfor %}",
    "doubling replace": "{% set ns = namespace(x='aa') %}{% for i in range(60) %}"
    "{% set ns.x = ns.x.replace('a', 'aa') %}{% endfor %}",
    "doubling filter": "{% set ns = namespace(x='aa') %}{% for i in range(60) %}"
    "{% set ns.x = ns.x|replace('a', 'aa') %}{% endfor %}",
    "doubling format": "{% set ns = namespace(x='aa') %}{% for i in range(60) %}"
    "{% set ns.x = '%s%s'|format(ns.x, ns.x) %}{% endfor %}",
    "doubling set block": "{% set ns = namespace(x='aa') %}{% for i in range(60) %}"
    "{% set y %}{{ ns.x }}{{ ns.x }}{% endset %}{% set ns.x = y %}{% endfor %}",
    "doubling list": "{% set ns = namespace(x=[1]) %}{% for i in range(60) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
    "padding": "{{ 'a'.ljust(10**10) }}",
    "zfill": "{{ '1'.zfill(10**10) }}",
    "wide format": "{{ '%10000000000d' % 1 }}",
    "wide filter": "{{ '%10000000000d'|format(1) }}",
    "wide method": "{{ '{:>10000000000}'.format(1) }}",
    "starred": "{{ '%*d'|format(10**10, 1) }}",
    "indent": "{{ 'a\nb'|indent(10**10) }}",
    "tojson": "{{ [1]|tojson(indent=10**10) }}",
    "batch": "{{ [1]|batch(10**10, 0)|list }}",
    "output": "{% for i in range(90000) %}{{ 'a' * 100000 }}{% endfor %}",
    "exhausted generator": "{% for c in ('a' * 8000000) %}{% for d in 'abcdef' %}{% endfor %}{% endfor %}",
    "map": "{{ range(99999)|map('string')|join|length }}{% for i in range(9999) %}"
    "{% set x = range(99999)|list %}{% endfor %}",
    "sort": "{% for i in range(9999) %}{% set x = range(99999)|list|sort(reverse=true) %}{% endfor %}",
}


@pytest.mark.parametrize("source", HOSTILE.values(), ids=HOSTILE.keys())
@pytest.mark.one_in(4)
def test_hostile_templates_end_quickly(source: str) -> None:
    renderer = Renderer("{% if messages[0].content == 'now' %}" + source + "{% endif %}", SPECIAL)
    begin, cpu = time.perf_counter(), time.thread_time()
    with pytest.raises(TemplateFailed):
        renderer.render([{"role": "user", "content": "now"}])
    assert time.thread_time() - cpu < 1.5
    assert time.perf_counter() - begin < 20.0  # it is less than 1 on a machine that is not shared


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.__class__ }}",
        "{{ ''|attr('__class__') }}",
        "{{ '{0.__class__}'.format('') }}",
        "{{ raise_exception.__globals__ }}",
        "{{ strftime_now.__globals__ }}",
        "{{ self.__init__.__globals__ }}",
        "{{ cycler.__init__.__globals__.os }}",
        "{{ joiner.__init__.__globals__ }}",
        "{{ namespace.__init__.__globals__ }}",
        "{{ (messages|list).append(1) }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update({'role': 'system'}) }}",
        "{{ lipsum() }}",
        "{% include '/etc/passwd' %}",
        "{% import 'os' as os %}",
        "{{ get_flashed_messages.__globals__ }}",
    ],
)
def test_the_sandbox_holds(source: str) -> None:
    """An error, or nothing: never a look behind the curtain."""
    before = [dict(m) for m in HELLO]
    message = text = ""
    try:
        text = render(source)
    except TemplateFailed as e:
        message = e.message
    assert text == ""
    assert "0x" not in message
    assert str(Path(__file__).parents[4]) not in message
    assert before == HELLO
