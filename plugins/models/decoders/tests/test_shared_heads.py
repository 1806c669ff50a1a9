"""More ranks than heads of keys and values: several ranks hold the same one."""

from __future__ import annotations

from pathlib import Path

import pytest
from lmkit.api import CannotSplit, Collectives
from lmkit_testing.checkpoints import tiny_checkpoint
from lmkit_testing.model import deviation, load_tiny, prompt
from lmkit_testing.steps import ModelDriver, Ranks
from torch import Tensor

LLAMA = "lmkit_model_llama.arch:Llama"


@pytest.mark.parametrize(("num_q", "num_kv", "num_ranks"), [(4, 2, 4), (4, 1, 2), (8, 2, 4)])
def test_ranks_that_share_heads_say_what_one_says(tmp_path: Path, num_q: int, num_kv: int, num_ranks: int) -> None:
    heads = {"num_attention_heads": num_q, "num_key_value_heads": num_kv, "head_dim": 16, "attention_bias": True}
    directory = tiny_checkpoint("llama", tmp_path / "model", **heads)
    whole = load_tiny(directory, LLAMA, "float32")
    ids = prompt(whole.info.vocab_size)
    expected = ModelDriver(whole, "float32").run(0, ids, 9)

    def run(collectives: Collectives) -> Tensor:
        mine = load_tiny(directory, LLAMA, "float32", collectives=collectives)
        return ModelDriver(mine, "float32").run(0, ids, 9)

    for logits in Ranks(num_ranks).run(run):
        assert deviation(logits, expected) < 1e-4


def test_heads_that_do_not_divide_are_refused(tmp_path: Path) -> None:
    heads = {"num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 16}
    directory = tiny_checkpoint("llama", tmp_path / "model", **heads)
    with pytest.raises(CannotSplit, match="6 query and 3 key-value heads cannot be split over 2 ranks"):
        Ranks(2).run(lambda collectives: load_tiny(directory, LLAMA, "float32", collectives=collectives))
