"""The whole plan, against fake plugins."""

from __future__ import annotations

from lmkit.api import ResolvedPlan
from lmkit.config import EngineConfig, ModelConfig
from lmkit.plugins.resolve import resolve
from lmkit.testing.world import World

TOY = EngineConfig(model=ModelConfig(model="toy"))


def test_everything_is_chosen(whole: World) -> None:
    plan, checkpoint, info = resolve(TOY, whole.host())
    assert {(c.kind, c.component): c.name for c in plan.choices} == {
        ("platform", ""): "plain",
        ("model", ""): "ToyForCausalLM",
        ("attention", "text"): "ref",
        ("op", "linear:plain"): "matmul",
        ("loader", ""): "files",
        ("scheduler", ""): "order",
        ("executor", ""): "one",
    }
    assert {d.key: d.value for d in plan.derived} == {
        "eos_token_ids": [2, 3],
        "dtype": "bfloat16",
        "kv_dtype": "bfloat16",
        "block_size": 16,
        "max_step_tokens": 512,
    }
    assert ResolvedPlan.from_json(plan.to_json()) == plan
    assert checkpoint.ref == "toy"
    assert info.architecture == "ToyForCausalLM"
