"""The formats as data."""

from dataclasses import replace

from lmkit_formats import JsonCalls, PyCalls, ToolFormat

LLAMA3_JSON = ToolFormat(
    "llama3_json",
    JsonCalls(arguments=("parameters", "arguments"), required=True),
    open=("", "<|python_tag|>"),
    bare="anywhere",
    separators=";",
    between="; ",
    drop=("<|eom_id|>", "<|eot_id|>"),
)
LLAMA4_JSON = replace(LLAMA3_JSON, name="llama4_json", drop=("<|eom|>", "<|eot|>"))

PYTHONIC = ToolFormat("pythonic", PyCalls(), bare="anywhere")
LLAMA4_PYTHONIC = replace(
    PYTHONIC,
    name="llama4_pythonic",
    open=("", "<|python_start|>"),
    close=("<|python_end|>",),
    drop=("<|eom|>", "<|eot|>"),
)
