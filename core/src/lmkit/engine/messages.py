"""What crosses the engine's socket: `Command` towards the engine, `Report` back. MessagePack by msgspec, never pickle.

A frame is a 4-byte big-endian length and that many bytes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import msgspec

from lmkit.api import (
    Checkpoint,
    EngineError,
    EngineRequest,
    ErrorInfo,
    PoolerInfo,
    ResolvedPlan,
    SchedStats,
    Sleep,
    TokenEvent,
    Wake,
    error_of,
    info_of,
)

MAX_FRAME = 256 << 20  # bytes; a longer frame means that the stream is damaged
HEADER = 4


class EngineFacts(msgspec.Struct, frozen=True):
    """What the engine knows once it is ready. Set by engine assembly; read by front ends. Sizes in bytes."""

    model: str  # served name
    max_length: int  # prompt + output of one request, in tokens
    num_kv_tokens: int  # tokens the KV cache holds, all requests together
    vocab_size: int
    block_size: int = 0
    max_rows: int = 0
    max_waiting: int = 0  # requests that may queue; 0: nobody said
    eos_token_ids: tuple[int, ...] = ()
    pooler: PoolerInfo | None = None  # None: it generates
    adapters: tuple[str, ...] = ()  # names loaded at start
    loads_adapters: bool = False  # more may be loaded while it runs
    max_adapters: int = 0  # how many may be loaded at once
    dtype: str = ""
    device: str = ""
    process_bytes: int = 0  # what the process takes before it holds anything of a model
    num_ranks: int = 1  # the sizes are those of one
    weight_bytes: int = 0
    activation_bytes: int = 0
    kv_bytes: int = 0
    phases: tuple[tuple[str, float], ...] = ()  # start-up: phase, seconds; they sum to the engine's start-up time
    warnings: tuple[str, ...] = ()

    @property
    def total_bytes(self) -> int:
        return self.process_bytes + self.weight_bytes + self.activation_bytes + self.kv_bytes


class EngineStats(msgspec.Struct, frozen=True):
    """Gauges and counters of a running engine."""

    sched: SchedStats
    num_compiled: int = 0  # kernels that were compiled in a step, not before the engine was ready
    life: LifeState = "running"


class Start(msgspec.Struct, tag="start"):
    """First command: what to assemble. `factory` is "package.module:Attr", see engine.build.build_engine."""

    factory: str
    config: dict[str, Any]
    resolved: ResolvedPlan
    checkpoint: Checkpoint
    environment: dict[str, str]  # variables to set before torch is imported


class Submit(msgspec.Struct, tag="submit"):
    request: EngineRequest


class Abort(msgspec.Struct, tag="abort"):
    ids: list[str]


class AskStats(msgspec.Struct, tag="stats"):
    number: int


class SetAdapter(msgspec.Struct, tag="adapter"):
    """Load the adapter at `path` as `name`, or forget `name` (path None)."""

    name: str
    path: str | None


class Pause(msgspec.Struct, tag="pause"):
    """Begin no step; or, with `finish`, none of requests that come from now on, until those that are there have ended.

    It is over when the state is "paused", see Stats.
    """

    finish: bool = False


class Resume(msgspec.Struct, tag="resume"):
    pass


class ForgetPrefixes(msgspec.Struct, tag="forget prefixes"):
    """Empty the prefix cache."""


class UpdateWeights(msgspec.Struct, tag="update weights"):
    """Contract: StageWeights. What runs goes on with the new weights, from the tokens that it has."""

    path: str
    stamp: str
    partial: bool = False


class SetProfile(msgspec.Struct, tag="profile"):
    """Record steps, or no more of them, as `Profile` says."""

    path: str
    num_steps: int


Act = Pause | Resume | Sleep | Wake | ForgetPrefixes | UpdateWeights | SetProfile  # Sleep, UpdateWeights: when paused
LifeState = Literal["running", "finishing", "pausing", "paused", "asleep"]  # see lmkit.engine.life


class Do(msgspec.Struct, tag="do"):
    """Something to be done between two steps. Answered by Done."""

    number: int
    what: SetAdapter | Act


class Stop(msgspec.Struct, tag="stop"):
    """End now: running requests are dropped."""


Command = Start | Submit | Abort | AskStats | Do | Stop


class Phase(msgspec.Struct, tag="phase"):
    """Progress of start-up."""

    phase: str
    done: int
    total: int
    unit: str = "B"


class Ready(msgspec.Struct, tag="ready"):
    facts: EngineFacts


class Events(msgspec.Struct, tag="events"):
    """Everything one step yields."""

    events: list[TokenEvent]


class Larger(msgspec.Struct, tag="larger"):
    """The step that begins is larger than any before: nobody knows how long it takes."""


class Stats(msgspec.Struct, tag="stats"):
    number: int
    stats: EngineStats


class Done(msgspec.Struct, tag="done"):
    """What a command with this number asked for was done, or why it was not."""

    number: int
    error: ErrorInfo | None = None


class Failed(msgspec.Struct, tag="failed"):
    """The engine cannot start or go on. The last report."""

    error: ErrorInfo


Report = Phase | Ready | Events | Larger | Stats | Done | Failed


def _plain(value: object) -> object:
    if isinstance(value, Path):
        return str(value)
    raise TypeError(f"{type(value).__name__} cannot be sent to the engine")


def _typed(kind: type, value: object) -> object:
    return Path(value) if kind is Path and isinstance(value, str) else value


_encoder = msgspec.msgpack.Encoder(enc_hook=_plain)
_commands = msgspec.msgpack.Decoder(Command, dec_hook=_typed)
_reports = msgspec.msgpack.Decoder(Report, dec_hook=_typed)


def encode(message: msgspec.Struct) -> bytes:
    """One frame."""
    frame = bytearray(HEADER)
    _encoder.encode_into(message, frame, HEADER)
    frame[:HEADER] = (len(frame) - HEADER).to_bytes(HEADER, "big")
    return bytes(frame)


def decode_command(payload: bytes | memoryview) -> Command:
    return _commands.decode(payload)


def decode_report(payload: bytes | memoryview) -> Report:
    return _reports.decode(payload)


class Splitter:
    """Bytes in any pieces -> whole payloads."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """Payloads completed by `data`. Raises EngineError when the stream is damaged."""
        buffer = self._buffer
        buffer += data
        payloads, at = [], 0
        while len(buffer) - at >= HEADER:
            size = int.from_bytes(buffer[at : at + HEADER], "big")
            if size > MAX_FRAME:
                raise EngineError(f"damaged stream: a frame of {size} bytes")
            if len(buffer) - at - HEADER < size:
                break
            payloads.append(bytes(buffer[at + HEADER : at + HEADER + size]))
            at += HEADER + size
        del buffer[:at]
        return payloads


__all__ = [
    "Abort", "Act", "AskStats", "Command", "Do", "Done", "EngineFacts", "EngineStats", "Events", "Failed",
    "ForgetPrefixes", "Larger", "LifeState", "Pause", "Phase", "Ready", "Report", "Resume", "SetAdapter", "SetProfile",
    "Splitter", "Start", "Stats", "Stop", "Submit", "UpdateWeights", "decode_command", "decode_report", "encode",
    "error_of", "info_of",
]  # fmt: skip
