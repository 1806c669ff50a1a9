"""The format as data."""

from lmkit.api import ReasoningFormat

NEMOTRON_V3 = ReasoningFormat(
    "nemotron_v3",
    ("<think>",),
    ("</think>",),
    until=("<tool_call>",),
    prompt_opens=True,
    switch=("enable_thinking",),
)
