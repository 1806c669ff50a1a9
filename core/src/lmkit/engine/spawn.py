"""EngineProcess: the child that runs an engine, as its parent sees it before there is an event loop.

It can be started before anything is known of the engine: it imports what every engine needs and waits for its order.
The only way to it is a pair of sockets without a name, of which it inherits one.
"""

from __future__ import annotations

import socket
import subprocess
import sys
from contextlib import suppress
from time import perf_counter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lmkit.api import Checkpoint, ResolvedPlan
    from lmkit.config import EngineConfig

FACTORY = "lmkit.engine.build:build_engine"


class EngineProcess:
    """A child process; it does not outlive a `with` block. It ends, too, when this end of its socket closes."""

    def __init__(self) -> None:
        self.ordered = perf_counter()  # when it was told what to build
        self.socket, inherited = socket.socketpair()
        with inherited:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "lmkit.engine.process", str(inherited.fileno())],
                pass_fds=[inherited.fileno()],
                stdin=subprocess.DEVNULL,
                process_group=0,  # Ctrl-C reaches the parent only; it decides
            )

    def order(
        self, config: EngineConfig, resolved: ResolvedPlan, checkpoint: Checkpoint, factory: str = FACTORY
    ) -> None:
        """Tells it what to build: the first command, and the only one sent from here. It need not listen yet."""
        from lmkit.config import to_dict
        from lmkit.engine.messages import Start, encode
        from lmkit.engine.platform import platform_environment

        start = Start(factory, to_dict(config), resolved, checkpoint, platform_environment(config, resolved))
        self.ordered = perf_counter()
        with suppress(OSError):  # it has ended: whoever reads from the socket learns how
            self.socket.sendall(encode(start))

    def close(self) -> None:
        """Ends it at once. Idempotent."""
        self.socket.close()
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()

    def __enter__(self) -> EngineProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
