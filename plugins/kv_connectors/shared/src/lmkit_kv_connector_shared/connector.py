"""The KV connector `shared`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lmkit_stores import Folder, StoreConnector

from lmkit_kv_connector_shared.options import Options

if TYPE_CHECKING:
    from lmkit.api import Checkpoint, KVConfig, ResolvedPlan


class Shared(StoreConnector):
    """Blocks as files: written when a step has computed them, read when a prompt begins like one that was."""

    def __init__(self, checkpoint: Checkpoint, resolved: ResolvedPlan, kv: KVConfig, **options: Any) -> None:
        chosen = Options(**options)
        super().__init__(Folder(chosen.folder, chosen.size << 20), checkpoint, resolved, kv, chosen)
