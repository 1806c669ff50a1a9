"""The formats as data."""

from lmkit_formats import PyCalls, ReasoningFormat, ToolFormat

OLMO3 = ToolFormat("olmo3", PyCalls(lines=True), open=("<function_calls>",), close=("</function_calls>",))

REASONING = ReasoningFormat("olmo3", ("<think>",), ("</think>",), prompt_opens=True, trim="")
