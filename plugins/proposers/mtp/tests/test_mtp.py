"""A GLM-4.5 with its layer for further tokens in the kit."""

from pathlib import Path
from typing import Any

from lmkit_testing import DraftConformance
from lmkit_testing.checkpoints import byte_tokenizer, tiny_checkpoint
from lmkit_testing.draft_heads import further
from lmkit_testing.drafts import VOCAB


class TestMtp(DraftConformance):
    plugin = "proposer:mtp"

    def write(self, folder: Path) -> dict[str, Any]:
        sizes = {"num_experts_per_tok": 2, "moe_intermediate_size": 32, "n_routed_experts": 8, "n_group": 2}
        more = {"topk_group": 1, "head_dim": 16, "vocab_size": VOCAB, "eos_token_id": None}
        tiny_checkpoint("Glm4MoeForCausalLM", folder, **sizes, **more)
        byte_tokenizer(folder)
        further(folder, "Glm4MoeForCausalLM")
        return {}
