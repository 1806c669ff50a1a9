"""What crosses the socket of a rank: `Order` towards it, `Report` back. MessagePack by msgspec, in frames of
multiprocessing.connection (a length, then so many bytes); never pickle."""

from __future__ import annotations

import os
import struct
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import msgspec
from lmkit.api import (
    Checkpoint,
    DropAdapter,
    EngineConfig,
    ErrorInfo,
    ForgetRows,
    GrammarMasks,
    KVConfig,
    LoadAdapter,
    Profile,
    Reply,
    ResetCache,
    ResolvedPlan,
    SchedLimits,
    Sleep,
    StageWeights,
    StepPlan,
    StepResult,
    UseWeights,
    Wake,
    WorkAhead,
    WorkerFacts,
)

LENGTH, LONGEST = struct.Struct("!i"), 0x7FFFFFFF  # of a frame of multiprocessing.connection, before its bytes
Known = (
    LoadAdapter | DropAdapter | Profile | ForgetRows | ResetCache | WorkAhead | Sleep | Wake | StageWeights | UseWeights
)


class Load(msgspec.Struct, tag="load"):
    """The first order: what to load. `places`: where ranks find each other, as Worker has them."""

    config: EngineConfig
    resolved: ResolvedPlan
    checkpoint: Checkpoint
    places: tuple[str, ...]


class Configure(msgspec.Struct, tag="configure"):
    kv: KVConfig
    limits: SchedLimits


class Forward(msgspec.Struct, tag="forward"):
    """Is not answered: what it raises is raised by the Sample of its step."""

    plan: StepPlan


class Sample(msgspec.Struct, tag="sample"):
    """Answered by the first rank that has the head; by another one only when it fails."""

    step: int
    masks: GrammarMasks | None


class Told(msgspec.Struct, tag="told"):
    """Is not answered. To ranks that have no head: the tokens of a step."""

    step: int
    tokens: list[list[int]]


class Command(msgspec.Struct, tag="command"):
    control: Known


Order = Load | Configure | Forward | Sample | Told | Command


class Phase(msgspec.Struct, tag="phase"):
    """Progress of loading, from the first rank."""

    phase: str
    done: int
    total: int
    unit: str


class Loaded(msgspec.Struct, tag="loaded"):
    facts: WorkerFacts


class Configured(msgspec.Struct, tag="configured"):
    pass


class Sampled(msgspec.Struct, tag="sampled"):
    result: StepResult


class Answered(msgspec.Struct, tag="answered"):
    reply: Reply


class Raised(msgspec.Struct, tag="raised"):
    """What an order raised. `step` is that of a Sample, else None; `early`: its Forward raised it."""

    error: ErrorInfo
    step: int | None = None
    early: bool = False


Report = Phase | Loaded | Configured | Sampled | Answered | Raised


def first_with_head(config: EngineConfig) -> int:
    """The rank that answers."""
    return (config.parallel.pp - 1) * config.parallel.tp


def _plain(value: object) -> object:
    if isinstance(value, Path):
        return str(value)
    raise TypeError(f"{type(value).__name__} cannot be sent to a rank")


def _typed(kind: type, value: Any) -> object:
    return Path(value) if kind is Path and isinstance(value, str) else value


def send_whole(frame: bytes, connection: Connection) -> None:
    """As `connection.send_bytes`, in one piece: that sends what is longer than 16 KiB in two, and who reads it wakes
    twice."""
    if len(frame) > LONGEST:
        connection.send_bytes(frame)
        return
    left = memoryview(LENGTH.pack(len(frame)) + frame)
    while left:
        left = left[os.write(connection.fileno(), left) :]


encode = msgspec.msgpack.Encoder(enc_hook=_plain).encode
decode_order = msgspec.msgpack.Decoder(Order, dec_hook=_typed).decode
decode_report = msgspec.msgpack.Decoder(Report, dec_hook=_typed).decode
