"""Adapters that PEFT saved, against the model of transformers that has them: fused, stacked and turned projections."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from lmkit.api import CheckpointOptions, Collectives, UnsupportedModel
from lmkit.checkpoint import open_checkpoint
from lmkit.plugins import load_target
from lmkit_layers.adapters import Adapter, AdapterBank
from lmkit_testing.checkpoints import FAMILIES, tiny_checkpoint
from lmkit_testing.model import deviation, load_tiny, prompt, reference
from lmkit_testing.specs import find_plugin
from lmkit_testing.steps import ModelDriver, Ranks
from lmkit_worker.loading.adapter import BaseModel, open_adapter
from lmkit_worker.loading.patterns import Patterns
from lmkit_worker.loading.rules import Rules
from lmkit_worker.loading.safetensors import SafetensorsLoader

pytestmark = [
    pytest.mark.skipif(find_spec("peft") is None, reason="needs peft"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),  # of peft beside this transformers
    pytest.mark.filterwarnings("ignore::UserWarning:peft.*"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning:peft.*"),  # patterns that name parameters
]
IDS = prompt(97)
MIX = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
LATENT = {
    "q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 12, "qk_rope_head_dim": 8, "v_head_dim": 10,
    "num_key_value_heads": 4, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
    "n_group": 2, "topk_group": 1,
}  # fmt: skip
ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def saved(family: str, values: dict[str, Any], options: dict[str, Any], folder: Path) -> torch.Tensor:
    """A base model and an adapter of it; returns the logits of both together."""
    import peft  # takes seconds, in every process that collects

    model = reference(tiny_checkpoint(family, folder / "base", **values), "float32")
    adapted = peft.get_peft_model(model, peft.LoraConfig(**{"r": 4, "lora_alpha": 8, **options}))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_" in name:
                noise = torch.randn(parameter.shape, generator=generator)
                parameter.copy_(parameter * (1 + 0.3 * noise) if "magnitude" in name else 0.1 * noise)
        expected = adapted(torch.tensor([IDS])).logits[0]
    adapted.save_pretrained(folder / "adapter")
    return expected


def logits(family: str, folder: Path, adapter: bool, ranks: Collectives | None = None, deals: int = 1) -> torch.Tensor:
    name = FAMILIES[family][1] if family in FAMILIES else family
    target = find_plugin(f"model:{name}")[2].target
    loaded = load_tiny(folder / "base", target, "float32", adapters=True, collectives=ranks, deals=deals)
    checkpoint = open_checkpoint(str(folder / "base"), CheckpointOptions())
    assert checkpoint is not None
    loader, bank = SafetensorsLoader(), AdapterBank(loaded.model, 2, torch.device("cpu"))
    base = BaseModel(
        Rules(load_target(target)().weights(loaded.info)), loader, {e.name: e for e in loader.tensors(checkpoint)}
    )
    if adapter:
        weights = open_adapter(folder / "adapter", loaded.info, 64, base).read(torch.float32)
        bank.load(Adapter("a", weights.deltas, weights.whole))
        bank.put(1, "a")
    numbers = torch.tensor(bank.of_slot).repeat_interleave(torch.tensor([2, len(IDS)]))
    with bank.tables.applied({len(IDS) + 2: numbers}):
        hidden = ModelDriver(loaded, "float32").hidden([(0, IDS[:2]), (1, IDS)])
    return loaded.model.logits(hidden)[2:]


KINDS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "phi3, fused": ("Phi3ForCausalLM", {}, {"target_modules": ["qkv_proj", "gate_up_proj", "o_proj", "down_proj"]}),
    "neox, head by head": ("GPTNeoXForCausalLM", {"hidden_size": 64}, {"target_modules": ["query_key_value", "dense"]}),
    "falcon, group by group": (
        "FalconForCausalLM", {"new_decoder_architecture": True, "num_kv_heads": 2},
        {"target_modules": ["query_key_value"]},
    ),
    "gpt2, turned": ("GPT2LMHeadModel", {}, {"target_modules": ["c_attn", "c_proj", "c_fc"], "fan_in_fan_out": True}),
    "gpt2, square": (
        "GPT2LMHeadModel", {"n_inner": 48}, {"target_modules": ["c_proj", "c_fc"], "fan_in_fan_out": True},
    ),
    "patterns": (
        "llama", {},
        {
            "target_modules": ALL, "rank_pattern": {"q_proj": 2, r"layers\.1\..*\.down_proj": 7},
            "alpha_pattern": {"model.layers.0.self_attn.q_proj": 3, "^model.layers.1.mlp.up_proj$": 32},
        },
    ),
    "roots": ("llama", {}, {"target_modules": ALL, "rank_pattern": {"v_proj": 9}, "use_rslora": True}),
    "dora": ("llama", {"attention_bias": True}, {"target_modules": ALL, "use_dora": True}),
    "dora, fused": ("Phi3ForCausalLM", {}, {"target_modules": ["qkv_proj", "gate_up_proj"], "use_dora": True}),
    "dora, head by head": (
        "GPTNeoXForCausalLM", {"hidden_size": 64}, {"target_modules": ["query_key_value"], "use_dora": True},
    ),
    "latents": ("DeepseekV3ForCausalLM", LATENT, {"target_modules": ["q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj"]}),
    "dora, latents": ("DeepseekV3ForCausalLM", LATENT, {"target_modules": ["kv_b_proj"], "use_dora": True}),
    "experts": ("Qwen3MoeForCausalLM", MIX, {"target_modules": "all-linear", "r": 2}),
    "experts and shared ones": (
        "Qwen2MoeForCausalLM", MIX | {"shared_expert_intermediate_size": 40}, {"target_modules": "all-linear"},
    ),
    "parameters": (
        "MixtralForCausalLM", {"num_local_experts": 4},
        {"target_modules": ["q_proj"], "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]},
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_adapter_of_peft(kind: str, tmp_path: Path) -> None:
    family, values, options = KINDS[kind]
    expected = saved(family, values, options, tmp_path)
    assert deviation(logits(family, tmp_path, True), expected) < 1e-4
    assert deviation(logits(family, tmp_path, False), expected) > 1e-2
    for deals in (1, 2) if "Moe" in family or "Mixtral" in family else (1,):
        for of_rank in Ranks(2).run(lambda ranks, deals=deals: logits(family, tmp_path, True, ranks, deals)):
            assert deviation(of_rank, expected) < 1e-4


@pytest.mark.parametrize(
    "patterns", [{r"(\w+)+x": 1}, {".*.*.*a": 1}, {"(a|b)*": 1}, {r"\1": 1}, {"(": 1}, {"a" * 300 + ".*": 1}, ["q"]]
)
def test_patterns_that_could_run_for_ever_are_refused(patterns: Any) -> None:
    with pytest.raises(UnsupportedModel, match="rank_pattern"):
        Patterns("rank_pattern", patterns)
