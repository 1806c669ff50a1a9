"""Medusa heads in the kit."""

from pathlib import Path
from typing import Any

from lmkit_testing import DraftConformance
from lmkit_testing.draft_heads import medusa


class TestMedusa(DraftConformance):
    plugin = "proposer:medusa"

    def write_draft(self, model: Path, folder: Path) -> dict[str, Any]:
        return {"model": str(medusa(model, folder))}
