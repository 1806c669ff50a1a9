"""Recurrent models on native operators: decode steps are tapes, and tokens those of the plain torch operators."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from lmkit import LLM, SamplingParams
from lmkit_platform_cpu.native import load
from lmkit_testing.checkpoints import byte_tokenizer, tiny_checkpoint

if load() is None:
    pytest.skip("the native kernels were not built", allow_module_level=True)

MAMBA2 = {"num_heads": 8, "head_dim": 12, "n_groups": 2, "state_size": 8, "chunk_size": 16}
HEADS = {"num_attention_heads": 3, "num_key_value_heads": 1}  # of a size that native attention has
BAMBA = {
    **HEADS, "num_hidden_layers": 3, "attn_layer_indices": [1], "mamba_n_heads": 8, "mamba_n_groups": 2,
    "mamba_d_state": 8, "mamba_chunk_size": 16,
}  # fmt: skip
TINY: dict[str, dict[str, object]] = {
    "MambaForCausalLM": {"state_size": 8},
    "Mamba2ForCausalLM": MAMBA2,
    "BambaForCausalLM": BAMBA,
    "Lfm2ForCausalLM": {**HEADS, "layer_types": ["conv", "full_attention"]},
    "Qwen3NextForCausalLM": {},
}
PROMPTS = [[5, 6, 7, 8, 9], list(range(3, 60))]


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", TINY)
def test_tapes_give_the_tokens_of_torch(name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tiny_checkpoint(name, tmp_path, vocab_size=259, dtype="bfloat16", **TINY[name])
    byte_tokenizer(tmp_path)
    params, found = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True), {}
    for op in ("recurrent_native", "recurrent_torch"):
        caplog.clear()
        with caplog.at_level(logging.INFO, "lmkit.platform.cpu"), LLM(str(tmp_path), op=op, executor="uniproc") as llm:
            found[op] = [output.outputs[0].token_ids for output in llm.generate(PROMPTS, params)]
        assert ("operator by operator" in caplog.text) == (op == "recurrent_torch")
    assert found["recurrent_native"] == found["recurrent_torch"]
