"""The error about a context that is too long says what the model was made for, and why less is served."""

from __future__ import annotations

from pathlib import Path

import pytest
from lmkit.api import ConfigError
from lmkit.config import from_options
from lmkit.plugins.resolve import resolve
from lmkit_testing.checkpoints import tiny_checkpoint

pytest.importorskip("transformers")
SPARSE = {"index_topk": 160, "index_head_dim": 16, "index_n_heads": 2, "max_position_embeddings": 512}


def test_sparse_attention_ends_at_index_topk(tmp_path: Path) -> None:
    tiny_checkpoint("DeepseekV32ForCausalLM", tmp_path, **SPARSE)
    options = {"model": str(tmp_path), "platform": "cpu"}
    with pytest.raises(ConfigError, match=r"at most 160 here: it was made for 512, but its sparse .*index_topk") as e:
        resolve(from_options(options | {"max_length": 400}))
    assert e.value.fix == "--max-length 160"
    assert resolve(from_options(options | {"max_length": 160}))[2].max_length == 160


def test_dual_chunk_attention_ends_with_its_first_chunk(tmp_path: Path) -> None:
    chunks = {"chunk_size": 100, "local_size": 20}
    tiny_checkpoint("llama", tmp_path, dual_chunk_attention_config=chunks, max_position_embeddings=512)
    with pytest.raises(ConfigError, match="at most 80 here: dual chunk attention"):
        resolve(from_options({"model": str(tmp_path), "platform": "cpu", "max_length": 400}))


def test_other_models_say_what_they_were_made_for(tmp_path: Path) -> None:
    tiny_checkpoint("llama", tmp_path, max_position_embeddings=512)
    with pytest.raises(ConfigError, match="max_length is 600, the model was made for at most 512"):
        resolve(from_options({"model": str(tmp_path), "platform": "cpu", "max_length": 600}))
