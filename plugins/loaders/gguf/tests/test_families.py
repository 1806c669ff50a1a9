"""Every architecture of the table: a file written with llama.cpp's names gives the logits of the same checkpoint."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lmkit.api import UnsupportedModel
from lmkit_loader_gguf.config import open_gguf
from lmkit_loader_gguf.families import FAMILIES
from lmkit_testing.checkpoints import tiny_checkpoint
from lmkit_testing.model import deviation, drive_default

pytest.importorskip("gguf", reason="files are written with the library gguf")
from lmkit_testing.gguf_files import write

EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
GEMMA = {"head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 8, "tie_word_embeddings": True}
ROUTED = {
    "n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
    "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, "routed_scaling_factor": 2.0,
}  # fmt: skip
DELTA = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 6, "linear_key_head_dim": 12, "linear_value_head_dim": 12,
    "head_dim": 16, "layer_types": ["linear_attention", "full_attention"],
}  # fmt: skip
LATENT = {
    "kv_lora_rank": 32, "q_lora_rank": None, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16,
    "n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
    "first_k_dense_replace": 1, "num_key_value_heads": 4, "n_group": 1, "topk_group": 1, "head_dim": 8,
}  # fmt: skip
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", {}),
    "llama experts": ("MixtralForCausalLM", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen2": ("Qwen2ForCausalLM", {}),
    "qwen2moe": ("Qwen2MoeForCausalLM", {**EXPERTS, "shared_expert_intermediate_size": 48, "norm_topk_prob": False}),
    "qwen3": ("Qwen3ForCausalLM", {"head_dim": 16}),
    "qwen3moe": ("Qwen3MoeForCausalLM", {**EXPERTS, "head_dim": 16, "norm_topk_prob": True}),
    "gemma": ("GemmaForCausalLM", {"head_dim": 16, "tie_word_embeddings": True}),
    "gemma2": ("Gemma2ForCausalLM", GEMMA),
    "gemma3": ("Gemma3ForCausalLM", {**GEMMA, "num_hidden_layers": 7}),
    "phi3": ("Phi3ForCausalLM", {"pad_token_id": 0}),
    "granite": (
        "GraniteForCausalLM",
        {"embedding_multiplier": 3.0, "residual_multiplier": 0.5, "attention_multiplier": 0.3, "logits_scaling": 2.0},
    ),
    "olmo2": ("Olmo2ForCausalLM", {}),
    "smollm3": ("SmolLM3ForCausalLM", {"pad_token_id": 0, "num_hidden_layers": 4}),
    "stablelm": ("StableLmForCausalLM", {"use_qkv_bias": True}),
    "starcoder2": ("Starcoder2ForCausalLM", {"sliding_window": None, "use_bias": True}),
    "command-r": ("CohereForCausalLM", {"logit_scale": 0.5, "tie_word_embeddings": True}),
    "arcee": ("ArceeForCausalLM", {}),
    "seed_oss": ("SeedOssForCausalLM", {"head_dim": 16}),
    "cohere2": (
        "Cohere2ForCausalLM",
        {"logit_scale": 0.5, "tie_word_embeddings": True, "num_hidden_layers": 4, "sliding_window": 8},
    ),
    "olmoe": ("OlmoeForCausalLM", {"num_experts": 4, "num_experts_per_tok": 2}),
    "ernie4_5": ("Ernie4_5ForCausalLM", {"head_dim": 16}),
    "hunyuan-dense": ("HunYuanDenseV1ForCausalLM", {"head_dim": 16}),
    "nemotron": ("NemotronForCausalLM", {}),
    "glm4": ("Glm4ForCausalLM", {"head_dim": 16, "pad_token_id": 0}),
    "gpt-oss": (
        "GptOssForCausalLM",
        {
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "head_dim": 16,
            "sliding_window": 8,
            "rope_parameters": {
                "rope_type": "yarn",
                "factor": 4.0,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "truncate": False,
                "original_max_position_embeddings": 16,
                "rope_theta": 10000.0,
            },
        },
    ),
    "deepseek2": ("DeepseekV2ForCausalLM", LATENT),
    "deepseek2 v3": ("DeepseekV3ForCausalLM", {**LATENT, "q_lora_rank": 24, "n_group": 2, "topk_group": 1}),
    "granitemoe": (
        "GraniteMoeForCausalLM",
        {"num_local_experts": 4, "embedding_multiplier": 3.0, "attention_multiplier": 0.3, "logits_scaling": 2.0},
    ),
    "lfm2": ("Lfm2ForCausalLM", {"layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False}),
    "falcon": ("FalconForCausalLM", {"new_decoder_architecture": False}),
    "gpt2": ("GPT2LMHeadModel", {}),
    "llama4": (
        "Llama4ForCausalLM",
        {
            "num_local_experts": 4,
            "num_hidden_layers": 4,
            "interleave_moe_layer_step": 2,
            "intermediate_size_mlp": 64,
            "intermediate_size": 48,
            "head_dim": 16,
        },
    ),
    "glm4moe": ("Glm4MoeForCausalLM", {**ROUTED, "use_qk_norm": True, "head_dim": 16}),
    "dots1": ("Dots1ForCausalLM", {**ROUTED, "norm_topk_prob": True, "num_key_value_heads": 4}),
    "ernie4_5-moe": (
        "Ernie4_5_MoeForCausalLM",
        {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 32, "moe_layer_start_index": 1},
    ),
    "lfm2moe": (
        "Lfm2MoeForCausalLM",
        {
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "num_dense_layers": 1,
            "layer_types": ["conv", "full_attention", "conv"],
            "num_hidden_layers": 3,
            "tie_word_embeddings": True,
        },
    ),
    "minimax-m2": (
        "MiniMaxM2ForCausalLM",
        {
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "head_dim": 16,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
        },
    ),
    "phi2": ("PhiForCausalLM", {}),
    "olmo": ("OlmoForCausalLM", {"clip_qkv": 0.5}),
    "mamba": ("MambaForCausalLM", {"intermediate_size": 96}),
    "mamba2": ("Mamba2ForCausalLM", {"num_heads": 12, "head_dim": 8, "n_groups": 2, "state_size": 16}),
    "qwen35": ("Qwen3_5ForCausalLM", DELTA),
    "qwen35moe": ("Qwen3_5MoeForCausalLM", {**DELTA, **EXPERTS, "shared_expert_intermediate_size": 40}),
    "qwen3next": (
        "Qwen3NextForCausalLM",
        {**DELTA, **EXPERTS, "shared_expert_intermediate_size": 40, "norm_topk_prob": True},
    ),
    "qwen2vl": ("Qwen2ForCausalLM", {}),
    "qwen3vl": ("Qwen3ForCausalLM", {"head_dim": 16}),
    "qwen3vlmoe": ("Qwen3MoeForCausalLM", {**EXPERTS, "head_dim": 16, "norm_topk_prob": True}),
    "gptneox": ("GPTNeoXForCausalLM", {"hidden_size": 64}),
    "bloom": ("BloomForCausalLM", {}),
    "mpt": ("MptForCausalLM", {}),
    "starcoder": ("GPTBigCodeForCausalLM", {}),
    "exaone4": ("Exaone4ForCausalLM", {"num_hidden_layers": 4, "sliding_window": 8, "sliding_window_pattern": 4}),
}
TOKENS = [3, 17, 10, 42, 8, 27, 20, 5, 61, 15, 33, 9]


def test_every_family_has_a_case() -> None:
    assert {name.removesuffix(" v3") for name in CASES} == set(FAMILIES)


@pytest.mark.parametrize("family", list(CASES))
@pytest.mark.one_in(9)
def test_logits_are_those_of_the_checkpoint(family: str, tmp_path: Path) -> None:
    architecture, values = CASES[family]
    folder = tiny_checkpoint(architecture, tmp_path, **values)
    file = write(folder, tmp_path / "model.gguf", family.partition(" ")[0])
    expected = drive_default(folder, "float32", "native").run(0, TOKENS, 5)
    got = drive_default(file, "float32", "native").run(0, TOKENS, 5)
    assert deviation(got, expected) < 1e-5
    assert torch.equal(got.argmax(-1), expected.argmax(-1))


LLAMACPP = os.environ.get("LLAMACPP_PYTHON")  # a Python with llama-cpp-python
EXPECTS: dict[str, dict[str, Any]] = {  # what it takes for granted in every file
    "deepseek2": {"q_lora_rank": 24},
    "exaone4": {"sliding_window": None, "layer_types": ["full_attention"] * 4},
    "olmoe": {"num_key_value_heads": 4},
    "stablelm": {"partial_rotary_factor": 0.5},
}
SCRIPT = Path(__file__).parents[4] / "tests" / "quant_parity" / "logits_of_llamacpp.py"


@pytest.mark.skipif(LLAMACPP is None, reason="LLAMACPP_PYTHON names no Python with llama-cpp-python")
@pytest.mark.parametrize("family", list(CASES))
def test_llama_cpp_computes_the_same(family: str, tmp_path: Path) -> None:
    """What the kit writes is what converters write: llama.cpp gives the checkpoint's logits, but for its rounding."""
    architecture, values = CASES[family]
    folder = tiny_checkpoint(architecture, tmp_path, **{**values, **EXPECTS.get(family, {})})
    file = write(folder, tmp_path / "model.gguf", family.partition(" ")[0], add_tokenizer_model="no_vocab")
    command = [str(LLAMACPP), str(SCRIPT), str(file), str(tmp_path / "logits.npy"), *map(str, TOKENS)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr[-1000:]
    got = torch.from_numpy(np.load(tmp_path / "logits.npy"))
    assert deviation(got, drive_default(folder, "float32", "native").run(0, TOKENS, 5)) < 0.01


def test_layers_that_predict_further_tokens_are_passed_over(tmp_path: Path) -> None:
    folder = tiny_checkpoint("Glm4MoeForCausalLM", tmp_path, **ROUTED)
    more = {f"blk.2.{name}.weight": np.zeros((4, 4), np.float32) for name in ("attn_q", "nextn.eh_proj", "ffn_gate")}
    file = write(folder, tmp_path / "model.gguf", "glm4moe", more=more)
    expected = drive_default(folder, "float32", "native").run(0, TOKENS, 5)
    assert deviation(drive_default(file, "float32", "native").run(0, TOKENS, 5), expected) < 1e-5


def llama3_factors(head: int, theta: float, values: dict[str, float]) -> np.ndarray:
    """As the converter of llama.cpp writes what Llama 3 does to rotary frequencies."""
    frequencies = theta ** (-np.arange(0, head, 2) / head)
    lengths = 2 * np.pi / frequencies
    low, high, original = (
        values[key] for key in ("low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    )
    smooth = (original / lengths - low) / (high - low)
    between = 1 / ((1 - smooth) / values["factor"] + smooth)
    return np.where(lengths < original / high, 1, np.where(lengths > original / low, values["factor"], between))


def test_factors_of_rotary_frequencies(tmp_path: Path) -> None:
    rope = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
    values = {"head_dim": 16, "rope_parameters": {"rope_type": "llama3", "rope_theta": 10000.0, **rope}}
    folder = tiny_checkpoint("LlamaForCausalLM", tmp_path, **values)
    factors = llama3_factors(16, 10000.0, rope).astype(np.float32)
    assert len(set(factors.tolist())) > 2
    file = write(folder, tmp_path / "model.gguf", "llama", more={"rope_freqs.weight": factors})
    expected = drive_default(folder, "float32", "native").run(0, TOKENS, 5)
    assert deviation(drive_default(file, "float32", "native").run(0, TOKENS, 5), expected) < 1e-5


@pytest.mark.parametrize("kind", ["linear", "yarn"])
def test_scaled_positions(kind: str, tmp_path: Path) -> None:
    rope = {"rope_type": kind, "rope_theta": 10000.0, "factor": 4.0}
    if kind == "yarn":
        rope["original_max_position_embeddings"] = 16
    folder = tiny_checkpoint("LlamaForCausalLM", tmp_path, rope_parameters=rope)
    file = write(folder, tmp_path / "model.gguf", "llama")
    expected = drive_default(folder, "float32", "native").run(0, TOKENS, 5)
    assert deviation(drive_default(file, "float32", "native").run(0, TOKENS, 5), expected) < 1e-5


@pytest.mark.parametrize(
    ("method", "value", "says"),
    [
        ("add_clamp_kqv", 3.0, "attention.clamp_kqv"),
        ("add_rope_scaling_yarn_log_mul", 0.5, "rope.scaling.yarn_log_multiplier"),
        ("add_value_length", 8, "attention.value_length"),
        ("add_rope_scaling_factor", 2.0, "rope.scaling.factor"),
    ],
)
def test_keys_that_are_not_understood_are_refused(method: str, value: Any, says: str, tmp_path: Path) -> None:
    folder = tiny_checkpoint("LlamaForCausalLM", tmp_path)
    file = write(folder, tmp_path / "model.gguf", "llama", **{method: value})
    with pytest.raises(UnsupportedModel, match=says):
        open_gguf(str(file))


def test_architectures_that_are_not_here_are_refused(tmp_path: Path) -> None:
    folder = tiny_checkpoint("Qwen2ForCausalLM", tmp_path)
    file = write(folder, tmp_path / "model.gguf", "xverse")
    with pytest.raises(UnsupportedModel, match=r"general\.architecture.*qwen2moe"):
        open_gguf(str(file))


def test_a_folder_with_one_file_is_meant(tmp_path: Path) -> None:
    folder = tiny_checkpoint("LlamaForCausalLM", tmp_path / "plain")
    (tmp_path / "made").mkdir()
    file = write(folder, tmp_path / "made" / "x.gguf", "llama")
    found = open_gguf(str(tmp_path / "made"))
    assert found is not None
    assert found.path == file
    assert open_gguf(str(folder)) is None
