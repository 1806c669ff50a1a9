"""Adapters that PEFT saved, against the model of transformers that has them: fused, stacked and turned projections."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from lmkit.api import CheckpointOptions, Collectives, UnsupportedModel, WeightMismatch
from lmkit.checkpoint import open_checkpoint
from lmkit.plugins import load_target
from lmkit_layers.adapters import Adapter, AdapterBank
from lmkit_testing.checkpoints import FAMILIES, tiny_checkpoint
from lmkit_testing.model import deviation, load_tiny, prompt, reference
from lmkit_testing.specs import find_plugin
from lmkit_testing.steps import ModelDriver, Ranks
from lmkit_worker.loading.adapter import open_adapter
from lmkit_worker.loading.adapter_config import AdapterConfig
from lmkit_worker.loading.adapter_places import BaseModel, Places
from lmkit_worker.loading.rules import Rules
from lmkit_worker.loading.safetensors import SafetensorsLoader

from .classes import conformance_classes

pytestmark = [
    pytest.mark.skipif(find_spec("peft") is None, reason="needs peft"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),  # of peft beside this transformers
    pytest.mark.filterwarnings("ignore::UserWarning:peft.*"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning:peft.*"),  # patterns that name parameters
]
IDS = prompt(97)
CLASSES = {kit.name(): kit for kit in conformance_classes()}
MIX = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
LATENT = {
    "q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 12, "qk_rope_head_dim": 8, "v_head_dim": 10,
    "num_key_value_heads": 4, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
    "n_group": 2, "topk_group": 1,
}  # fmt: skip
ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def saved(family: str, values: dict[str, Any], options: dict[str, Any], folder: Path) -> torch.Tensor:
    """A base model and an adapter of it; returns the logits of both together."""
    return adapted(reference(tiny_checkpoint(family, folder / "base", **values), "float32"), options, folder)


def adapted(model: Any, options: dict[str, Any], folder: Path) -> torch.Tensor:
    """An adapter of `model`, saved; returns the logits of both together, as peft reads it again."""
    import peft  # takes seconds, in every process that collects

    if options.get("target_parameters"):
        model.set_experts_implementation("eager")  # which lets parameters be wrapped
    adapted = peft.get_peft_model(model, peft.LoraConfig(**{"r": 4, "lora_alpha": 8, **options}))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_" in name:
                noise = torch.randn(parameter.shape, generator=generator)
                parameter.copy_(parameter * (1 + 0.3 * noise) if "magnitude" in name else 0.1 * noise)
    adapted.save_pretrained(folder / "adapter")
    again = peft.PeftModel.from_pretrained(adapted.unload(), folder / "adapter").eval()  # a file's keys are sorted
    with torch.no_grad():
        logits: torch.Tensor = again(torch.tensor([IDS])).logits[0]
    return logits


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
    return bank.logits(hidden, numbers)[2:]


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


def changed_by_rules(model: torch.nn.Module, rules: Rules) -> dict[str, dict[str, Any]]:
    """Options of peft for each kind of linear of `model` whose weight rule does more than copy, and all stacks."""
    import transformers

    options: dict[str, dict[str, Any]] = {}
    for path, module in model.named_modules():
        last = path.rpartition(".")[2]
        match = rules.match(f"{path}.weight")
        if isinstance(module, torch.nn.Linear | transformers.pytorch_utils.Conv1D):
            if match is not None and match.rule.transform is not None:
                options[last] = {"target_modules": [last]}
        elif last == "experts":
            stacks = [name for name, parameter in module.named_parameters(recurse=False) if parameter.dim() == 3]
            options |= {name: {"target_modules": [], "target_parameters": [f"{last}.{name}"]} for name in stacks}
    return options


TEXT_ALONE = "Llama4ForConditionalGeneration"  # which transformers cannot run
NAMES = sorted(name for name, kit in CLASSES.items() if kit.plugin == f"model:{name}" and name != TEXT_ALONE)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.one_in(4)
def test_adapters_follow_the_weight_rules_of_every_architecture(name: str, tmp_path: Path) -> None:
    """Outputs that a rule puts in another order are in that order in adapters, too; others are refused by name."""
    kit = CLASSES[name]
    for variant in ("base", "experts") if "experts" in kit.variants else ("base",):
        values = {**kit.values, **kit.variants.get(variant, {})}
        base = tiny_checkpoint(kit.family or name, tmp_path / variant, **values)
        kit.name_architecture(base)
        checkpoint = open_checkpoint(str(base), CheckpointOptions())
        assert checkpoint is not None
        architecture = load_target(find_plugin(kit.plugin)[2].target)()
        rules = Rules(architecture.weights(architecture.describe(checkpoint.config)))
        for what, options in changed_by_rules(reference(base, "float32", kit.family), rules).items():
            folder = tmp_path / f"{variant}-{what}"
            folder.mkdir()
            (folder / "base").symlink_to(base)
            try:
                expected = adapted(reference(base, "float32", kit.family), options, folder)
            except ValueError as e:
                if "Cannot convert PEFT target" not in str(e):  # peft has no adapter of this part alone
                    raise
                continue
            try:
                found = logits(name, folder, True)
            except (UnsupportedModel, WeightMismatch):
                assert (name, what) not in COMPARED
                continue
            assert deviation(found, expected) < 1e-3, what
            assert deviation(logits(name, folder, False), expected) > 1e-2, what


FURTHER: dict[str, dict[str, Any]] = {  # linears that no other family has, or that peft calls otherwise than the file
    "Qwen3NextForCausalLM": {"target_modules": ["in_proj_qkvz", "in_proj_ba", "out_proj"]},
    "Qwen3_5ForCausalLM": {"target_modules": "all-linear"},
    "Qwen3_5MoeForCausalLM": {"target_modules": "all-linear"},
    "Gemma3nForCausalLM": {"target_modules": ["linear_left", "per_layer_projection", "per_layer_model_projection"]},
    "OlmoHybridForCausalLM": {"target_modules": ["a_proj", "b_proj", "g_proj"]},
    "RecurrentGemmaForCausalLM": {"target_modules": ["linear_x", "linear_y", "linear_out"]},
    "HYV3ForCausalLM": {"target_modules": r".*shared_experts\.(gate|up|down)_proj"},
    "KimiLinearForCausalLM": {"target_modules": r".*(shared_experts\.(gate|up|down)_proj|self_attn\.b_proj)"},
}


@pytest.mark.parametrize("name", FURTHER)
def test_adapters_of_linears_of_one_family(name: str, tmp_path: Path) -> None:
    expected = saved(CLASSES[name].family or name, dict(CLASSES[name].values), FURTHER[name], tmp_path)
    assert deviation(logits(name, tmp_path, True), expected) < 1e-3
    assert deviation(logits(name, tmp_path, False), expected) > 1e-3


# Of these peft has the same names as the files: none of them may be refused.
COMPARED = {
    ("GptOssForCausalLM", "gate_up_proj"), ("GptOssForCausalLM", "down_proj"), ("Gemma4ForCausalLM", "gate_up_proj"),
    ("Gemma4ForCausalLM", "down_proj"), ("Llama4ForCausalLM", "gate_up_proj"), ("Llama4ForCausalLM", "down_proj"),
    ("GPTNeoXForCausalLM", "query_key_value"), ("FalconForCausalLM", "query_key_value"),
    ("BloomForCausalLM", "query_key_value"), ("CodeGenForCausalLM", "qkv_proj"), ("GPT2LMHeadModel", "c_attn"),
    ("PersimmonForCausalLM", "query_key_value"), ("GPTBigCodeForCausalLM", "c_attn"),
    ("Qwen3MoeForCausalLM", "gate_up_proj"), ("GraniteMoeForCausalLM", "gate_up_proj"),
}  # fmt: skip


def test_the_order_is_that_of_the_rule_whatever_the_base_is_stored_as(tmp_path: Path) -> None:
    """Quantized files hold tensors of other names and shapes, whose modules have the same outputs."""
    for name, module in (("GptOssForCausalLM", "mlp.experts"), ("GPTNeoXForCausalLM", "attention.query_key_value")):
        base = tiny_checkpoint(name, tmp_path / name, **CLASSES[name].values)
        checkpoint = open_checkpoint(str(base), CheckpointOptions())
        assert checkpoint is not None
        architecture = load_target(find_plugin(f"model:{name}")[2].target)()
        info, loader = architecture.describe(checkpoint.config), SafetensorsLoader()
        entries = {entry.name: entry for entry in loader.tensors(checkpoint)}
        path = next(key for key in entries if f".0.{module}" in key).partition(module)[0] + module
        config = AdapterConfig({}, 8)
        plain, packed = (
            Places(info, BaseModel(Rules(architecture.weights(info)), loader, found)).find(path, config)
            for found in (entries, {})
        )
        assert plain == packed
        assert any(candidate.place.order for candidate in plain)


STACKS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
SIZES = {  # of the hidden states, and of an expert
    "OlmoeForCausalLM": ((48, 24), (48, 48)), "Qwen3MoeForCausalLM": ((48, 24),), "MixtralForCausalLM": ((48, 48),),
    "GptOssForCausalLM": ((48, 48), (48, 24)), "Llama4ForCausalLM": ((48, 48), (48, 24)),
}  # fmt: skip


@pytest.mark.parametrize("name", SIZES)
def test_stacks_of_experts_whose_sizes_coincide(name: str, tmp_path: Path) -> None:
    stacks = [stack.replace("mlp", "feed_forward") for stack in STACKS] if "Llama4" in name else STACKS
    for hidden, size in SIZES[name]:
        for targets in (stacks[:1], stacks[1:], stacks):
            folder = tmp_path / f"{hidden}-{size}-{len(targets)}-{targets[0][-9:]}"
            values = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 1 if "Llama4" in name else 2}
            sizes = {"hidden_size": hidden, "intermediate_size": size, "moe_intermediate_size": size}
            options = {"target_modules": [], "target_parameters": targets}
            expected = saved(name, {**values, **sizes}, options, folder)
            assert deviation(logits(name, folder, True), expected) < 1e-4


ORDERS: dict[str, dict[str, dict[str, float]]] = {
    "a short name before a long one": {"alpha_pattern": {"k_proj": 16, "model.layers.0.self_attn.k_proj": 64}},
    "an expression before a name": {"alpha_pattern": {r".*layers\.0\.self_attn\..*": 64, "q_proj": 16}},
    "a beginning that is none": {"alpha_pattern": {"^layers.0.self_attn.q_proj": 64, "self_attn": 2}},
    "a dot for any character": {"alpha_pattern": {"self.attn.q.proj": 64, "q_proj": 16}},
    "ranks, too": {"rank_pattern": {r"layers.0\..*": 6, "q_proj": 2}, "alpha_pattern": {"(q|k)_proj$": 3}},
    "groups and counts": {"alpha_pattern": {r"layers\.\d{1,2}\.self_attn\.[qk]_proj": 64}},
    "looking ahead": {"alpha_pattern": {r"(?!.*layers\.0\.).*q_proj": 64}},
}


@pytest.mark.parametrize("order", ORDERS)
def test_patterns_mean_what_they_mean_to_peft(order: str, tmp_path: Path) -> None:
    options = {"target_modules": ["q_proj", "k_proj"], **ORDERS[order]}
    expected = saved("llama", {}, options, tmp_path)
    assert deviation(logits("llama", tmp_path, True), expected) < 1e-4


TARGETS: dict[str, dict[str, Any]] = {
    "an expression": {"target_modules": r".*layers\.(0|1)\.(self_attn|mlp)\..*_proj"},
    "without some": {"target_modules": ALL, "exclude_modules": ["layers.0.mlp.up_proj", "v_proj"]},
    "without what an expression says": {"target_modules": ALL, "exclude_modules": r".*\.1\..*"},
    "some layers": {"target_modules": ALL, "layers_to_transform": [1]},
    "one layer, of a pattern": {"target_modules": ALL, "layers_to_transform": 0, "layers_pattern": "layers"},
    "all linears": {"target_modules": "all-linear"},
    "roots": {"target_modules": ALL, "use_rslora": True, "rank_pattern": {"q_proj": 2}},
    "the embedding": {"target_modules": ["embed_tokens", "lm_head"], "alpha_pattern": {"embed_tokens": 3}},
}


@pytest.mark.parametrize("target", TARGETS)
def test_targets_mean_what_they_mean_to_peft(target: str, tmp_path: Path) -> None:
    """Of a file that holds more than its configuration targets peft takes a part: such a file is refused."""
    options = TARGETS[target]
    expected = saved("llama", {"tie_word_embeddings": False}, options, tmp_path)
    assert deviation(logits("llama", tmp_path, True), expected) < 1e-4
    if {"exclude_modules", "layers_to_transform"} & options.keys():
        config = tmp_path / "adapter" / "adapter_config.json"
        said = json.loads(config.read_text())
        saved("llama", {}, {"target_modules": ALL}, tmp_path)
        config.write_text(json.dumps(said))
        with pytest.raises(WeightMismatch, match="does not target it"):
            logits("llama", tmp_path, True)
