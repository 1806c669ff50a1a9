"""The formats as data."""

from dataclasses import replace

from lmkit_formats import NamedJson, Params, ReasoningFormat, ToolFormat

V31 = ToolFormat(
    "deepseek_v31",
    NamedJson(ends=("<｜tool▁sep｜>",)),
    open=("<｜tool▁call▁begin｜>",),
    close=("<｜tool▁call▁end｜>",),
    section=("<｜tool▁calls▁begin｜>",),
    section_close=("<｜tool▁calls▁end｜>",),
    drop=("<｜end▁of▁sentence｜>",),
)
V3 = replace(
    V31,
    name="deepseek_v3",
    body=NamedJson(prefix=("function<｜tool▁sep｜>",), ends=("\n```json\n", "\n```json", "```json")),
    close=("\n```<｜tool▁call▁end｜>", "```<｜tool▁call▁end｜>", "<｜tool▁call▁end｜>"),
)


def _dsml(name: str, section: str, tag: str = "｜DSML｜") -> ToolFormat:
    """Elements whose names begin with `tag`; a parameter says whether its value is a string or JSON."""
    return ToolFormat(
        name,
        Params(
            name_ends=('">',),
            open=f'<{tag}parameter name="',
            key_ends=('" string="true">', '" string="false">', '">'),
            typed=("string", "json", ""),
            close=f"</{tag}parameter>",
            foot=f"</{tag}invoke>",
            gap="\n",
            wrappers=("arguments", "input"),
        ),
        open=(f'<{tag}invoke name="',),
        section=(f"<{tag}{section}>",),
        section_close=(f"</{tag}{section}>",),
        drop=("<｜end▁of▁sentence｜>",),
        between="\n",
    )


V32 = _dsml("deepseek_v32", "function_calls")
V4 = _dsml("deepseek_v4", "tool_calls")
V41 = _dsml("deepseek_v41", "calls", "｜DSML｜ ")

R1 = ReasoningFormat("deepseek_r1", ("<think>",), ("</think>",), prompt_opens=True)
# hybrid models think when their template is told to
REASONING_V3 = ReasoningFormat(
    "deepseek_v3",
    ("<think>",),
    ("</think>",),
    prompt_opens=True,
    switch=("thinking", "enable_thinking"),
    default_on=False,
)
