"""Declarations of tool-call and reasoning formats, and the machines that run them: a library for parser plugins.

One declaration is the parser (whole and streamed are the same machine), the decoding grammar, and texts for tests.
Blanks between the parts of a call are always accepted. A field that takes several texts lists what is accepted; the
first is what is written.
"""

from lmkit_formats.calls import CallBody
from lmkit_formats.channels import ChannelFormat
from lmkit_formats.closing import closed
from lmkit_formats.jsoncalls import JsonCalls
from lmkit_formats.looseobject import LooseObject
from lmkit_formats.namedjson import NamedJson
from lmkit_formats.params import Params
from lmkit_formats.pycalls import PyCalls
from lmkit_formats.reasoning import ReasoningFormat
from lmkit_formats.tools import ToolFormat

__all__ = [
    "CallBody", "ChannelFormat", "JsonCalls", "LooseObject", "NamedJson", "Params", "PyCalls", "ReasoningFormat",
    "ToolFormat", "closed",
]  # fmt: skip
