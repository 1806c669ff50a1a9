"""The cluster: this process joins one, or starts one of its host alone."""

from __future__ import annotations

import logging
import os
import signal
import socket
from threading import current_thread, main_thread

from lmkit.api import ConfigError

STORE = 100 << 20  # bytes of shared memory that a cluster of this host alone has for objects: ranks need none
REACH_SECONDS = 5.0


def connect(address: str, cpus: int) -> bool:
    """Whether this process was no part of a cluster before. Raises ConfigError where there is none to join."""
    import ray

    if ray.is_initialized():
        return False
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    quiet = {"logging_level": logging.ERROR, "configure_logging": False}
    at_term = signal.getsignal(signal.SIGTERM)
    try:
        if address == "local":
            ray.init("local", num_cpus=cpus, object_store_memory=STORE, include_dashboard=False, **quiet)
        else:
            reach(address)
            ray.init(address, **quiet)
    except (ConnectionError, RuntimeError, ValueError, ray.exceptions.RayError) as e:
        reason = next((line.strip() for line in str(e).splitlines() if line.strip()), type(e).__name__)
        raise ConfigError(
            f"no Ray cluster at {address}: {reason}",
            fix="`ray start --head` on one host, `ray start --address HOST:PORT` on this one, the same Ray on both",
        ) from e
    finally:
        if current_thread() is main_thread():
            signal.signal(signal.SIGTERM, at_term)  # the engine has its own
    return True


def reach(address: str) -> None:
    """Raises ConfigError at once for an address where nobody listens: Ray itself would try for long."""
    if address == "auto":
        return
    host, _, port = address.rpartition(":")
    if not (host and port.isdigit()):
        raise ConfigError(f"the Ray address {address!r} is not HOST:PORT", fix="for example 10.0.0.1:6379; or auto")
    try:
        socket.create_connection((host.strip("[]"), int(port)), REACH_SECONDS).close()
    except (OSError, OverflowError) as e:
        raise ConfigError(
            f"no Ray cluster at {address}: {e}", fix="`ray start --head` there; `ray status` says what runs"
        ) from None


def disconnect() -> None:
    """Leaves the cluster; one that this process started ends."""
    import ray

    ray.shutdown()
