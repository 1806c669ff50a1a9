"""The formats as data."""

from lmkit_formats import JsonCalls, NamedJson, Params, ReasoningFormat, ToolFormat

LONGCAT = ToolFormat("longcat", JsonCalls(), open=("<longcat_tool_call>",), close=("</longcat_tool_call>",))
INTERNLM = ToolFormat(
    "internlm",
    JsonCalls(arguments=("parameters", "arguments")),
    open=("<|action_start|><|plugin|>", "<|action_start|> <|plugin|>"),
    close=("<|action_end|>",),
)
JAMBA = ToolFormat("jamba", JsonCalls(many="list"), open=("<tool_calls>",), close=("</tool_calls>",))
PHI4_MINI_JSON = ToolFormat(
    "phi4_mini_json", JsonCalls(many="list"), open=("functools[", "functools [", "functools\n[")
)
XLAM = ToolFormat(
    "xlam",
    JsonCalls(many="list"),
    open=("", "```json\n[", "```json[", "```\n[", "```[", "[TOOL_CALLS]", "<tool_call>"),
    close=("```", "</tool_call>"),
    bare="start",
    rearm=("</think>",),
)
ERNIE45 = ToolFormat(
    "ernie45",
    JsonCalls(),
    open=("<tool_call>",),
    close=("</tool_call>",),
    drop=("<response>\n", "<response>", "\n</response>", "</response>"),
    trim=True,
    inner="\n",
    between="\n",
)
GIGACHAT3 = ToolFormat(
    "gigachat3",
    JsonCalls(),
    open=(
        "<|function_call|>",
        "<|message_sep|>\n\nfunction call<|role_sep|>\n",
        "function call<|role_sep|>\n",
        "function call{",
    ),
    drop=("<|message_sep|>", "</s>"),
)
GIGACHAT35 = ToolFormat(
    "gigachat35",
    Params(
        name_ends=('">',),
        open='<｜GCML｜parameter name="',
        key_ends=('" string="true">', '" string="false">', '">'),
        typed=("string", "json", ""),
        close="</｜GCML｜parameter>",
        foot="</｜GCML｜invoke>",
        gap="\n",
    ),
    open=('<｜GCML｜invoke name="',),
    section=("<｜GCML｜tool_calls>",),
    section_close=("</｜GCML｜tool_calls>",),
    drop=("<|message_sep|>", "</s>"),
    between="\n",
)
DOTS2 = ToolFormat(
    "dots2",
    Params(name_ends=('">',), open='<parameter name="', key_ends=('">',), close="</parameter>", gap="\n", block=True),
    open=('<invoke name="',),
    close=("</invoke>",),
    section=("<dots_function_call>",),
    section_close=("</dots_function_call>",),
    between="\n",
)
APERTUS = ToolFormat(
    "apertus", JsonCalls(keyed=True, many="list"), open=("<|tools_prefix|>",), close=("<|tools_suffix|>",)
)
MINICPM5 = ToolFormat(
    "minicpm5",
    Params(
        name_ends=('">',),
        open='<param name="',
        key_ends=('">',),
        close="</param>",
        foot="</function>",
        raw=("<![CDATA[", "]]>"),
    ),
    open=('<function name="',),
)

FUNCTIONARY31 = ToolFormat(
    "functionary_v31",
    NamedJson(ends=(">",)),
    open=("<function=",),
    close=("</function>",),
    drop=("<|eom_id|>", "<|eot_id|>"),
)
# the prompt has the first ">>>"
FUNCTIONARY32 = ToolFormat(
    "functionary_v32",
    NamedJson(ends=("\n",)),
    open=(">>>",),
    drop=(">>>all\n", "<|eot_id|>"),
    begun=">>>",
)
_SOLAR_CONTENT = ("<|end|><|begin|>assistant<|content|>", "<|end|><|begin|>assistant", "<|content|>", "<|end|>")
SOLAR = ToolFormat(
    "solar",
    NamedJson(
        ends=("<|tool_call:args|>",),
        pattern=r"(?P<id>[^\s<]*)<\|tool_call:name\|>(?P<name>[^\s<>\[\]{}|]+)",
        written="{index}<|tool_call:name|>{name}",
    ),
    open=("<|tool_call:begin|>",),
    close=("<|tool_call:end|>",),
    section=("<|tool_calls|>",),
    section_close=("<|calls|>",),
    loose=True,
    drop=(*_SOLAR_CONTENT, "<|flush|>", "<|tool_call:name|>"),
)

SOLAR2 = ToolFormat(
    "solar2",
    Params(
        name_ends=("<|tool_arg:start|>",),
        open="<|tool_arg:start|>",
        key_ends=("<|tool_arg:value|>",),
        close="<|tool_arg:end|>",
        gap="\n",
    ),
    open=("<|tool_call:start|>",),
    close=("<|tool_call:end|>",),
    between="\n",
)

SOLAR2_REASONING = ReasoningFormat(
    "solar2", ("<|think:start|>",), ("<|think:end|>",), until=("<|tool_call:start|>",), prompt_opens=True
)
SOLAR_REASONING = ReasoningFormat(
    "solar",
    ("<|think|>",),
    ("<|end|><|begin|>assistant<|content|>", "<|end|><|begin|>assistant", "<|end|>"),
    until=("<|tool_calls|>",),
    drop=(*_SOLAR_CONTENT, "<|flush|>"),
)
APRIEL_REASONING = ReasoningFormat(
    "apriel",
    ("Here are my reasoning steps:",),
    ("[BEGIN FINAL RESPONSE]",),
    until=("<tool_calls>",),
    prompt_opens=True,
    drop=("\n[END FINAL RESPONSE]\n", "\n[END FINAL RESPONSE]", "[END FINAL RESPONSE]", "<|end|>"),
)
ERNIE45_REASONING = ReasoningFormat(
    "ernie45",
    ("<think>",),
    ("</think>\n\n<response>\n", "</think>\n<response>\n", "</think>"),
    prompt_opens=True,
    switch=("enable_thinking",),
    drop=("<response>\n", "<response>", "\n</response>\n", "\n</response>", "</response>"),
)
IDENTITY = ReasoningFormat("identity", (), ())
