"""The formats of this plugin read what they declare, whole and split, and survive what is broken."""

from lmkit_testing import ReasoningParserConformance, ToolParserConformance


class TestCohereCommand(ToolParserConformance):
    plugin = "tool_parser:cohere_command"


class TestCohereCommand3(ToolParserConformance):
    plugin = "tool_parser:cohere_command3"


class TestCohereCommand4(ToolParserConformance):
    plugin = "tool_parser:cohere_command4"


class TestCohereReasoning(ReasoningParserConformance):
    plugin = "reasoning_parser:cohere"
    samples = ("<|START_THINKING|>a<|END_THINKING|><|START_RESPONSE|>b<|END_RESPONSE|>",)


class TestCohereCommand3Reasoning(ReasoningParserConformance):
    plugin = "reasoning_parser:cohere_command3"
    samples = ("<|START_THINKING|>a<|END_THINKING|><|START_RESPONSE|>b<|END_RESPONSE|>",)


class TestCohereCommand4Reasoning(ReasoningParserConformance):
    plugin = "reasoning_parser:cohere_command4"
    samples = ("<|START_THINKING|>a<|END_THINKING|><|START_RESPONSE|>b<|END_RESPONSE|>",)


class TestCommandR(ToolParserConformance):
    plugin = "tool_parser:command_r"
    samples = (
        'Plan: so\nAction: ```json\n[\n    {\n        "tool_name": "f",\n        "parameters": {\n            "a": 1\n'
        "        }\n    }\n]```",
        "Action: ```json\noops```",
    )
