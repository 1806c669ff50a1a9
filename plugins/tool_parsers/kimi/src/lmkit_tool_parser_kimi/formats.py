"""The formats as data."""

from lmkit_formats import NamedJson, Params, ReasoningFormat, ToolFormat

KIMI_K2 = ToolFormat(
    "kimi_k2",
    NamedJson(
        ends=("<|tool_call_argument_begin|>",),
        pattern=r"(?P<id>(?:functions\.)?(?P<name>[^\s:<>|]+):\d+)",
        written="functions.{name}:{index}",
    ),
    open=("<|tool_call_begin|>",),
    close=("<|tool_call_end|>",),
    section=("<|tool_calls_section_begin|>",),
    section_close=("<|tool_calls_section_end|>",),
    noise="drop",
    loose=True,
)
REASONING = ReasoningFormat(
    "kimi_k2",
    ("<think>",),
    ("</think>",),
    until=("<|tool_calls_section_begin|>", "<|tool_call_begin|>"),
    prompt_opens=True,
    switch=("thinking", "enable_thinking"),
)

# A message is channels: think, response, tools. Their tags are made of these tokens.
_TAGS = ("<|open|>", "<|close|>", "<|sep|>")
_MAX_CALLS = 128  # in one message: each has its number in its tag
_TYPES = ("string", "number", "boolean", "object", "array", "null")
_AROUND = (
    "<|open|>response<|sep|>",
    "<|close|>response<|sep|>",
    "<|close|>message<|sep|>",
    "<|end_of_msg|>",
    *_TAGS,
)
KIMI_K3 = ToolFormat(
    "kimi_k3",
    Params(
        name_ends=(*(f'" index="{number}"<|sep|>' for number in range(1, _MAX_CALLS + 1)), '"<|sep|>'),
        open='<|open|>argument key="',
        key_ends=tuple(f'" type="{kind}"<|sep|>' for kind in _TYPES),
        typed=("string", *("json",) * (len(_TYPES) - 1)),
        close="<|close|>argument<|sep|>",
    ),
    open=('<|open|>call tool="',),
    close=("<|close|>call<|sep|>",),
    section=("<|open|>tools<|sep|>",),
    section_close=("<|close|>tools<|sep|>",),
    drop=_AROUND,
)
REASONING_K3 = ReasoningFormat(
    "kimi_k3",
    ("<|open|>think<|sep|>",),
    ("<|close|>think<|sep|>",),
    prompt_opens=True,
    switch=("thinking",),
    drop=_AROUND[:-1],
)
