"""Random configurations of every family against transformers: valid ones, with keys left out so that the library's
defaults count, in old and new spellings. One prompt's logits of each."""

from __future__ import annotations

import dataclasses
import json
import os
import random
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from lmkit_testing import ModelConformance
from lmkit_testing.checkpoints import COMMON, FAMILIES, randomize, tiny_checkpoint
from lmkit_testing.model import deviation, load_tiny, prompt, reference
from lmkit_testing.specs import find_plugin
from lmkit_testing.steps import ModelDriver
from safetensors.torch import load_file, save_file

from .classes import conformance_classes

ROUNDS = int(os.environ.get("CONFIGURATIONS", "0"))  # of all families; 0: a few of some
LENGTH = 29
LARGEST = 3_000_000  # parameters
ACTS = ("silu", "swish", "gelu", "gelu_new", "gelu_pytorch_tanh", "gelu_fast", "relu", "relu2")
# Names of keys, or of what they end with -> what is drawn. Keys that a family has not are left alone.
DRAWS: Mapping[str, Callable[[random.Random, Mapping[str, Any]], Any]] = {
    "hidden_act": lambda n, c: n.choice(ACTS),
    "activation_function": lambda n, c: n.choice(ACTS),
    "hidden_activation": lambda n, c: n.choice(ACTS),
    "rms_norm_eps": lambda n, c: n.choice((1e-5, 1e-6, 0.01)),
    "norm_eps": lambda n, c: n.choice((1e-5, 1e-6, 0.01)),
    "layer_norm_eps": lambda n, c: n.choice((1e-5, 0.01)),
    "layer_norm_epsilon": lambda n, c: n.choice((1e-5, 0.01)),
    "num_key_value_heads": lambda n, c: n.choice((1, 2, 4)),
    "head_dim": lambda n, c: n.choice((8, 12, 16)),
    "sliding_window": lambda n, c: n.choice((7, 11, 64, None)),
    "layer_types": lambda n, c: None,
    "max_window_layers": lambda n, c: n.choice((0, 1, 2)),
    "sliding_window_pattern": lambda n, c: n.choice((2, 3)),
    "first_k_dense_replace": lambda n, c: n.choice((0, 1, 2)),
    "decoder_sparse_step": lambda n, c: n.choice((1, 2)),
    "mlp_only_layers": lambda n, c: n.choice(([], [0], [1])),
    "num_experts_per_tok": lambda n, c: n.choice((1, 2, 3)),
    "partial_rotary_factor": lambda n, c: n.choice((0.5, 1.0)),
    "final_logit_softcapping": lambda n, c: n.choice((None, 5.0)),
    "attn_logit_softcapping": lambda n, c: n.choice((None, 5.0)),
    "query_pre_attn_scalar": lambda n, c: n.choice((7, 24)),
    "routed_scaling_factor": lambda n, c: n.choice((1.0, 1.7)),
    "n_shared_experts": lambda n, c: n.choice((1, 2)),
    "q_lora_rank": lambda n, c: n.choice((None, 24)),
    "word_embed_proj_dim": lambda n, c: n.choice((24, 48)),
    "time_step_min": lambda n, c: n.choice((0.001, 0.1)),
    "moe_norm_min": lambda n, c: n.choice((1e-12, 0.9)),
    "n_inner": lambda n, c: n.choice((None, 72)),
}  # fmt: skip
SCALES = ("multiplier", "_scaling", "_scale", "scale_emb", "scale_depth")
LEFT_ALONE = (
    "use_cache", "output_", "return_dict", "is_decoder", "is_encoder_decoder", "cross", "tie_encoder", "use_bfloat16",
    "use_mamba_kernels", "gradient", "torchscript", "summary", "router_aux", "cache_", "use_associative", "use_xlstm",
)  # fmt: skip
KINDS_OF_LAYERS = ("gemma3_text", "gemma3n_text", "mellum", "olmo3")  # each has rotary parameters of its own
OTHER_ROPE = {"gpt_neox": ("rotary_emb_base", "rotary_pct")}
# Every file has these. Of what else is missing the library's default counts.
KEPT = (
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "intermediate_size",
    "d_model",
    "n_embd",
    "max_position_embeddings",
    "moe_intermediate_size",
    "n_routed_experts",
    "v_head_dim",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "num_experts_per_tok",
    "layers_block_type",
    "eos_token_id",
    "bos_token_id",
    "pad_token_id",
)
SILU = (
    "BambaForCausalLM", "FalconH1ForCausalLM", "FalconMambaForCausalLM", "GraniteMoeHybridForCausalLM",
    "JambaForCausalLM", "KimiLinearForCausalLM", "Mamba2ForCausalLM", "MambaForCausalLM", "OlmoHybridForCausalLM",
    "Qwen3NextForCausalLM", "Qwen3_5ForCausalLM", "Qwen3_5MoeForCausalLM",
)  # fmt: skip
# Key -> the families that take one value of it, which all released files have, and refuse others by name.
STRICT: Mapping[str, tuple[str, ...]] = {
    "rope_parameters": ("Mistral4ForCausalLM", "Ministral3ForCausalLM"),
    "hidden_act": (*SILU, "ApertusForCausalLM"),  # xielu
    "num_experts_per_tok": ("Llama4ForCausalLM", "PhiMoEForCausalLM", "PhimoeForCausalLM"),
    "sliding_window": ("MiniMaxForCausalLM", "NemotronHForCausalLM"),
    "norm_topk_prob": ("DeepseekV2ForCausalLM",),
    "mlp_bias": ("DeepseekV2ForCausalLM",),
    "decoder_sparse_step": ("FlintForCausalLM",),
    "no_bias": ("MptForCausalLM",),
    "use_bidirectional_attention": ("Gemma3ForCausalLM",),
    "n_shared_experts": ("NemotronHForCausalLM",),
    "residual_in_fp32": ("NemotronHForCausalLM",),
    "tie_word_embeddings": ("Zamba2ForCausalLM",),
    "use_long_context": ("Zamba2ForCausalLM",),
    "apply_residual_connection_post_layernorm": ("BloomForCausalLM",),
}


