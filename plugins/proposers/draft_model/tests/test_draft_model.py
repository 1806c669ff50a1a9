"""A smaller model in the kit."""

from pathlib import Path
from typing import Any

from lmkit_testing import DraftConformance
from lmkit_testing.checkpoints import tiny_checkpoint


class TestDraftModel(DraftConformance):
    plugin = "proposer:draft_model"

    def write_draft(self, model: Path, folder: Path) -> dict[str, Any]:
        tiny_checkpoint("LlamaForCausalLM", folder, vocab_size=259, eos_token_id=None, num_hidden_layers=1, seed=3)
        return {"model": str(folder)}
