"""Every error that lmkit raises on purpose.

`code` is stable and documented; `fix` says what the user can do, as one sentence or one command.
"""

from __future__ import annotations

import opcode
import signal
from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from threading import current_thread, main_thread
from typing import TYPE_CHECKING, Any, ClassVar

import msgspec

if TYPE_CHECKING:
    from lmkit.contracts.refusal import Refused


_RAISE = opcode.opmap["RAISE_VARARGS"]


class ErrorInfo(msgspec.Struct, frozen=True):
    """An error as data: crosses processes, becomes the body of an HTTP error. Never a stack trace."""

    code: str
    message: str
    fix: str = ""
    field: str | None = None
    status: int = 500
    retryable: bool = False
    # of a request that is too large, for dialects whose clients read them
    value: int | None = None
    limit: int | None = None


class LmkitError(Exception):
    """Base class. `str(e)` is one sentence with the cause; `e.fix` says what to do."""

    code: ClassVar[str] = "internal"
    exit_code: ClassVar[int] = 1
    status: ClassVar[int] = 500
    retryable: ClassVar[bool] = False
    field: str | None = None

    def __init__(self, message: str, *, fix: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.fix = fix

    @property
    def __notes__(self) -> list[str]:  # type: ignore[override]
        """Python prints these below an uncaught exception: whoever calls from Python sees the fix too."""
        return [f"fix: {self.fix}"] if self.fix else []

    def info(self) -> ErrorInfo:
        return ErrorInfo(self.code, self.message, self.fix, self.field, self.status, self.retryable)


def said_by(error: BaseException) -> str:
    """ "ValueError: text", and the name alone of one whose text cannot be had."""
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:
        return type(error).__name__


def is_interrupt(error: BaseException) -> bool:
    """Whether somebody pressed Ctrl-C: a KeyboardInterrupt that a `raise` of plain code brought up is no such thing."""
    if not isinstance(error, KeyboardInterrupt) or current_thread() is not main_thread():
        return False  # signals come to the main thread only
    handler: Any = signal.getsignal(signal.SIGINT)
    if handler is signal.SIG_IGN:
        return False
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    if trace is None:
        return True
    code = trace.tb_frame.f_code
    handler = getattr(handler, "func", handler)  # of a partial, as asyncio sets it
    return code.co_code[trace.tb_lasti] != _RAISE or code is getattr(handler, "__code__", None)


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name most like `name`, or None."""
    found = get_close_matches(name, list(known), n=1, cutoff=0.5)
    return found[0] if found else None


class ConfigError(LmkitError):
    """An option, file or name from the user cannot be used."""

    code = "config"
    exit_code = 2
    status = 400


class CannotSplit(ConfigError):
    """A layer's weights cannot be divided over as many ranks as --tp or --ep asks for."""

    code = "cannot-split"

    def __init__(self, message: str) -> None:
        super().__init__(message, fix="use a smaller --tp or --ep, or --pp, whose ranks have whole layers")


class UnknownKey(ConfigError):
    """An unknown key; names the nearest known one."""

    code = "unknown-key"

    def __init__(self, key: str, known: Iterable[str], where: str) -> None:
        known = sorted(known)
        like = nearest(key, known)
        self.key = key
        fix = f"did you mean {like!r}?" if like else f"known keys: {', '.join(known) or 'none'}"
        super().__init__(f"unknown key {key!r} in {where}", fix=fix)


class UnknownName(ConfigError):
    """An unknown plugin, model or command; names the nearest one."""

    code = "unknown-name"

    def __init__(self, kind: str, name: str, known: Iterable[str], fix: str = "") -> None:
        known = sorted(known)
        like = nearest(name, known)
        self.kind, self.name = kind, name
        hint = f"did you mean {like!r}? " if like else ""
        text = f"there is no {kind} named {name!r} (known: {', '.join(known) or 'none'})"
        super().__init__(text, fix=(hint + fix).strip())


class SelectionError(LmkitError):
    """No implementation passed selection; `refused` says why not."""

    code = "no-candidate"
    exit_code = 2
    refused: tuple[Refused, ...] = ()  # they stay with the resolver, which runs in the parent

    def __init__(self, message: str, refused: Iterable[Refused] = (), *, fix: str = "") -> None:
        super().__init__(message, fix=fix)
        self.refused = tuple(refused)


class PluginError(LmkitError):
    """A plugin broke its contract."""

    code = "plugin"
    exit_code = 3


class CheckpointError(LmkitError):
    """A checkpoint is missing, damaged or not understood."""

    code = "checkpoint"
    exit_code = 4


class UnsupportedModel(CheckpointError):
    """A key of the model's configuration has a value that is not understood."""

    code = "unsupported-model"

    def __init__(self, key: str, value: object, supported: str = "", *, fix: str = "") -> None:
        self.key, self.value = key, value
        tail = f"; supported: {supported}" if supported else ""
        like = nearest(value, supported.replace("'", "").split(", ")) if isinstance(value, str) else None
        fix = fix or (f"nearest: {like}" if like else "")
        super().__init__(f"unsupported model configuration: {key} = {value!r}{tail}", fix=fix)


class UnknownArchitecture(UnsupportedModel):
    """Nobody knows a model of that name: it may be misspelt."""


class WeightMismatch(CheckpointError):
    """Tensors are missing, left over, or of another shape or dtype."""

    code = "weight-mismatch"


class CapacityError(LmkitError):
    """Memory does not suffice."""

    code = "no-memory"
    exit_code = 5
    status = 507


class RequestError(LmkitError):
    """One request is wrong; nothing else is affected."""

    code = "invalid-request"
    exit_code = 2
    status = 400


class InvalidParam(RequestError):
    """`field` has `value`, which is outside `limit`."""

    code = "invalid-param"

    def __init__(self, field: str, value: object, limit: str, *, fix: str = "") -> None:
        self.field, self.value, self.limit = field, value, limit
        shown = f"{value!r:.77}..." if len(repr(value)) > 80 else repr(value)
        super().__init__(f"{field}: got {shown}, needs {limit}", fix=fix)


class RequestTooLarge(RequestError):
    """The request cannot fit, even alone."""

    code = "request-too-large"

    def __init__(self, field: str, value: int, limit: int, message: str = "", *, fix: str = "") -> None:
        self.field, self.value, self.limit = field, value, limit
        super().__init__(message or f"{field} is {value}, the limit is {limit}", fix=fix)

    def info(self) -> ErrorInfo:
        return msgspec.structs.replace(super().info(), value=self.value, limit=self.limit)


class UnsupportedTask(RequestError):
    """`task` was asked of a model that does `offered`."""

    code = "unsupported-task"

    def __init__(self, task: str, offered: Iterable[str]) -> None:
        self.task, self.offered = task, tuple(offered)
        fix = "serve a model made for it, or see --task for what else this checkpoint can do"
        super().__init__(f"this model cannot {task}; it can: {', '.join(self.offered)}", fix=fix)


class TemplateFailed(RequestError):
    """The chat template refused the messages, or could not render them.

    `index` and `key` say what the template read last: which message, and which field of it ("tool_calls.0.id").
    """

    code = "chat-template"

    def __init__(self, message: str, *, fix: str = "", index: int | None = None, key: str = "") -> None:
        self.cause, self.index, self.key = message, index, key
        if index is not None:
            self.field = f"messages.{index}.{key}" if key else f"messages.{index}"
        super().__init__(f"{self.field}: {message}" if self.field else message, fix=fix)

    def renamed(self, places: Sequence[str]) -> TemplateFailed:
        """This error with the names that a client without `messages` uses: `places` has one for each message."""
        if self.index is None or self.index >= len(places):
            return self
        renamed = TemplateFailed(self.cause, fix=self.fix)
        renamed.field = places[self.index]
        renamed.message = f"{renamed.field}: {self.cause}"
        renamed.args = (renamed.message,)
        return renamed


class GrammarError(RequestError):
    """A constraint that is malformed, not supported, too large, or too much work. It is never left out instead."""

    code = "grammar"
    field = "grammar"


class EngineError(LmkitError):
    """The engine failed."""

    code = "engine"
    exit_code = 6


class EngineDead(EngineError):
    """The engine's process is gone."""

    code = "engine-dead"
    status = 503
    retryable = True


class EngineBusy(EngineError):
    """The queue is full, or the server drains."""

    code = "engine-busy"
    status = 503
    retryable = True


def info_of(error: BaseException) -> ErrorInfo:
    """An error as data, typed or not. An untyped one is a bug of ours: its type and message are kept."""
    if isinstance(error, LmkitError):
        return error.info()
    if isinstance(error, MemoryError):
        return ErrorInfo("no-memory", "out of memory", "use a smaller model, --max-length or --kv-memory", status=507)
    fix = "set LMKIT_DEBUG=1 for the stack trace, and report this"
    return ErrorInfo("engine", f"{type(error).__name__}: {error}", fix)


def error_of(info: ErrorInfo) -> LmkitError:
    """The exception that `info` describes: the class with its code, or EngineError."""
    found = next((c for c in _subclasses(LmkitError) if c.code == info.code), EngineError)
    error = found.__new__(found)
    LmkitError.__init__(error, info.message, fix=info.fix)
    error.field = info.field
    return error


def _subclasses(kind: type[LmkitError]) -> list[type[LmkitError]]:
    found = [kind]
    for sub in kind.__subclasses__():
        found.extend(_subclasses(sub))
    return found
