"""The two formats as data."""

from lmkit.api import TagFormat

HERMES = TagFormat("hermes", "<tool_call>", "</tool_call>", "json_calls")

# Qwen models sometimes call a tool without closing their reasoning: the call ends it.
THINK = TagFormat("think", "<think>", "</think>", "reasoning", until=("<tool_call>",))
