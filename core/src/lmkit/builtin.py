"""The core's own hook, registered as everybody's are: it finds checkpoints in directories and on a hub."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from lmkit.api import hookimpl

if TYPE_CHECKING:
    from lmkit.api import Checkpoint, CheckpointOptions


@hookimpl(trylast=True)
def lmkit_resolve_checkpoint(ref: str, options: CheckpointOptions) -> Checkpoint | None:
    """Local directories and hub ids. The import waits until a checkpoint is really looked for."""
    return import_module("lmkit.checkpoint").open_checkpoint(ref, options)