def fields(config_class: Any) -> dict[str, Any]:
    """Key -> its default, of those that the class itself declares."""
    found = {}
    for field in dataclasses.fields(config_class):
        if field.name in config_class.__annotations__:
            missing = field.default is dataclasses.MISSING
            found[field.name] = None if missing else field.default
    return found


def ropes(numbers: random.Random) -> dict[str, Any]:
    """Rotary parameters as newer files have them."""
    theta = {"rope_theta": numbers.choice((10000.0, 500.0))}
    return numbers.choice(
        (
            {"rope_type": "default"},
            {"rope_type": "linear", "factor": 4.0},
            {"rope_type": "dynamic", "factor": 4.0},
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "beta_fast": 16,
             "attention_factor": 0.9},
            {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
             "original_max_position_embeddings": 32},
        )
    ) | theta  # fmt: skip


def draw(kit: Any, config_class: Any, numbers: random.Random) -> dict[str, Any]:
    """A configuration as a file has it."""
    variants = [{}, *kit.variants.values()]
    values = {**COMMON, **FAMILIES.get(kit.family, ("", "", {}))[2], **kit.values, **numbers.choice(variants)}
    second = config_class.attribute_map
    values = {
        second.get(key, key): value for key, value in values.items() if key not in second or second[key] not in values
    }
    known = fields(config_class)
    for key, default in sorted(known.items()):
        fixed = any(part in key for part in LEFT_ALONE) or kit.name() in STRICT.get(key, ())
        if fixed or numbers.random() < 0.5:
            continue
        if isinstance(default, bool):
            values[key] = numbers.random() < 0.5
        elif key in DRAWS:
            values[key] = DRAWS[key](numbers, values)
        elif isinstance(default, float) and key.endswith(SCALES):
            values[key] = numbers.choice((0.5, 1.0, 1.5))
    drawn = "rope_parameters" in known and kit.name() not in STRICT["rope_parameters"] and numbers.random() < 0.5
    if drawn and config_class.model_type in KINDS_OF_LAYERS:
        values["rope_parameters"] = {"full_attention": ropes(numbers), "sliding_attention": ropes(numbers)}
    elif drawn and not nested(values.get("rope_parameters")):
        values["rope_parameters"] = ropes(numbers)
    if "layers_block_type" in values and "n_groups" in values:  # these files do not count their layers
        values.pop("num_hidden_layers", None)
    for key in sorted(values):
        name = next((other for other, name in second.items() if name == key), key)
        if key not in KEPT and name not in KEPT and numbers.random() < 0.15:
            del values[key]
    return respelled(values, config_class, numbers)


def nested(rope: Any) -> bool:
    return isinstance(rope, Mapping) and any(isinstance(value, Mapping) for value in rope.values())


