"""StepFun: conformance of the formats; the recorded outputs are in tests/parsers."""

from __future__ import annotations

from lmkit_testing import ReasoningParserConformance, ToolParserConformance


class TestStep3(ToolParserConformance):
    plugin = "tool_parser:step3"
    samples = (
        (
            'So: <｜tool_calls_begin｜><｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="'
            'f"><steptml:parameter name="a">1</steptml:parameter></steptml:invoke><｜tool_call_end｜'
            "><｜tool_calls_end｜>"
        ),
        "<｜tool_calls_begin｜><｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name=",
    )


class TestStep3p5(ToolParserConformance):
    plugin = "tool_parser:step3p5"
    samples = (
        (
            "<tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>\n<parameter=b>\nx < y\nz\n</paramet"
            "er>\n</function>\n</tool_call>"
        ),
        "<tool_call>\n<function=f>\n<parameter=a>\n1\n\n<parameter=b>\nx < y\nz\n\n</function>\n</tool_call>",
        "<function=f>\n<parameter=a>\n1\n</parameter>\n<parameter=b>\nx < y\nz\n</parameter>\n</function>",
    )


class TestStep3Reasoning(ReasoningParserConformance):
    plugin = "reasoning_parser:step3"
    samples = (
        "<think>a</think>b",
        "\n<think>\na\n</think>\n\nb",
        "a</think>b",
    )


class TestStep3p5Reasoning(ReasoningParserConformance):
    plugin = "reasoning_parser:step3p5"
    samples = (
        "<think>a</think>b",
        "\n<think>\na\n</think>\n\nb",
        "a</think>b",
        "<think>a<tool_call>b",
    )
