"""The formats as data. A string stands as it is, every other value as JSON."""

from dataclasses import replace

from lmkit_formats import Params, ReasoningFormat, ToolFormat

GLM45 = ToolFormat(
    "glm45",
    Params(
        name_ends=("<arg_key>",),
        open="<arg_key>",
        key_ends=("</arg_key>",),
        value_open="<arg_value>",
        close="</arg_value>",
        untyped="json",
        gap="\n",
    ),
    open=("<tool_call>",),
    close=("</tool_call>",),
    between="\n",
)
GLM47 = replace(GLM45, name="glm47")

REASONING = ReasoningFormat(
    "glm45",
    ("<think>",),
    ("</think>",),
    until=("<tool_call>",),
    prompt_opens=True,
    switch=("enable_thinking", "thinking"),
)
