"""The `lmkit` command. Subcommands are imported when they run; help needs neither torch nor any plugin."""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lmkit.engine.spawn import EngineProcess

ONLY_LOOKS = {"--help", "-h", "--explain"}  # options with which `serve` does not serve


def main() -> None:
    """Entry point of the `lmkit` script."""
    try:
        with _ahead(sys.argv[1:]) as process:
            sys.exit(run(process=process))
    except KeyboardInterrupt:  # while modules are imported
        sys.exit(130)


def _ahead(args: Sequence[str]) -> AbstractContextManager[EngineProcess | None]:
    """The engine process of `serve`: it starts while this one reads the command line, and ends with the block."""
    if args[:1] != ["serve"] or not ONLY_LOOKS.isdisjoint(args):
        return nullcontext()
    from lmkit.engine.spawn import EngineProcess

    signal.signal(signal.SIGTERM, _terminated)  # until the server is ready; then it drains
    return EngineProcess()


def _terminated(number: int, frame: object) -> None:
    """SIGTERM during start-up: leave through every cleanup, so that no engine process and no file stays."""
    raise SystemExit(128 + number)


def run(args: Sequence[str] | None = None, process: EngineProcess | None = None) -> int:
    """Runs one command line; returns the exit status. Errors become one screen on stderr, never a stack trace.

    `process`: for the command that serves.
    """
    from lmkit.api import LmkitError

    from lmkit_cli import errors
    from lmkit_cli.root import root

    try:
        result = root().main(args=args, prog_name="lmkit", standalone_mode=False, obj=process)
        return result if isinstance(result, int) else 0
    except LmkitError as error:
        return errors.show(error)
    except (KeyboardInterrupt, errors.Abort):
        return 130
    except errors.UsageError as error:
        return errors.show_usage(error)
    except BrokenPipeError:  # the reader of our output went away, as `head` does
        sys.stdout = None
        return 141
    except Exception as error:
        return errors.show_bug(error)
