"""Decode steps of mixtures with a shared expert are recorded, and say what they say operator by operator."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from lmkit import LLM, SamplingParams
from lmkit_testing.checkpoints import byte_tokenizer, tiny_checkpoint

native = pytest.importorskip("lmkit_platform_cpu.native")
pytestmark = pytest.mark.skipif(native.load() is None, reason="the native kernels were not built")

PARAMS = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True, logprobs=3)
PROMPTS = [[(7 * row + 3 * i) % 200 + 10 for i in range(length)] for row, length in enumerate((5, 9, 3))]


@pytest.mark.parametrize(
    ("architecture", "values"),
    [("Qwen2MoeForCausalLM", {"hidden_size": 64}), ("Ernie4_5_MoeForCausalLM", {"head_dim": 16})],
    ids=["with a gate", "as it is"],
)
@pytest.mark.one_in(2)
def test_recorded_steps_say_the_same(architecture: str, values: dict[str, Any], tmp_path: Path) -> None:
    byte_tokenizer(tiny_checkpoint(architecture, tmp_path, vocab_size=259, **values))
    with LLM(str(tmp_path), max_rows=4, kv_memory="8MiB", prefix_cache=False) as llm:
        graphs = llm._engine.core.executor.worker.runner.graphs

        def found() -> list[Any]:
            return [(o.token_ids, [entry.top for entry in o.logprobs]) for o in llm.generate(PROMPTS, PARAMS)]

        recorded = found()
        assert graphs.graphs
        assert graphs.refused is None
        graphs.refused = "off"
        assert found() == recorded
