import pytest
from lmkit.api import ConfigError, TemplateFailed
from lmkit_renderer_sections.renderer import Sections
from lmkit_testing import RendererConformance


class TestSections(RendererConformance):
    plugin = "renderer:sections"
    source = (
        "{{#messages}}<|{{role}}|>{{content}}{{#tool_calls}}{{function}}{{/tool_calls}}<|end|>{{/messages}}"
        "{{#tools}}{{.}}{{/tools}}{{#mood}}({{mood}}){{/mood}}{{#add_generation_prompt}}<|assistant|>"
        "{{/add_generation_prompt}}"
    )
    broken = ("{{#messages}}", "{{/messages}}", "{{ messages", "{% for m in messages %}", "{{#a}}{{/b}}", "{{}}")
    failing = ("{{#messages}}{{nothing}}{{/messages}}",)


def test_the_line_of_a_fault_is_told():
    with pytest.raises(ConfigError, match=r"line 2: .*never closed"):
        Sections("x\n{{#messages}}", {})


def test_nothing_has_sections_of_its_own():
    chat = [{"role": "user", "content": "Hi"}]
    assert Sections("{{^tools}}none{{/tools}}{{bos_token}}", {"bos_token": "<s>"}).render(chat) == "none<s>"


def test_work_has_a_bound():
    chat = [{"role": "user", "content": "Hi"}] * 20
    with pytest.raises(TemplateFailed, match="steps"):
        Sections("{{#messages}}" * 6 + "x" + "{{/messages}}" * 6, {}).render(chat)
