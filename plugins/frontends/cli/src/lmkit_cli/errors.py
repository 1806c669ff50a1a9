"""One screen per error: cause, fix, code. Stack traces only with LMKIT_DEBUG=1."""

from __future__ import annotations

import errno
import traceback
from typing import Any

import typer
from lmkit.api import LmkitError, SelectionError
from lmkit.config.environment import debug
from rich.console import Console
from rich.markup import escape

from lmkit_cli.hints import flag_hint

UsageError: Any = typer.BadParameter.__mro__[2]  # click's base of all errors that are shown to the user
Abort = typer.Abort
MAX_REFUSED = 12
_MORE_MEMORY = "free some, choose a smaller model, --kv-memory or --max-length, or raise the container's limit"
_SHORTAGES = {
    errno.EMFILE: (
        "this process may open no more files",
        "raise the limit: ulimit -n 4096, or LimitNOFILE= of systemd",
    ),
    errno.ENFILE: ("this machine can open no more files", "end processes that hold many, or raise fs.file-max"),
    errno.ENOSPC: ("there is no space left on a disk", "free some: checkpoints, TMPDIR and /dev/shm (see df -h)"),
    errno.EDQUOT: ("the disk quota is used up", "free some space, or choose folders on another disk"),
    errno.ENOMEM: ("there is no memory left", _MORE_MEMORY),
}


def show(error: LmkitError) -> int:
    """Prints the error; returns its exit status."""
    refused = []
    if isinstance(error, SelectionError):
        for candidate in error.refused[:MAX_REFUSED]:
            if all(reason.needed in str(error) and reason.offered in str(error) for reason in candidate.reasons):
                continue  # the message says it already
            reasons = "; ".join(str(reason) for reason in candidate.reasons)
            refused.append(f"{candidate.kind} {candidate.name}: {reasons}")
    _screen(error, str(error), error.fix, error.code, refused)
    return error.exit_code


def show_usage(error: Exception) -> int:
    """A command line that cannot be understood."""
    context = getattr(error, "ctx", None)
    message = error.format_message() if hasattr(error, "format_message") else str(error)
    fix = f"{context.command_path} --help" if context is not None else "lmkit --help"
    if (option := getattr(error, "option_name", None)) and context is not None:
        fix = f"{hint}; or {fix}" if (hint := flag_hint(option, known_flags(context))) else fix
    _screen(error, message, fix, "usage")
    return 2


def known_flags(context: Any) -> list[str]:
    """Every option of the command that was asked for."""
    return [flag for parameter in context.command.params for flag in (*parameter.opts, *parameter.secondary_opts)]


def show_bug(error: Exception) -> int:
    """An error nobody foresaw: ours, unless the system had nothing left to give."""
    if (found := shortage(error)) is not None:
        message, fix = found
        _screen(error, message, fix, "resources")
        return 1
    _screen(
        error, f"{type(error).__name__}: {error}", "set LMKIT_DEBUG=1 for the stack trace, and report this", "internal"
    )
    return 1


def shortage(error: BaseException) -> tuple[str, str] | None:
    """The resource that the system ran out of, and what to do, where that caused an error; None: it did not."""
    seen: set[int] = set()
    chain: BaseException | None = error
    while chain is not None and id(chain) not in seen:
        seen.add(id(chain))
        if isinstance(chain, MemoryError):
            return "there is no memory left", _MORE_MEMORY
        if isinstance(chain, RuntimeError) and "can't start new thread" in str(chain):
            return "no thread can be started", "raise the limits of processes: ulimit -u, or the container's pids limit"
        if isinstance(chain, OSError) and chain.errno in _SHORTAGES:
            return _SHORTAGES[chain.errno]
        chain = chain.__cause__ or chain.__context__
    return None


def _screen(error: Exception, cause: str, fix: str, code: str, details: list[str] | None = None) -> None:
    console = Console(stderr=True, highlight=False)
    console.soft_wrap = not console.is_terminal  # a terminal breaks lines between words, a log or pipe gets them whole
    if debug():
        console.print(escape("".join(traceback.format_exception(error))), end="")
    for line in details or ():
        console.print(f"  [dim]-[/] {escape(line)}")
    console.print(f"[bold red]error:[/] {escape(cause)}")
    if fix:
        console.print(f"  [bold]fix:[/]  {escape(fix)}")
    console.print(f"  [dim]code: {escape(code)}[/]")
