"""The `lmkit` command. Subcommands are imported when they run; help needs neither torch nor any plugin."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from lmkit.api import LmkitError


def main() -> None:
    """Entry point of the `lmkit` script."""
    try:
        sys.exit(run())
    except KeyboardInterrupt:  # while modules are imported
        sys.exit(130)


def run(args: Sequence[str] | None = None) -> int:
    """Runs one command line; returns the exit status. Errors become one screen on stderr, never a stack trace."""
    from lmkit.cli import errors
    from lmkit.cli.root import root

    try:
        result = root().main(args=args, prog_name="lmkit", standalone_mode=False)
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
