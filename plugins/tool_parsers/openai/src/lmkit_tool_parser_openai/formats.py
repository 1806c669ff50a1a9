"""Harmony as data. Source: docs/format.md of openai/harmony.

<|start|>assistant to=functions.f<|channel|>commentary <|constrain|>json<|message|>{"a": 1}<|call|>
"""

from dataclasses import replace

from lmkit_formats import ChannelFormat

START, CHANNEL, MESSAGE, CONSTRAIN = "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"
END, CALL, RETURN = "<|end|>", "<|call|>", "<|return|>"

CALLS = ChannelFormat(
    "openai",
    START,
    CHANNEL,
    MESSAGE,
    ends=(END, CALL, RETURN),
    role="assistant",
    reasoning=("analysis",),
    final="final",
    call="commentary",
    content_type=f"{CONSTRAIN}json",
    content_types=("json", "code"),
    namespace="functions.",
    nobody=("assistant", "user", "all"),
    special=(CONSTRAIN,),
)

REASONING = replace(CALLS, name="openai_gptoss", calls=False)
