"""The `lmkit` script: hands the command line over to the dist that reads it."""

from __future__ import annotations

import faulthandler
import sys


def main() -> None:
    """Runs the command line. Without lmkit-cli it says how to install it and exits with status 3."""
    if sys.stderr is not None:
        faulthandler.enable()  # a plugin that crashes in native code is seen in the stack that this prints
    try:
        from lmkit_cli import main as run
    except ModuleNotFoundError as error:
        if error.name != "lmkit_cli":
            raise
        from lmkit.contracts.errors import PluginError
        from lmkit.plugins.catalog import install

        missing = PluginError("the command line is not installed", fix=install("lmkit-cli"))
        print(f"error: {missing}\n  fix:  {missing.fix}\n  code: {missing.code}", file=sys.stderr)
        sys.exit(missing.exit_code)
    run()
