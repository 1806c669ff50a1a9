"""What crosses the socket between the first process of a server and one of those that answer HTTP (`--api-workers`).

Frames are those of `lmkit.engine.messages`, and so are requests, events and figures: to an API process the first one is
its engine.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
from lmkit.api import Checkpoint, ErrorInfo, ResolvedPlan
from lmkit.engine.client import State
from lmkit.engine.messages import Abort, AskStats, Done, EngineFacts, Events, Stats, Submit
from lmkit.plugins.switches import Switches

from lmkit_http.settings import ServerSettings


class Standing(msgspec.Struct, tag="standing"):
    """What became of the engine and of its adapters. Answered by Seen."""

    number: int
    state: State
    ended: bool
    responsive: bool
    failure: ErrorInfo | None
    adapters: tuple[str, ...]


class Welcome(msgspec.Struct, tag="welcome"):
    """The first message: all that it takes to answer."""

    text: str  # "package.module:Attr": opens the text side
    config: dict[str, Any]
    resolved: ResolvedPlan
    checkpoint: Checkpoint
    settings: ServerSettings
    facts: EngineFacts
    switches: Switches | None  # of plugins
    created: int  # when the model was, as routes tell it
    folder: str  # what is shared: where the first process answers, and the counts
    place: int  # among the processes
    standing: Standing


class Drain(msgspec.Struct, tag="drain"):
    """Take nothing new, answer what is there, and end."""


class Listening(msgspec.Struct, tag="listening"):
    """It answers from now on."""


class Seen(msgspec.Struct, tag="seen"):
    number: int


ToApi = Welcome | Standing | Drain | Events | Stats | Done
FromApi = Listening | Seen | Submit | Abort | AskStats


def _typed(kind: type, value: object) -> object:
    return Path(value) if kind is Path and isinstance(value, str) else value


decode_to = msgspec.msgpack.Decoder(ToApi, dec_hook=_typed).decode
decode_from = msgspec.msgpack.Decoder(FromApi, dec_hook=_typed).decode
