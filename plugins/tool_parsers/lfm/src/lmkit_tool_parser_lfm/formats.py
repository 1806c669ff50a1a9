"""The format as data."""

from lmkit_formats import PyCalls, ToolFormat

LFM2 = ToolFormat("lfm2", PyCalls(), open=("<|tool_call_start|>",), close=("<|tool_call_end|>",))
