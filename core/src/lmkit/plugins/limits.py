"""A limit on the time of what plugins do before an engine runs: nothing waits for ever, and the culprit is named."""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable
from threading import Thread
from typing import TypeVar

from lmkit.api import PluginError
from lmkit.config.environment import is_on, plugin_seconds
from lmkit.contracts.contained import contained

log = logging.getLogger("lmkit.plugins")
NAMED_SECONDS = 5.0  # after which whoever is waited for is named
Result = TypeVar("Result")


def limited(what: str, function: Callable[[], Result], fix: str = "", *, printed: list[str] | None = None) -> Result:
    """What `function` returns or raises. `what` says who does what: "importing x.hooks".

    What it prints goes to standard error, since standard output is the command's; `printed` gets the beginning of it.
    It cannot end the process by `os._exit`.

    It runs in a thread of its own, which after LMKIT_PLUGIN_SECONDS is left behind and asked to end: then this raises
    PluginError. After five seconds, and at Ctrl-C, a line of the log says what is waited for.
    """
    results: list[Result] = []
    errors: list[BaseException] = []

    def run() -> None:
        inside.enter()
        try:
            results.append(function())
        except BaseException as e:
            errors.append(e)

    level, limit = logging.WARNING if is_on("LMKIT_TRACE_PLUGINS") else logging.DEBUG, plugin_seconds()
    log.log(level, "%s", what)
    thread = Thread(target=run, name=f"lmkit: {what}", daemon=True)
    try:
        with contained() as inside:
            thread.start()
            thread.join(min(limit, NAMED_SECONDS))
            if thread.is_alive() and limit > NAMED_SECONDS:
                log.warning("%s has taken %g s and goes on, up to %g s; %s", what, NAMED_SECONDS, limit, fix)
                thread.join(limit - NAMED_SECONDS)
            if (text := inside.leave()) and printed is not None:
                printed.append(text)
    except KeyboardInterrupt:
        log.error("interrupted while %s; %s", what, fix)
        raise
    if thread.is_alive():
        assert thread.ident is not None
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), ctypes.py_object(SystemExit))
        raise PluginError(f"{what} has not ended after {limit:g} s (LMKIT_PLUGIN_SECONDS)", fix=fix)
    log.log(level, "%s -> %.200r", what, (errors or results)[0])
    if errors:
        if isinstance(errors[0], KeyboardInterrupt):  # not the user's: that one comes to this thread
            raise PluginError(f"{what} raised KeyboardInterrupt", fix=fix) from errors[0]
        raise errors[0]
    return results[0]
