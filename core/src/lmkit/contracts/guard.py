"""Errors of plugins' code become errors that name the plugin, its kind and the method.

`make_target` and `guard` stand around what is done between steps. What runs within one, layer by layer, is not wrapped:
`blame` finds the plugin in the traceback once something has been raised.
"""

from __future__ import annotations

import logging
import re
from asyncio import CancelledError
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any

from lmkit.contracts.errors import LmkitError, PluginError, is_interrupt, said_by
from lmkit.contracts.refs import load_target, owner_of
from lmkit.contracts.resolved import Choice

log = logging.getLogger("lmkit.plugins")
LOGGED = "the log has the cause; start without the plugin, or ask its authors"
_SIGNATURE = re.compile(r"([\w.<>]+)\(\) (?:missing|takes|got)\b")  # of a TypeError: Python names what was called


def make_target(choice: Choice, *args: Any, **more: Any) -> Any:
    """The target of a choice, called with `args`, `more` and its options. Its own typed errors pass.

    Raises PluginError, which names the plugin, for anything else that it raises.
    """
    target = load_target(choice)
    try:
        return target(*args, **more, **choice.options)
    except BaseException as e:
        if isinstance(e, LmkitError | MemoryError) or is_interrupt(e) or _is_memory(e):
            raise
        raise not_made(owner_of(choice), e) from e


def not_made(owner: str, error: BaseException) -> PluginError:
    """The error for a target that raised `error` when it was called."""
    return PluginError(
        f"{owner} could not be made: {said_by(error)}", fix="correct its options, or start without it or with another"
    )


@contextmanager
def guard(owner: str, method: str, passes: tuple[type[Exception], ...] = ()) -> Iterator[None]:
    """Around a call of a plugin's method. Its own typed errors pass, and those of `passes`; anything else is logged and
    becomes a PluginError.

    The text of what was raised may hold paths and addresses: that is for the log, not for clients.
    """
    try:
        yield
    except BaseException as e:
        if isinstance(e, (LmkitError, GeneratorExit, CancelledError, *passes)) or is_interrupt(e) or _is_memory(e):
            raise
        log.error("%s: %s raised %s", owner, method, type(e).__name__, exc_info=e)
        raise raised(owner, method, e) from e


def raised(owner: str, method: str, error: BaseException, *, in_full: bool = False) -> PluginError:
    """The error for a method that raised `error`, without the text of `error`."""
    text = said_by(error) if in_full else type(error).__name__
    return PluginError(f"{owner}: {method} raised {text}", fix=LOGGED)


def blame(error: BaseException, choices: Iterable[Choice], *, in_full: bool = False) -> BaseException:
    """A PluginError in place of an untyped error that comes from the code of one of `choices`; else the error itself.

    The plugin is the one whose code was entered last. `in_full`: with the text of the error, where whoever starts the
    engine reads it.
    """
    choices = tuple(choices)
    if isinstance(error, LmkitError | GeneratorExit | CancelledError) or is_interrupt(error) or _is_memory(error):
        return error
    packages: dict[str, list[Choice]] = {}
    for choice in choices:
        packages.setdefault(_module(choice).partition(".")[0], []).append(choice)
    entered: tuple[Choice, str] | None = None
    inside = ""  # the package whose frames are being walked
    for frame in _frames(error.__traceback__):
        package = str(frame.f_globals.get("__name__", "")).partition(".")[0]
        if package in packages and package != inside:
            entered = _nearest(packages[package], frame), frame.f_code.co_name
        if package in packages:
            inside = package
    if isinstance(error, TypeError) and (match := _SIGNATURE.match(str(error))):
        name, _, method = match[1].rpartition(".")
        called = (c for c in choices if name and c.target.partition(":")[2].endswith(name))
        entered = next(((c, method) for c in called), entered)
    if entered is None:
        return error
    choice, method = entered
    if method == "__init__":
        found = not_made(owner_of(choice), error)
    else:
        found = raised(owner_of(choice), method, error, in_full=in_full)
    found.__cause__ = error
    return found


@contextmanager
def blaming(choices: Iterable[Choice], *, in_full: bool = False) -> Iterator[None]:
    """Around what calls plugins: raises in place of an untyped error of one of them what `blame` makes of it."""
    try:
        yield
    except BaseException as e:
        if (error := blame(e, choices, in_full=in_full)) is e:
            raise
        raise error from e


def _frames(trace: TracebackType | None) -> Iterator[Any]:
    while trace is not None:
        yield trace.tb_frame
        trace = trace.tb_next


def _module(choice: Choice) -> str:
    return choice.target.partition(":")[0]


def _nearest(choices: list[Choice], frame: Any) -> Choice:
    """The plugin, among several of one package, whose object a frame works on, or else whose module it runs."""
    owner = frame.f_locals.get("self")
    for choice in choices:
        if type(owner).__qualname__ == choice.target.partition(":")[2] and type(owner).__module__ == _module(choice):
            return choice
    return next((c for c in choices if _module(c) == frame.f_globals.get("__name__")), choices[0])


def _is_memory(error: BaseException) -> bool:
    """Too little memory, of the host or of a device, is nobody's mistake."""
    return isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"
