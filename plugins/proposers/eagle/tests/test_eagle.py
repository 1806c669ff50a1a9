"""A head of EAGLE-1 and one of EAGLE-3 in the kit."""

from pathlib import Path
from typing import Any

from lmkit_testing import DraftConformance
from lmkit_testing.draft_heads import eagle1, eagle3


class TestEagle1(DraftConformance):
    plugin = "proposer:eagle"

    def write_draft(self, model: Path, folder: Path) -> dict[str, Any]:
        return {"model": str(eagle1(model, folder))}


class TestEagle3(DraftConformance):
    plugin = "proposer:eagle"

    def write_draft(self, model: Path, folder: Path) -> dict[str, Any]:
        return {"model": str(eagle3(model, folder, "midlayer."))}