def respelled(values: dict[str, Any], config_class: Any, numbers: random.Random) -> dict[str, Any]:
    """Some keys as older files call them, or under a second name that the class knows."""
    values[numbers.choice(("dtype", "torch_dtype"))] = "float32"
    for other, name in config_class.attribute_map.items():
        if name in values and numbers.random() < 0.3:
            values[other] = values.pop(name)
    rope = values.get("rope_parameters")
    if nested(rope) and config_class.model_type == "gemma3_text" and numbers.random() < 0.5:  # before there were kinds
        rope = values.pop("rope_parameters")
        values["rope_theta"] = rope["full_attention"].pop("rope_theta", 1e6)
        values["rope_local_base_freq"] = rope["sliding_attention"].pop("rope_theta", 1e4)
        values["rope_scaling"] = rope["full_attention"]
    elif rope and not nested(rope) and numbers.random() < 0.5:
        rope = dict(values.pop("rope_parameters"))
        theta, partial = OTHER_ROPE.get(config_class.model_type, ("rope_theta", "partial_rotary_factor"))
        values[theta] = rope.pop("rope_theta", 10000.0)
        if "partial_rotary_factor" in rope:
            values[partial] = rope.pop("partial_rotary_factor")
        if rope.get("rope_type", "default") != "default":
            values["rope_scaling"] = {"type": rope.pop("rope_type"), **rope}
    return values


@dataclasses.dataclass
class Case:
    kit: Any
    seed: int

    @property
    def name(self) -> str:
        return f"{self.kit.name()}-{self.seed}"


def made(case: Case) -> tuple[dict[str, Any], Any]:
    """A configuration that transformers takes, and its model."""
    import transformers

    name = case.kit.family or case.kit.name()
    name = FAMILIES[name][1] if name in FAMILIES else name
    model_class = getattr(transformers, name)
    for attempt in range(50):
        numbers = random.Random(f"{case.name} {attempt}")
        values = draw(case.kit, model_class.config_class, numbers)
        try:
            config = model_class.config_class.from_dict(json.loads(json.dumps(values)))
            with torch.device("meta"):
                empty = model_class(config)
            if sum(p.numel() for p in empty.parameters()) > LARGEST:
                continue
            config = model_class.config_class.from_dict(json.loads(json.dumps(values)))
            model = randomize(model_class, config, case.seed, "float32", 0.3).eval()
            ids = torch.tensor([prompt(97, LENGTH, case.seed)])
            with torch.no_grad():
                logits = model(ids).logits[0]
        except Exception:
            continue
        if not logits.isfinite().all():
            continue
        return {**values, "architectures": [case.kit.name()], "model_type": model_class.config_class.model_type}, (
            model,
            logits,
        )
    raise AssertionError("transformers takes none of 50 configurations")


def families() -> list[Any]:
    """The conformance classes of native architectures, but not of multimodal ones: their text part has another name."""
    found = {kit.name(): kit for kit in conformance_classes() if issubclass(kit, ModelConformance)}
    return [kit for name, kit in sorted(found.items()) if not name.endswith("ForConditionalGeneration") and own(kit)]


def own(kit: type[ModelConformance]) -> bool:
    """Whether released files have the names and keys of the library's class."""
    return "name_architecture" not in vars(kit) and (kit.family in ("", kit.name()) or kit.family in FAMILIES)


def cases() -> list[Case]:
    kits = families()
    if ROUNDS:
        return [Case(kit, seed) for kit in kits for seed in range(ROUNDS)]
    return [Case(kit, number) for number, kit in enumerate(random.Random(0).sample(kits, 20))]


@pytest.mark.parametrize("case", cases(), ids=lambda case: case.name)
def test_configuration(case: Case, tmp_path: Path) -> None:
    values, (model, expected) = made(case)
    model.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(values))
    loaded = load_tiny(tmp_path, find_plugin(case.kit.plugin)[2].target, "float32")
    got = ModelDriver(loaded, "float32").run(0, prompt(97, LENGTH, case.seed), LENGTH)
    assert deviation(got, expected) < 1e-3, json.dumps(values)


@pytest.mark.parametrize("same", [False, True])
def test_a_head_of_its_own_in_a_tied_file(same: bool, tmp_path: Path) -> None:
    """The file's head counts, where it is not the embedding."""
    tiny_checkpoint("llama", tmp_path, tie_word_embeddings=True)
    tensors = load_file(tmp_path / "model.safetensors")
    embedding = tensors["model.embed_tokens.weight"]
    tensors["lm_head.weight"] = embedding.clone() if same else embedding.flip(0).contiguous()
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    ids = prompt(97, LENGTH)
    with torch.no_grad():
        expected = reference(tmp_path, "float32")(torch.tensor([ids])).logits[0]
    loaded = load_tiny(tmp_path, find_plugin("model:LlamaForCausalLM")[2].target, "float32")
    assert deviation(ModelDriver(loaded, "float32").run(0, ids, LENGTH), expected) < 1e-4
    assert loaded.weight_bytes == 4 * (loaded.info.num_parameters + (0 if same else embedding.numel()))
